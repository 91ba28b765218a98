"""Decode steps whose layers are compiled: layers that are built alike share one program.

torch.compile sees one layer's forward and is given every layer in turn. It compiles again only where its own guards
find a difference. A whole decoder as one graph takes many times as long to compile and is about as fast. All tensors of
a step but those that one layer hands to the next stay the same (`DecodeBatch`). So the arguments of each layer's
program are collected once, when torch's guards have chosen it. Later steps run the programs without guards.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from lean.cache.kv_cache import KVCache, LayerCache
from lean.errors import ModelError
from lean.model.carrier import Carrier
from lean.model.layer_calls import Layer, batch_of, carrier_of
from lean.model.mixers import PackedStates

Backend = str | Callable[[torch.fx.GraphModule, list[torch.Tensor]], Callable[..., Any]]
_MOST_PROGRAMS = 1024  # for one number of rows: at worst every layer has its own


class _OneLayer:
    """The cache as one layer sees it. No number of the layer is part of a program, nor where its bytes lie."""

    def __init__(self, cache: LayerCache | None) -> None:
        self._cache = cache

    def find(self, index: int) -> tuple[int, LayerCache]:
        """See `KVCache.find`."""
        assert self._cache is not None
        return 0, self._cache


Path = tuple[Any, ...]  # the place or keyword of an argument of a layer, then keys inside it


@dataclass(frozen=True)
class _Program:
    """A layer's compiled code and what it is called with.

    Attributes:
        code: takes the graph's inputs, returns its outputs.
        inputs: of the graph. Those at ``places`` are arguments of the layer, the others are always the same.
        returns: what the layer returns, made from the outputs and its arguments.
    """

    code: Callable[..., Sequence[Any]]
    inputs: list[Any]
    places: tuple[tuple[int, Path], ...]
    returns: Callable[[Sequence[Any], tuple[Any, ...], dict[str, Any]], Any]

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for place, path in self.places:
            self.inputs[place] = _at(path, args, kwargs)
        return self.returns(self.code(*self.inputs), args, kwargs)


def _at(path: Path, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    first = path[0]
    value = args[first] if type(first) is int else kwargs[first]
    for key in path[1:]:
        value = value[key]
    return value


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[Path, torch.Tensor]:
    """The tensors among a layer's arguments and in their tuples, lists and dictionaries."""
    found: dict[Path, torch.Tensor] = {}

    def note(value: Any, path: Path) -> None:
        if isinstance(value, torch.Tensor):
            found[path] = value
        elif isinstance(value, tuple | list | dict):
            for key, part in value.items() if isinstance(value, dict) else enumerate(value):
                note(part, (*path, key))

    for key, value in (*enumerate(args), *kwargs.items()):
        note(value, (key,))
    return found


def _attributes(layer: torch.nn.Module) -> list[int]:
    """The attributes of a layer's modules, and what their containers hold, by identity."""
    found: list[int] = []

    def note(value: Any, depth: int) -> None:
        found.append(id(value))
        if depth and isinstance(value, tuple | list | set | dict):
            for part in (*value, *value.values()) if isinstance(value, dict) else value:
                note(part, depth - 1)

    for part in layer.modules():
        note(vars(part), 3)
    return found


