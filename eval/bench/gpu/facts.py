"""What a GPU report says of the machine, and what it must not say."""

import getpass
import re
import socket
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from lean.config import EngineConfig
from lean.device import architecture
from lean.eval.environment import environment
from lean.kernels.compiling import triton_version

_PATH = re.compile(r"(?<![\w.>])~?/[^\s'\"`:;,()<>\[\]]+")


def machine_facts(device: torch.device) -> dict[str, Any]:
    """Versions and the GPU, ready for JSON: no paths, no names of users or hosts. Sizes are in bytes."""
    return environment(EngineConfig(device=str(device))) | {
        "triton": triton_version(),
        "driver": driver_version(),
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "gpu": _gpu_facts(device) if device.type == "cuda" else None,
    }


def _gpu_facts(device: torch.device) -> dict[str, Any]:
    facts = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    return {
        "name": facts.name,
        "arch": architecture(device),
        "memory": total,
        "free_memory": free,
        "multiprocessors": facts.multi_processor_count,
        "gpus": torch.cuda.device_count(),
    }


def driver_version() -> str | None:
    """The version of the GPU's driver; None where the system does not tell it."""
    with suppress(OSError, subprocess.SubprocessError):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
        if number := re.match(r"\d+(\.\d+)+", found):
            return number[0]
    with suppress(OSError):
        return Path("/sys/module/amdgpu/version").read_text(encoding="utf-8").strip()
    return None


def without_names(text: str) -> str:
    """A text, of an error for example, without the paths and the names of the user and the host that it holds."""
    names = [socket.gethostname(), socket.gethostname().split(".")[0], Path.home().name if _has_home() else ""]
    with suppress(OSError, KeyError):
        names.append(getpass.getuser())
    text = _PATH.sub("<path>", text)
    for name in filter(None, names):
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "<name>", text)
    return text


def _has_home() -> bool:
    try:
        Path.home()
    except RuntimeError:
        return False
    return True
