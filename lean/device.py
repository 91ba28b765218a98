"""The device that lean runs on, whether torch has code for it, and its free memory."""

import re
import warnings
from collections.abc import Callable, Iterator

import torch

from lean.errors import ConfigError
from lean.machine.memory import tightest_bound

GPU_SHARE = 0.9
CPU_SHARE = 0.25
_WHAT_TO_DO = "use --device cpu, or install a torch that is built for it (https://pytorch.org/get-started/locally)"


def choose_device(name: str) -> torch.device:
    """The device. ``auto`` is the first GPU that torch has code for, else the CPU.

    Raises ConfigError for a device that does not exist, or that torch has no code for.
    """
    if name == "auto":
        return next((device for device in _gpus() if lacks_code(device) is None), torch.device("cpu"))
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError("lean runs on cpu and cuda")
        device = torch.empty(1, device=device).device  # with its index
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from None
    if why := lacks_code(device):
        raise ConfigError(f"device {name!r} cannot be used: {why}: {_WHAT_TO_DO}")
    return device


def passed_over(chosen: torch.device) -> list[str]:
    """Lines for the user about GPUs that ``auto`` does not take. ``chosen``: the device that it takes."""
    why = [reason for device in _gpus() if (reason := lacks_code(device))]
    if not why or (chosen.type == "cuda" and chosen.index == 0):
        return []
    return [f"running on {chosen}: {'; '.join(why)}"]


def lacks_code(device: torch.device) -> str | None:
    """Why torch's own kernels cannot run on a device, or None. Nothing is computed there."""
    if device.type != "cuda":
        return None
    target, codes = architecture(device), torch.cuda.get_arch_list()
    if not codes or any(runs(code, target) for code in codes):
        return None
    name = torch.cuda.get_device_name(device)
    return f"{name} is {target}, and torch {torch.__version__} has code for {', '.join(codes)} only"


def architecture(device: torch.device) -> str:
    """What compilers call a GPU: ``sm_86``, ``gfx942``. Features of an AMD GPU (``gfx90a:xnack-``) are left out."""
    with warnings.catch_warnings():  # torch warns about a GPU that it has no code for in several lines
        warnings.simplefilter("ignore")
        facts = torch.cuda.get_device_properties(device)
    return facts.gcnArchName.split(":")[0] if torch.version.hip else f"sm_{10 * facts.major + facts.minor}"


def runs(code: str, target: str) -> bool:
    """Whether a GPU runs code that was compiled for another one. Both are named as compilers name them.

    Machine code (``sm_80``) runs on its major version from its minor version on, or with ``a`` on that GPU alone. PTX
    (``compute_80``) is compiled on the GPU's machine, for it and for every later one. Of AMD GPUs (``gfx90a``) each has
    its own code; ``gfx11-generic`` is for all that begin with gfx11.

    Source: https://docs.nvidia.com/cuda/cuda-compiler-driver-nvcc/#gpu-feature-list, https://llvm.org/docs/AMDGPUUsage.html
    """
    if code == target:
        return True
    if code.endswith("-generic"):
        return target.startswith(code.removesuffix("-generic").replace("-", ""))
    built, own = re.fullmatch(r"(sm|compute)_(\d+)([af]?)", code), re.fullmatch(r"sm_(\d+)", target)
    if built is None or own is None:
        return False
    kind, suffix, least, number = built[1], built[3], int(built[2]), int(own[1])
    if suffix == "a":
        return least == number
    same_major = least // 10 == number // 10
    return least <= number and (same_major or (kind == "compute" and not suffix))


def free_bytes(device: torch.device) -> int:
    """Free memory of a device, in bytes. On a CPU what the machine, control groups and resource limits leave.

    On a GPU whole segments that torch has taken from the driver and does not use count as free: torch gives them back
    when an allocation does not fit otherwise. So do the pools of recorded steps, which torch keeps: tens of MiB.
    """
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        used = stats.get("active_bytes.all.current", 0) + stats.get("inactive_split_bytes.all.current", 0)
        return driver_free_bytes(device) + max(0, stats.get("reserved_bytes.all.current", 0) - used)
    return tightest_bound().free_bytes


def driver_free_bytes(device: torch.device) -> int:
    """Memory of a GPU that no program has taken, this one included, in bytes."""
    return torch.cuda.mem_get_info(device)[0]


def peak_bytes(device: torch.device, run: Callable[[], object]) -> int:
    """Bytes that torch takes from a GPU's driver at most while ``run`` runs, beyond those that tensors hold before."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_reserved(device) - before


def cache_share(device: torch.device) -> float:
    """The fraction of free memory that the KV cache takes by default."""
    return GPU_SHARE if device.type == "cuda" else CPU_SHARE


def _gpus() -> Iterator[torch.device]:
    return (torch.device("cuda", index) for index in range(_count()))


def _count() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0
