"""States of layers that keep no K/V: convolution windows and recurrent states, of a fixed size for every sequence."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import torch

from lean.cache.block_manager import StateCopy


class StateKey(NamedTuple):
    """Names one state of a layer. ``place`` counts states of one kind in a layer."""

    layer: int
    kind: Literal["conv", "recurrent"]
    place: int = 0


class StateShape(NamedTuple):
    """One state of one sequence. It is kept in the dtype in which the model computes it, and never quantized."""

    key: StateKey
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def bytes_of(states: Iterable[StateShape]) -> int:
    """Bytes of the states of one sequence, whatever its length."""
    return sum(state.nbytes for state in states)


def layers_of(states: Iterable[StateShape]) -> int:
    """Number of layers that keep states."""
    return len({state.key.layer for state in states})


class StateSlots(NamedTuple):
    """Where the states of some sequences lie.

    Attributes:
        ids: int64 [sequences], a slot each; 0, the null slot, for padding.
        first: the first slot where the slots follow each other, so that the states are one slice; else None.
    """

    ids: torch.Tensor
    first: int | None = None

    @classmethod
    def of(cls, slots: Sequence[int], device: torch.device) -> StateSlots:
        """The slots of sequences, in order."""
        follows = list(slots) == list(range(slots[0], slots[0] + len(slots)))
        return cls(torch.tensor(slots, device=device), slots[0] if follows else None)


class LayerStates:
    """One tensor [slots, *shape] for each state, by `StateKey`."""

    def __init__(self, states: dict[StateKey, torch.Tensor]) -> None:
        self._states = states

    def __getitem__(self, key: StateKey) -> torch.Tensor:
        return self._states[key]

    def __contains__(self, key: StateKey) -> bool:
        return key in self._states

    def read(self, key: StateKey, slots: StateSlots) -> torch.Tensor:
        """[sequences, *shape]: the states themselves where the slots follow each other, else copies."""
        state = self[key]
        if slots.first is not None:
            return state.narrow(0, slots.first, slots.ids.shape[0])
        return state.index_select(0, slots.ids)

    def write(self, key: StateKey, slots: StateSlots, values: torch.Tensor) -> None:
        """Write [sequences, *shape], converted to the state's dtype."""
        state = self[key]
        if slots.first is not None:
            state.narrow(0, slots.first, slots.ids.shape[0]).copy_(values)
        else:
            state.index_copy_(0, slots.ids, values.to(state.dtype))


class OneLayerStates(LayerStates):
    """The states of one layer, whatever layer a key names."""

    def __getitem__(self, key: StateKey) -> torch.Tensor:
        return self._states[StateKey(0, key.kind, key.place)]

    def __contains__(self, key: StateKey) -> bool:
        return StateKey(0, key.kind, key.place) in self._states


class StateCache(LayerStates):
    """The states of all layers. Slot 0 belongs to the padding of steps.

    The memory of sequences is not cleared: the states of a new one are written before they are read.
    """

    def __init__(self, shapes: Iterable[StateShape], num_slots: int, device: torch.device) -> None:
        super().__init__(
            {one.key: torch.empty(num_slots + 1, *one.shape, dtype=one.dtype, device=device) for one in shapes}
        )
        for state in self._states.values():
            state[0] = 0

    def of_layer(self, layer: int) -> OneLayerStates:
        """The states of one layer; none where it keeps none."""
        own = {key._replace(layer=0): state for key, state in self._states.items() if key.layer == layer}
        return OneLayerStates(own)

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for state in self._states.values())

    @property
    def slot_bytes(self) -> int:
        """Bytes of all states of one sequence."""
        return sum(state[0].nbytes for state in self._states.values())

    def read_slots(self, slots: Sequence[int]) -> torch.Tensor:
        """A copy of all states of some slots: uint8 [slots, slot_bytes] on the CPU."""
        rows = [state[list(slots)].cpu().reshape(len(slots), -1).view(torch.uint8) for state in self._states.values()]
        return torch.cat(rows, dim=1)

    def write_slots(self, slots: Sequence[int], rows: torch.Tensor) -> None:
        """Write what `read_slots` gave into slots."""
        sizes = [state[0].nbytes for state in self._states.values()]
        for state, part in zip(self._states.values(), rows.split(sizes, dim=1)):
            values = part.contiguous().view(state.dtype).reshape(len(slots), *state.shape[1:])
            state[list(slots)] = values.to(state.device)

    def copy(self, copies: Iterable[StateCopy]) -> None:
        """Copy the states of sequences, in order."""
        for copy in copies:
            for state in self._states.values():
                state[copy.target] = state[copy.source]
