"""The states of layers that keep no K/V, noted while a model's forward pass is followed on tensors without data."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from transformers.integrations import hub_kernels

from lean.cache.states import StateCache, StateKey, StateShape, StateSlots
from lean.errors import ModelError
from lean.model.carrier import Carrier
from lean.model.mixers import PackedStates, StateGroup, hand_over_by_group, with_new

T = TypeVar("T")
MakeCache = Callable[[dict[str, Any]], Carrier]

_META = torch.device("meta")
_ASKS_FOR_TORCH = "is_torchdynamo_exporting"  # the function that transformers' wrappers of kernels ask


class NotedStates:
    """What the layers of a model keep, by the calls that they make to their cache.

    Attributes:
        shapes: of all states, in the order in which they are first written.
        mixers: names of the modules that make the calls.
    """

    def __init__(self, skeleton: torch.nn.Module) -> None:
        self._skeleton = skeleton
        self._shapes: dict[StateKey, StateShape] = {}
        self._mixers: dict[torch.nn.Module, None] = {}
        self._running: list[torch.nn.Module] = []  # modules whose forward runs, the innermost last

    @property
    def shapes(self) -> tuple[StateShape, ...]:
        return tuple(self._shapes.values())

    @property
    def layers(self) -> set[int]:
        """Layers with states."""
        return {key.layer for key in self._shapes}

    @property
    def mixers(self) -> tuple[str, ...]:
        names = {module: name for name, module in self._skeleton.named_modules()}
        return tuple(names[module] for module in self._mixers)

    def begin(self, dtype: torch.dtype, run: Callable[[MakeCache], T]) -> T:
        """Note the states that a pass writes at the beginning of a sequence. Returns what ``run`` returns.

        Args:
            dtype: of the weights.
            run: a forward pass of three tokens; takes what makes its cache from the arguments to carry.
        """
        _cast(self._skeleton, dtype)
        with self._noting_modules(), _functions_of_torch():
            return run(partial(_FirstPass, self))

    def go_on(self, run: Callable[[MakeCache], object]) -> None:
        """Run a step that goes on with two sequences, as an engine does.

        Raises:
            ModelError: a layer does not read its state.
        """
        for module in self._mixers:
            hand_over_by_group(module)
        states = _WatchedStates(self.shapes, 2, _META)
        groups = [
            StateGroup(slice(0, 2), 1, StateSlots.of([1], _META)),
            StateGroup(slice(2, 3), 1, StateSlots.of([2], _META)),
        ]
        with _Uses(states) as uses, _functions_of_torch():
            run(lambda arguments: PackedStates(arguments, states, groups))
        for key in states.given:
            if key not in uses.used:
                raise ModelError(
                    f"transformers' code of layer {key.layer} forgets its {key.kind} state between chunks of a prompt"
                )

    @contextmanager
    def _noting_modules(self) -> Iterator[None]:
        """Keep account of the modules whose forward runs."""

        def enter(module: torch.nn.Module, args: Any) -> None:
            self._running.append(module)

        def leave(module: torch.nn.Module, args: Any, output: Any) -> None:
            self._running.pop()

        hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def note(self, key: StateKey, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """A state that the running module writes. ``shape``: of one sequence."""
        self._shapes.setdefault(key, StateShape(key, shape, dtype))
        self._mixers[self._running[-1]] = None


class _FirstPass(Carrier):
    """The cache of a sequence that begins: there are no states yet."""

    def __init__(self, noted: NotedStates, arguments: dict[str, Any]) -> None:
        super().__init__(arguments)
        self._noted = noted

    def update(self, *args: Any, kwargs: dict[str, Any] | None = None, **others: Any) -> Any:
        """K/V as they are. A module that does not give its keyword arguments may have them from its layer."""
        if kwargs is not None:
            kwargs.update(self.arguments)
        return args[:2]

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        whole, last = with_new(None, conv_states, conv_kernel_size or conv_states.shape[-1])
        self._noted.note(StateKey(layer_idx, "conv", state_idx), tuple(last.shape[1:]), last.dtype)
        return whole

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        shape = tuple(recurrent_states.shape[1:])
        self._noted.note(StateKey(layer_idx, "recurrent", state_idx), shape, recurrent_states.dtype)
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"its layers ask their cache for {name}, which other models do not have")


class _WatchedStates(StateCache):
    """States that remember what they gave to the sequence with several tokens, which lies in slot 1."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.given: dict[StateKey, list[torch.Tensor]] = {key: [] for key in self._states}

    def read(self, key: StateKey, slots: StateSlots) -> torch.Tensor:
        found = super().read(key, slots)
        if slots.first == 1:
            self.given[key].append(found)
        return found


class _Uses(TorchFunctionMode):
    """Notes which states torch's functions compute with. Questions about a tensor's shape and kind are no use of it."""

    def __init__(self, states: _WatchedStates) -> None:
        super().__init__()
        self._states = states
        self.used: set[StateKey] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _ASKS_ONLY.fullmatch(getattr(func, "__name__", "")):
            alive = {id(state): key for key, given in self._states.given.items() for state in given}
            self.used |= {alive[id(leaf)] for leaf in tree_leaves((args, kwargs)) if id(leaf) in alive}
        return func(*args, **(kwargs or {}))


# Properties, and functions that give a tensor's size, or make another one like it.
_ASKS_ONLY = re.compile("__get__|size|dim|stride|numel|is_[a-z_]+|[a-z]+_like|new_[a-z]+")


@contextmanager
def _functions_of_torch() -> Iterator[None]:
    """While active, transformers takes torch's functions in the place of kernels of other packages.

    Such kernels (https://github.com/fla-org/flash-linear-attention and others) need data.
    """
    if not hasattr(hub_kernels, _ASKS_FOR_TORCH):  # other releases
        yield
        return
    before = getattr(hub_kernels, _ASKS_FOR_TORCH)
    setattr(hub_kernels, _ASKS_FOR_TORCH, lambda: True)
    try:
        yield
    finally:
        setattr(hub_kernels, _ASKS_FOR_TORCH, before)


def _cast(skeleton: torch.nn.Module, dtype: torch.dtype) -> None:
    """Give the weights their dtype, as transformers does when it loads them."""
    wide = getattr(skeleton, "_keep_in_fp32_modules_strict", None) or ()
    for name, parameter in skeleton.named_parameters():
        if parameter.is_floating_point():
            kept = any(part in name for part in wide) and dtype.itemsize < 4
            parameter.data = parameter.data.to(torch.float32 if kept else dtype)