def _program(
    noted: tuple[Callable[..., Any], tuple[Any, ...], Sequence[Any]], found: Any, given: dict[Path, torch.Tensor]
) -> _Program | None:
    """The program of a layer that was given tensors and has returned ``found``.

    None where it returns a tensor that is neither an output of the graph nor one of its arguments.
    """
    code, inputs, outputs = noted
    paths = {id(tensor): path for path, tensor in reversed(given.items())}
    places = tuple((place, paths[id(value)]) for place, value in enumerate(inputs) if id(value) in paths)
    numbers = {id(output): number for number, output in enumerate(outputs)}
    if isinstance(found, torch.Tensor) and id(found) in numbers:
        number = numbers[id(found)]
        return _Program(code, list(inputs), places, lambda outputs, args, kwargs: outputs[number])
    leaves, shape = tree_flatten(found)
    if any(isinstance(leaf, torch.Tensor) and id(leaf) not in (numbers | paths) for leaf in leaves):
        return None

    def returns(outputs: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def part(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            return outputs[numbers[id(leaf)]] if id(leaf) in numbers else _at(paths[id(leaf)], args, kwargs)

        return tree_unflatten([part(leaf) for leaf in leaves], shape)

    return _Program(code, list(inputs), places, returns)


def _call(layer: torch.nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return forward(layer, *args, **kwargs)


class LayerPrograms:
    """Compiles the layers of decode steps of one number of rows."""

    def __init__(self, backend: Backend, cache: KVCache, may_run: bool = True) -> None:
        """``backend``: torch.compile's. ``may_run``: run what it has compiled; else the same graph uncompiled."""
        self._backend, self._cache, self._may_run = backend, cache, may_run
        self._noted: list[tuple[Callable[..., Any], tuple[Any, ...], Sequence[Any]]] = []
        # A copy of the function has its own code: torch keeps what it compiles by the code.
        own = types.FunctionType(_call.__code__.replace(), _call.__globals__, _call.__name__)
        self._compiled = torch.compile(own, fullgraph=True, dynamic=False, backend=self._noting)

    def _noting(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        """The back end, with code that notes how it is called."""
        code = torch._dynamo.lookup_backend(self._backend)(graph, inputs)
        if not self._may_run:
            code = graph.forward

        def call(*arguments: Any) -> Any:
            found = code(*arguments)
            self._noted.append((code, arguments, found))
            return found

        return call

    def run(self, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, _Program | None]:
        """(what a layer returns, its program for steps on the same tensors: None where there is more to do)."""
        given, attributes = _tensors(args, kwargs), _attributes(layer.module)
        self._noted.clear()
        with torch._dynamo.config.patch(recompile_limit=_MOST_PROGRAMS, accumulated_recompile_limit=_MOST_PROGRAMS):
            forward = getattr(layer.forward, "__func__", None)
            if forward is None:
                raise ModelError("the forward of one of its layers was replaced")
            found = self._compiled(layer.module, forward, args, self._alone(layer, kwargs))
        same = _tensors(args, kwargs).items() == given.items() and _attributes(layer.module) == attributes
        if len(self._noted) != 1 or not same:
            return found, None
        return found, _program(self._noted.pop(), found, given)

    def _alone(self, layer: Layer, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The keyword arguments of a layer, with nothing in them of other layers."""
        batch, cache, states = batch_of(kwargs), None, None
        assert batch is not None
        if len(layer.attention) > 1 or len(layer.states) > 1:
            raise ModelError("one of its layers attends more than once, or has more than one state")
        turn = batch.sink_turn
        if layer.attention:
            [number] = layer.attention
            cache = self._cache.layers[number].alone()
            turn = turn and replace(turn, layers={0: turn.layers.get(number)})
        if self._cache.states is not None:
            states = self._cache.states.of_layer(*(layer.states or (-1,)))
        own = {"attention_batch": replace(batch, layer_runner=None, sink_turn=turn), "kv_cache": _OneLayer(cache)}
        carrier = carrier_of(kwargs)
        if carrier is None:
            return {**kwargs, **own}
        made = PackedStates(own, states, batch.states) if states is not None else Carrier(own)
        return {name: made if value is carrier else value for name, value in kwargs.items()}


class StepPrograms:
    """A `LayerRunner` for steps on the same tensors. It compiles each layer at its first call and keeps its program."""

    def __init__(self, layers: LayerPrograms) -> None:
        self._layers = layers
        self._of: dict[torch.nn.Module, _Program] = {}

    def __call__(self, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        program = self._of.get(layer.module)
        if program is not None:
            return program.run(args, kwargs)
        found, program = self._layers.run(layer, args, kwargs)
        if program is not None:
            self._of[layer.module] = program
        return found
