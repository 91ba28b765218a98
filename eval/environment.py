"""The environment of a measurement: versions, machine, kernels, weights."""

import hashlib
import importlib.metadata
import os
import platform
from typing import Any

import torch

from lean.config import EngineConfig
from lean.device import choose_device
from lean.errors import ConfigError
from lean.kernels.serving import backend
from lean.machine.processor import cpu_name
from lean.store.source import ModelSource
from lean.threads import fit_threads


def environment(base: EngineConfig) -> dict[str, Any]:
    """Versions, machine and kernels, ready for JSON. Raises ConfigError where the device or its kernels are missing."""
    device = choose_device(base.device)
    try:
        kernels = backend(device)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    try:
        version = importlib.metadata.version("lean-inference")
    except importlib.metadata.PackageNotFoundError:  # run from a bare source tree
        version = "source tree"
    return {
        "lean": version,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": importlib.metadata.version("transformers"),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_name(),
        "cpus": os.cpu_count(),
        "threads": base.threads or _threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "kernels": kernels,
    }


def _threads() -> int:
    fit_threads()
    return torch.get_num_threads()


def weights_stamp(source: ModelSource) -> str:
    """A short hash of names, sizes and times of the weight files. It changes with the files; they are not read."""
    stamps = [(file.name, size, changed) for file, size, changed in source.weight_files()]
    return hashlib.sha256(repr(stamps).encode()).hexdigest()[:16]
