"""Layers that keep a state in the place of K/V (convolutions, linear attention, state spaces): their part of a step.

transformers' code for these layers takes sequences of one length as a batch, and mixes packed sequences up. So the rows
of a packed step are handed to them group by group: all sequences that add one token together, every other alone.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from lean.cache.states import LayerStates, StateKey, StateSlots
from lean.errors import ModelError
from lean.model.carrier import Carrier


class StateGroup(NamedTuple):
    """Rows of a packed step that a layer with states computes at once.

    Attributes:
        rows: where they lie: a slice, or int64 [rows], sequence by sequence.
        num_seqs: sequences, all with the same number of rows.
        slots: where their states lie.
        fresh: the rows are the first of their sequence, which has no state yet.
    """

    rows: slice | torch.Tensor
    num_seqs: int
    slots: StateSlots
    fresh: bool = False


class _Chunk(Protocol):
    """Tokens of a sequence from ``start`` to ``end``."""

    @property
    def start(self) -> int: ...

    @property
    def end(self) -> int: ...


def state_groups(chunks: Sequence[_Chunk], slots: Sequence[int], device: torch.device) -> tuple[StateGroup, ...]:
    """The groups of a step. ``slots``: of the chunks' sequences."""
    singles: list[int] = []  # chunks that add one token to a state
    at: list[int] = []  # the first row of each chunk
    groups, row = [], 0
    for index, chunk in enumerate(chunks):
        at.append(row)
        row += chunk.end - chunk.start
        if chunk.start and chunk.end - chunk.start == 1:
            singles.append(index)
        else:
            groups.append(
                StateGroup(slice(at[index], row), 1, StateSlots.of(slots[index : index + 1], device), not chunk.start)
            )
    if singles:
        singles.sort(key=lambda index: slots[index])  # so that their states are a slice more often
        rows = [at[index] for index in singles]
        follows = rows == list(range(rows[0], rows[0] + len(rows)))
        groups.append(
            StateGroup(
                slice(rows[0], rows[0] + len(rows)) if follows else torch.tensor(rows, device=device),
                len(rows),
                StateSlots.of([slots[index] for index in singles], device),
            )
        )
    return tuple(groups)


def with_new(state: torch.Tensor | None, new: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a convolution reads, [sequences, channels, >= width]: its last inputs (none: 0), then the new ones; and the
    last ``width`` of them."""
    if state is not None:
        whole = torch.cat([state, new], dim=-1)
    else:
        whole = torch.nn.functional.pad(new, (max(0, width - new.shape[-1]), 0))
    return whole, whole[..., -width:]


class PackedStates(Carrier):
    """The cache that a decoder with such layers is given for one step."""

    def __init__(self, arguments: dict[str, Any], states: LayerStates, groups: Sequence[StateGroup]) -> None:
        super().__init__(arguments)
        self._states, self._groups = states, groups

    def by_group(self, forward: Callable[..., torch.Tensor], hidden: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """A layer's outcome for the packed rows ``hidden`` [1, rows, width], computed group by group."""
        if other := next((name for name, value in kwargs.items() if isinstance(value, torch.Tensor)), None):
            raise ModelError(f"a layer with a state is given {other}, which lean would have to cut")
        packed, out = hidden.squeeze(0), None
        for group in self._groups:
            states = _GroupStates(self._states, group)
            found = forward(packed[group.rows].unflatten(0, (group.num_seqs, -1)), cache=states, **kwargs)
            if not isinstance(found, torch.Tensor):
                raise ModelError("a module with a state gives more than one tensor")
            states.store()
            found = found.flatten(0, 1)
            if len(self._groups) == 1 and isinstance(group.rows, slice):
                return found[None]
            if out is None:
                out = found.new_empty(packed.shape[0], *found.shape[1:])
            out[group.rows] = found
        assert out is not None
        return out[None]


class _GroupStates:
    """The cache that one layer is given for one group. It has what such layers of transformers call."""

    def __init__(self, states: LayerStates, group: StateGroup) -> None:
        self._states, self._group = states, group
        self._copies: dict[StateKey, torch.Tensor] = {}  # of states that are no slice: layers may change them in place
        self._written: set[StateKey] = set()

    def _read(self, key: StateKey) -> torch.Tensor | None:
        if self._group.fresh and key not in self._written:
            return None
        if key not in self._copies:
            found = self._states.read(key, self._group.slots)
            if self._group.slots.first is not None:
                return found
            self._copies[key] = found
        return self._copies[key]

    def _write(self, key: StateKey, values: torch.Tensor) -> None:
        if key not in self._states:
            raise ModelError(f"layer {key.layer} keeps a {key.kind} state that its first pass did not have")
        self._copies.pop(key, None)
        self._states.write(key, self._group.slots, values)
        self._written.add(key)

    def store(self) -> None:
        """Write the copies back, at the end of the layer."""
        for key, values in self._copies.items():
            self._states.write(key, self._group.slots, values)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._read(StateKey(layer_idx, "conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._read(StateKey(layer_idx, "recurrent", state_idx))

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """conv_states: new inputs [sequences, channels, tokens]. Returns them behind those that the state holds."""
        key = StateKey(layer_idx, "conv", state_idx)
        whole, last = with_new(self._read(key), conv_states, self._states[key].shape[-1])
        self._write(key, last)
        return whole

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        self._write(StateKey(layer_idx, "recurrent", state_idx), recurrent_states)
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return not self._group.fresh


def hand_over_by_group(module: torch.nn.Module) -> None:
    """Let a module with states run group by group when its cache is a `PackedStates`."""
    forward = module.forward
    names = [*inspect.signature(forward).parameters]

    def by_group(*args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs.update(zip(names, args))
        if not isinstance(kwargs.get("cache"), PackedStates):
            return forward(**kwargs)
        cache = kwargs.pop("cache")
        return cache.by_group(forward, kwargs.pop(names[0]), **kwargs)

    module.forward = by_group  # type: ignore[assignment]
