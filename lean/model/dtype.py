"""The dtype of weights and activations: the checkpoint's, unless the GPU computes in it slowly."""

from collections.abc import Mapping
from typing import Any

import torch

from lean.quant.codecs import RAW_DTYPES

_STORED = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def choose_dtype(
    name: str, config: Any, tensors: Mapping[str, Mapping[str, Any]], device: torch.device
) -> tuple[torch.dtype, list[str]]:
    """The dtype of a model on ``device``, and lines about it for the user.

    ``auto`` is the checkpoint's dtype. A GPU before Ampere has no tensor cores for bfloat16: there it becomes float16,
    or float32 where the activations of the model can overflow float16.
    """
    dtype = getattr(torch, name) if name != "auto" else stored_dtype(config, tensors)
    overflows = _overflows_float16(config.model_type)
    notes = []
    if dtype is torch.bfloat16 and _is_slow_in_bfloat16(device):
        slow = f"{torch.cuda.get_device_name(device)} has no tensor cores for bfloat16"
        if name != "auto":
            notes.append(f"{slow}: slow" + ("" if overflows else "; --dtype float16 is faster"))
        elif overflows:
            dtype = torch.float32
            notes.append(
                f"{slow}, and the activations of {config.model_type} can overflow float16: it runs in float32, with "
                "twice the bytes; --dtype bfloat16 keeps the checkpoint's dtype"
            )
        else:
            dtype = torch.float16
            notes.append(f"{slow}: the model runs in float16; --dtype bfloat16 keeps the checkpoint's dtype")
    elif dtype is torch.float16 and overflows:
        notes.append(
            f"the activations of {config.model_type} can overflow float16: --dtype bfloat16 or float32 is safe"
        )
    return dtype, notes


def packable_dtype(asked: str, dtype: torch.dtype, notes: list[str]) -> tuple[torch.dtype, list[str]]:
    """The dtype of a model with quantized weights on a CPU, and lines about it: packed products are in bfloat16.

    ``dtype`` and ``notes``: what `choose_dtype` says of it.
    """
    if asked != "auto" or dtype is torch.bfloat16:
        return dtype, notes
    name = str(dtype).removeprefix("torch.")
    kept = f"the model runs in bfloat16, in which a CPU multiplies packed weights; --dtype {name} keeps config.json's"
    return torch.bfloat16, [kept]


def stored_dtype(config: Any, tensors: Mapping[str, Mapping[str, Any]]) -> torch.dtype:
    """What config.json says, else the dtype of the checkpoint's tensors; bfloat16 for a GGUF file."""
    dtype = getattr(config, "dtype", None)
    dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is None:
        kinds = {entry["dtype"] for entry in tensors.values()}
        dtype = next((_STORED[kind] for kind in _STORED if kind in kinds), None)
    return dtype if isinstance(dtype, torch.dtype) and dtype in RAW_DTYPES.values() else torch.bfloat16


def _overflows_float16(model_type: str) -> bool:
    """Gemma's residual stream exceeds 65,504; vLLM refuses float16 for these models too.

    Source: _FLOAT16_NOT_SUPPORTED_MODELS in vllm/config/model.py, https://github.com/vllm-project/vllm
    """
    return model_type.startswith("gemma") or model_type in ("glm4", "plamo2")


def _is_slow_in_bfloat16(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device) < (8, 0)
