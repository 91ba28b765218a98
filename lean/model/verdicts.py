"""Whether packed weights are too slow on this CPU: measured once, then kept in lean's folder.

A measurement varies with what else runs. Two starts that decided differently would compute other bits, and share no
prefix cache.
"""

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Literal

import torch

from lean.machine.processor import cpu_features, cpu_name
from lean.quant import trial
from lean.store.home import NoHome, cache_dir, exclusive, write_atomically

FILE = "packed-weights.json"
_VERSION = 1  # of the measurement


def is_slow(kind: Literal["int4", "int8"], outputs: int, inputs: int) -> bool:
    """`lean.quant.trial.is_slow`, as the first start on this CPU with this torch found it.

    Where lean's folder cannot be written it is measured by every process.
    """
    shape, folder = f"{kind} {outputs}x{inputs}", None
    with suppress(NoHome):
        folder = cache_dir()
        if (found := _read(folder / FILE).get(_machine(), {}).get(shape)) is not None:
            return found
    verdict = trial.is_slow(kind, outputs, inputs)
    if folder is not None:
        with suppress(OSError):
            verdict = _keep(folder, shape, verdict)
    return verdict


def _machine() -> str:
    """What a verdict holds for."""
    features = hashlib.sha256(cpu_features().encode()).hexdigest()[:16]
    capability, threads = torch.backends.cpu.get_cpu_capability(), f"{torch.get_num_threads()} threads"
    return " | ".join((cpu_name(), capability, features, threads, torch.__version__, str(_VERSION)))


def _keep(folder: Path, shape: str, found: bool) -> bool:
    """Add a verdict to the file, unless another process was first; returns the one that counts. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f".{FILE}.lock").open("a") as lock:
        exclusive(lock)
        verdicts = _read(folder / FILE)
        own = {shape: found} | verdicts.get(_machine(), {})
        write_atomically(folder / FILE, json.dumps(verdicts | {_machine(): own}, indent=1).encode())
    return own[shape]


def _read(file: Path) -> dict[str, dict[str, bool]]:
    """Verdicts by machine and shape; none of a file that is missing or damaged."""
    with suppress(OSError, ValueError):
        verdicts = json.loads(file.read_text(encoding="utf-8"))
        inner = verdicts.values() if isinstance(verdicts, dict) else [None]
        if all(isinstance(own, dict) and all(type(value) is bool for value in own.values()) for own in inner):
            return verdicts
    return {}
