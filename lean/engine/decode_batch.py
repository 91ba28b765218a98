"""The inputs of decode steps: the same tensors at every step, filled in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy
import torch

from lean.cache.block_pool import NULL_BLOCK
from lean.cache.states import StateSlots
from lean.cache.tables import block_table, slots
from lean.kernels.layout import blocks_for
from lean.model.attention import AttentionBatch
from lean.model.mixers import StateGroup
from lean.model.sink_turn import SinkRotary, SinkTurn

if TYPE_CHECKING:
    from lean.cache.block_manager import BlockManager
    from lean.engine.scheduler import Chunk

# Initial width of block tables, in tokens. For a longer sequence it doubles: steps are recorded again, not compiled.
FIRST_REACH = 2**17


class _Buffer:
    """Numbers that the host writes and the device reads: one tensor on a CPU, else pinned memory and its copy."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        on_host = device.type == "cpu"
        self._host = torch.zeros(shape, dtype=dtype, pin_memory=not on_host)
        self.tensor = self._host if on_host else torch.zeros(shape, dtype=dtype, device=device)
        self.values = self._host.numpy()

    def send(self) -> None:
        """Copy the numbers to the device, in order with its work and without waiting for it.

        The host may write again at the next step, which begins after this step's logits have been read.
        """
        if self.tensor is not self._host:
            self.tensor.copy_(self._host, non_blocking=True)


@dataclass(frozen=True)
class DecodeInputs:
    """The decoder's arguments: input_ids, position_ids int64 [1, rows], and where the rows lie in the cache."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    batch: AttentionBatch


class DecodeBatch:
    """The inputs of decode steps of one number of rows: fixed tensors, filled in place.

    Rows behind the step's own are padding: slot -1, no query row (query_start_loc stays at its last value), seq_len 0.
    Kernels write nothing for padding and return zeros.
    """

    def __init__(
        self,
        manager: BlockManager,
        rows: int,
        max_model_len: int,
        device: torch.device,
        dtype: torch.dtype,
        sink_rotary: SinkRotary | None,
    ) -> None:
        """``dtype``: of the queries. ``sink_rotary``: where sinks stay visible beyond a window.

        ``width``: blocks in a sequence's row of the block tables.
        """
        self._manager, self._device, self._rotary = manager, device, sink_rotary
        self.rows = rows
        # A bounded pool's table is as wide as the others: columns are positions, and evicted ones name the null block.
        most = blocks_for(max_model_len, manager.block_size)
        self.width = min(most, blocks_for(FIRST_REACH, manager.block_size))
        self.grows = self.width < most

        def buffer(*shape: int, dtype: torch.dtype = torch.int64) -> _Buffer:
            return _Buffer(shape, dtype, device)

        self._ids, self._positions = buffer(rows), buffer(rows)
        self._starts = buffer(rows + 1, dtype=torch.int32)
        self._lens = buffer(rows, dtype=torch.int32)
        self._slots = [buffer(rows) for _ in manager.pools]
        self.has_states = manager.slots is not None
        self._states = [buffer(rows)] if self.has_states else []
        self._turn: list[_Buffer] = []
        if sink_rotary is not None:
            wide = torch.promote_types(dtype, torch.float32)
            self._turn = [buffer(rows, 1, sink_rotary.inv_freq.shape[0], dtype=wide) for _ in "cs"]
        self._make_tables()

    def _make_tables(self) -> None:
        shape = self.rows, self.width
        self._tables = [_Buffer(shape, torch.int32, self._device) for _ in self._manager.pools]

    def reserve(self, num_tokens: int) -> bool:
        """Make block tables wide enough for ``num_tokens``. True: they are new, and earlier inputs are invalid."""
        blocks = blocks_for(num_tokens, self._manager.block_size)
        if blocks <= self.width:
            return False
        while self.width < blocks:
            self.width *= 2
        self._make_tables()
        return True

    def has_room(self, num_tokens: int) -> bool:
        """Whether block tables are wide enough for ``num_tokens``."""
        return blocks_for(num_tokens, self._manager.block_size) <= self.width

    def width_for(self, num_tokens: int, least: int) -> int:
        """Blocks of the narrowest tables for ``num_tokens``: ``least`` tokens, four times as many, and so on."""
        while least < num_tokens:
            least *= 4
        return min(self.width, blocks_for(least, self._manager.block_size))

    def inputs(self, width: int, varies: bool = False) -> DecodeInputs:
        """The fixed tensors, and of their block tables the first ``width`` columns.

        varies: the same compiled step takes tables of other widths, too.
        """
        rows = self.rows
        tables = tuple(table.tensor[:, :width] for table in self._tables)
        if varies:
            for table in tables:
                torch._dynamo.mark_dynamic(table, 1)
        turn = None
        if self._rotary is not None:
            cos, sin = (part.tensor for part in self._turn)
            turn = SinkTurn(cos, sin, self._rotary.layers)
        ids, positions = self._ids.tensor, self._positions.tensor
        batch = AttentionBatch(
            query_start_loc=self._starts.tensor,
            seq_lens=self._lens.tensor,
            positions=positions,
            slot_mapping=tuple(buffer.tensor for buffer in self._slots),
            block_tables=tables,
            sink_turn=turn,
            states=tuple(StateGroup(slice(0, rows), rows, StateSlots(part.tensor)) for part in self._states),
        )
        return DecodeInputs(ids[None], positions[None], batch)

    def fill(self, chunks: Sequence[Chunk], shifts: Sequence[int]) -> None:
        """Write a step's chunks of one token each, and padding behind them.

        ``shifts``: by how many positions each query is turned back for the sinks; unused without ``sink_rotary``.
        """
        count, rows = len(chunks), self.rows
        own, rest = slice(count), slice(count, rows)
        self._ids.values[own] = [chunk.request.tokens(chunk.start, chunk.end)[0] for chunk in chunks]
        self._positions.values[own] = [chunk.start for chunk in chunks]
        self._lens.values[own] = [chunk.end for chunk in chunks]
        self._starts.values[: count + 1] = range(count + 1)
        self._starts.values[count + 1 : rows + 1] = count
        for part in (self._ids, self._positions, self._lens, *self._tables):
            part.values[rest] = 0
        seq_ids, lines = [chunk.request.seq_id for chunk in chunks], numpy.arange(count)
        for pool_id, (buffer, tables) in enumerate(zip(self._slots, self._tables)):
            buffer.values[rest] = -1
            if count:
                table = block_table(self._manager, seq_ids, pool_id)
                tables.values[own, : table.shape[1]] = table
                tables.values[own, table.shape[1] :] = 0
                buffer.values[own] = slots(table, lines, self._positions.values[own], self._manager.block_size)
        for buffer in self._states:
            buffer.values[own] = [self._manager.slot(seq_id) for seq_id in seq_ids]
            buffer.values[rest] = NULL_BLOCK
        if self._rotary is not None:
            turn = self._rotary.back(torch.tensor(shifts, dtype=torch.long), torch.device("cpu"))
            for part, values, still in zip(self._turn, (turn.cos, turn.sin), (1, 0)):
                part.values[own] = values.numpy()
                part.values[rest] = still
        fixed = self._ids, self._positions, self._lens, self._starts
        for part in (*fixed, *self._slots, *self._tables, *self._turn, *self._states):
            part.send()
