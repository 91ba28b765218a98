"""The layers of a decoder as calls that something else may compute: a step's batch may bring its own `LayerRunner`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from lean.model.attention import AttentionBatch
from lean.model.carrier import Carrier


@dataclass(frozen=True)
class Layer:
    """One layer of a decoder.

    Attributes:
        forward: the module's own.
        attention: numbers of the attention layers inside, as the cache knows them.
        states: numbers under which the cache keeps states of the layers inside.
    """

    module: nn.Module
    forward: Callable[..., Any]
    attention: tuple[int, ...]
    states: tuple[int, ...]


class LayerRunner(Protocol):
    """Computes a layer in the place of its own forward."""

    def __call__(self, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Takes and returns what the layer's forward does."""


def hand_over(decoder: nn.Module, attention: Collection[nn.Module], mixers: Collection[nn.Module]) -> None:
    """Let a decoder's layers be computed by the `LayerRunner` of a step's batch, where it has one.

    Layers are the items of its lists of modules that hold a numbered module.

    Args:
        attention: the modules that call attention; empty: every numbered one may.
        mixers: the modules that keep states.
    """
    for path, items in decoder.named_modules():
        if not isinstance(items, nn.ModuleList) or _in_a_list(decoder, path):
            continue
        for item in items:
            numbered = [part for part in item.modules() if isinstance(getattr(part, "layer_idx", None), int)]
            states = [part for part in numbered if part in mixers]
            attends = [part for part in numbered if part in (attention or numbered)]
            if numbered:
                item.forward = _Handed(Layer(item, item.forward, _numbers(attends), _numbers(states)))


def _in_a_list(decoder: nn.Module, path: str) -> bool:
    names = path.split(".")
    above = (".".join(names[:length]) for length in range(1, len(names)))
    return any(isinstance(decoder.get_submodule(name), nn.ModuleList) for name in above)


def _numbers(modules: list[Any]) -> tuple[int, ...]:
    return tuple(sorted({module.layer_idx for module in modules}))


class _Handed:
    """The forward of a layer."""

    def __init__(self, layer: Layer) -> None:
        self._layer = layer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        batch = batch_of(kwargs)
        if batch is None or batch.layer_runner is None:
            return self._layer.forward(*args, **kwargs)
        return batch.layer_runner(self._layer, args, kwargs)


def batch_of(kwargs: Mapping[str, Any]) -> AttentionBatch | None:
    """The step's batch among the keyword arguments of a layer; None where there is none."""
    batch = kwargs.get("attention_batch")
    if batch is None:
        carrier = carrier_of(kwargs)
        batch = None if carrier is None else carrier.arguments.get("attention_batch")
    return batch


def carrier_of(kwargs: Mapping[str, Any]) -> Carrier | None:
    """The `Carrier` among the keyword arguments of a layer."""
    return next((value for value in kwargs.values() if isinstance(value, Carrier)), None)
