"""Mixtures of experts on a GPU: which products serve, and for how many rows they do not wait for the host.

transformers has three (https://huggingface.co/docs/transformers/experts_interface). `eager` is a loop over the experts
that were chosen, whose number the host must know. `grouped_mm` is one product over rows sorted by expert, which torch
computes on the device for some GPUs, and as a loop on the host for the others. `batched_mm` copies the weights of every
row's experts and multiplies them as one batch: a read and a write more of these weights, where the loop costs launches.
So on the other GPUs lean takes `batched_mm` for few rows and `grouped_mm` for more.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from lean.units import ENDLESS

NAME = "lean"
# Bytes of copied weights for each expert of a layer: estimated so that copying them takes no longer than the two
# launches that the loop makes for each expert (about 8 us each, at 900 GB/s). Not measured on a GPU.
BYTES_PER_EXPERT = 4 * 2**20


def groups_on_device(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch's grouped product of this dtype reads the sizes of its groups on the device.

    Source: aten/src/ATen/native/cuda/GroupedBlas.cpp, `_grouped_mm_cuda`, in https://github.com/pytorch/pytorch. On AMD
    GPUs it depends on how torch was built, which it does not tell.
    """
    if device.type != "cuda":
        return True
    return not torch.version.hip and dtype is torch.bfloat16 and torch.cuda.get_device_capability(device)[0] in (9, 10)


def implementation(config: Any, device: torch.device, dtype: torch.dtype, deterministic: bool) -> str | None:
    """The products to load a model of this configuration with; None: transformers' default, which is `grouped_mm`."""
    if deterministic or dtype is torch.float64:
        # One plain product per expert, which can be cut into row tiles. Grouped products do not support float64.
        return "eager"
    if _top_k(config) is None or groups_on_device(device, dtype):
        return None
    ALL_EXPERTS_FUNCTIONS.register(NAME, _few_batched_else_grouped)
    return NAME


def most_rows_without_host(module: nn.Module, device: torch.device, dtype: torch.dtype) -> int:
    """Rows of the largest step whose experts are multiplied without the host; ENDLESS: any number; 0: none."""
    return min((_most_rows(experts, device, dtype) for experts in _experts(module)), default=ENDLESS)


def _experts(module: nn.Module) -> Iterator[Any]:
    """The modules that hold all experts of a layer and follow transformers' interface."""
    return (part for part in module.modules() if hasattr(part, "has_gate") and hasattr(part, "is_transposed"))


def _most_rows(experts: Any, device: torch.device, dtype: torch.dtype) -> int:
    name = experts.config._experts_implementation
    if name == "batched_mm" or (name == "grouped_mm" and groups_on_device(device, dtype)):
        return ENDLESS
    if name != NAME:
        return 0
    top_k = _top_k(experts.config)
    return 0 if top_k is None else _most_pairs(experts) // top_k


def _top_k(config: Any) -> int | None:
    """Experts that a row chooses; None without experts, or where layers differ in it."""
    found = getattr(config, "num_experts_per_tok", None)  # transformers' name for all models
    return found if type(found) is int and found > 0 else None


def _most_pairs(experts: Any) -> int:
    """Most pairs of a row and an expert whose weights are copied."""
    weights = (experts.gate_up_proj if experts.has_gate else experts.up_proj), experts.down_proj
    number = experts.down_proj.shape[0]
    return number * number * BYTES_PER_EXPERT // sum(weight.nbytes for weight in weights)


def _few_batched_else_grouped(
    experts: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """hidden_states [rows, hidden_size], the chosen experts and their weights [rows, top_k] -> [rows, hidden_size]."""
    name = "batched_mm" if top_k_index.numel() <= _most_pairs(experts) else "grouped_mm"
    return ALL_EXPERTS_FUNCTIONS[name](experts, hidden_states, top_k_index, top_k_weights)
