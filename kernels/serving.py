"""Which kernels serve a layer: those of its device, or the torch reference.

The ops ask here at every call, and so does whoever tells users what serves, or records steps.
"""

from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec

import torch

from lean.kernels import reference
from lean.kernels.call import Need
from lean.kernels.cpu import binding as cpu
from lean.kernels.layout import KVLayout
from lean.quant import KVFormat


def needs_of(layouts: Iterable[KVLayout], dtype: torch.dtype) -> list[Need]:
    """What layers with these layouts need, each need once. ``dtype``: of their queries."""
    found = (Need(own.k_format.code, own.v_format.code, own.k_dim, own.v_dim, dtype, own.v_in_k) for own in layouts)
    return list(dict.fromkeys(found))


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


@cache
def lacking(device_type: str, need: Need) -> str | None:
    """What the kernels of ``cpu`` or ``cuda`` (CUDA or HIP) lack for such a layer; None: nothing.

    The kernels are there: of ``cuda`` Triton is installed.
    """
    formats = KVFormat.from_code(need.k_format), KVFormat.from_code(need.v_format)
    if device_type == "cpu":
        return cpu.lacking(*formats, need.dtype)
    from lean.kernels.triton.launch import lacking

    return lacking(*formats, need.k_dim, need.v_dim, need.dtype, need.v_in_k)


def triton_serves(need: Need) -> bool:
    """Whether Triton's kernels serve such a layer on CUDA and HIP. Raises ValueError for an unknown LEAN_KERNELS."""
    return not reference.is_wanted() and has_triton() and lacking("cuda", need) is None


def is_recordable(device: torch.device, needs: Iterable[Need]) -> bool:
    """Whether a CUDA graph can record both ops: the reference reads sequence lengths on the host, kernels do not."""
    return device.type == "cuda" and all(map(triton_serves, needs))


def backend(device: torch.device, needs: Iterable[Need] = ()) -> str:
    """Name of the kernels that serve layers with these needs on ``device``; without needs: the usual layers.

    Where the torch reference serves, the name says why. ``LEAN_KERNELS=reference`` asks for it. Raises ValueError for
    an environment that names unknown kernels.
    """
    if device.type == "cpu":
        name = cpu.describe()
    elif reference.is_wanted():
        name = f"torch reference ({device.type}), as LEAN_KERNELS asks"
    elif device.type != "cuda" or not has_triton():
        name = f"torch reference ({device.type}), many times slower than Triton, which is not installed"
    else:
        name = "Triton"
    if name.startswith("torch reference"):
        return name
    missing = [lacking(device.type, need) for need in needs]
    if not any(missing):
        return name
    why = "; ".join(dict.fromkeys(reason for reason in missing if reason))
    if all(missing):
        return f"torch reference ({device.type}): {why}"
    return f"{name}, and for some layers the torch reference: {why}"
