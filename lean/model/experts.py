"""Mixtures of experts: which products serve, and on a GPU for how many rows they do not wait for the host.

transformers has three (https://huggingface.co/docs/transformers/experts_interface). `eager` is a loop over the experts
that were chosen, whose number the host must know. `grouped_mm` is one product over rows sorted by expert, which torch
computes on the device for some GPUs, and as a loop on the host for the others. `batched_mm` copies the weights of every
row's experts and multiplies them as one batch: a read and a write more of these weights, where the loop costs launches.
So on the other GPUs lean takes `batched_mm` for few rows and `grouped_mm` for more. Packed experts, on a CPU, are
multiplied in a loop over those that were chosen.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from lean.quant.packed_experts import PackedExperts
from lean.units import ENDLESS

NAME, PACKED_NAME = "lean", "lean_packed"
PROJECTIONS = ("gate_up_proj", "up_proj", "down_proj")  # tensors [experts, ...] of transformers' interface
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


def follows_interface(module: nn.Module) -> bool:
    """Whether a module holds all experts of a layer and follows transformers' interface."""
    return hasattr(module, "has_gate") and hasattr(module, "is_transposed")


def _experts(module: nn.Module) -> Iterator[Any]:
    return (part for part in module.modules() if follows_interface(part))


def use_packed(experts: Any) -> None:
    """Multiply the experts of a layer, some of whose projections are `PackedExperts`, one by one."""
    ALL_EXPERTS_FUNCTIONS.register(PACKED_NAME, _one_by_one)
    experts.config._experts_implementation = PACKED_NAME


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


def _one_by_one(
    experts: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """See `_few_batched_else_grouped`. The experts of a row are added in their order, so its bits are its own."""
    out = torch.zeros(hidden_states.shape, dtype=torch.float32)
    count = experts.down_proj.shape[0]
    for expert in top_k_index.unique().tolist():
        if expert >= count:  # stands for no expert
            continue
        row, place = torch.where(top_k_index == expert)
        x = _projected(experts, "gate_up_proj" if experts.has_gate else "up_proj", expert, hidden_states[row])
        x = experts._apply_gate(x) if experts.has_gate else experts.act_fn(x)
        x = _projected(experts, "down_proj", expert, x)
        if getattr(experts, "has_post_expert_norm", False):
            x = experts.post_expert_norm(x)
        out.index_add_(0, row, (x * top_k_weights[row, place, None]).float())
    return out.to(hidden_states.dtype)


def _projected(experts: Any, name: str, expert: int, x: torch.Tensor) -> torch.Tensor:
    """x [rows, inputs] -> [rows, outputs] of one expert's projection, which may be packed."""
    weight = getattr(experts, name)
    bias = getattr(experts, f"{name}_bias")[expert] if experts.has_bias else None
    if not isinstance(weight, PackedExperts):
        return nn.functional.linear(x, weight[expert].t() if experts.is_transposed else weight[expert], bias)
    out = weight.product(expert, x)
    return out if bias is None else out + bias
