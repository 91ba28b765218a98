"""Carries a step's keyword arguments to the attention function where the layers of a model do not hand them on."""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from transformers import DynamicCache

from lean.errors import ModelError


class Carrier(DynamicCache):
    """A transformers cache that holds no K/V. Layers hand their cache on to the attention module, which calls `update`.

    The module gives `update` the keyword arguments that it will give to the attention function, so that the step's own
    can be added to them.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = arguments

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        kwargs: dict[str, Any] | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K/V as they are. Raises ModelError where the module does not give its keyword arguments."""
        if kwargs is None:
            raise ModelError("its layers do not hand keyword arguments on to the attention function")
        kwargs.update(self.arguments)
        return key_states, value_states

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, *args: Any, **kwargs: Any) -> tuple[int, int]:
        return query_length, 0


def as_cache(decoder: torch.nn.Module, carrier: Carrier) -> dict[str, Carrier]:
    """The keyword argument with which a decoder is given its cache."""
    return {"cache" if "cache" in _parameters(type(decoder).forward) else "past_key_values": carrier}


def takes_cache(decoder: torch.nn.Module) -> bool:
    """Whether a decoder can be given a cache."""
    return not _parameters(type(decoder).forward).isdisjoint(("cache", "past_key_values"))


@cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    """The names of a function's parameters."""
    return frozenset(inspect.signature(function).parameters)
