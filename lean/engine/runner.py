"""Runs one step: packs the scheduled chunks, calls the model, and reads logits off hidden states."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy
import torch

from lean.cache.block_manager import BlockManager
from lean.cache.kv_cache import KVCache
from lean.engine.decode_steps import DecodeBatch, DecodeSteps, Step
from lean.engine.deterministic import RowTiledProducts
from lean.engine.onednn import favours_single_row, onednn_as_it_is, single_row_products
from lean.engine.scheduler import Chunk
from lean.kernels.layout import sink_shift
from lean.kernels.reference import read_slots
from lean.model.attention import AttentionBatch, Observer
from lean.model.load import LoadedModel
from lean.model.rotary import SinkRotary, SinkTurn


class Runner:
    """Binds a model to a cache. Holds no request state."""

    def __init__(self, model: LoadedModel, cache: KVCache, manager: BlockManager, deterministic: bool) -> None:
        self.model = model
        self.cache = cache
        self._manager = manager
        self._deterministic = deterministic
        self._favours_single_row = favours_single_row(model.module, model.info.dtype, model.device)
        self.sink_rotary: SinkRotary | None = None  # given where sinks stay visible beyond a window
        self.position_offset = 0  # added to every position the rotary sees; attention is relative, so tests can move it
        self.decode_steps: DecodeSteps | None = None  # given where decode steps are compiled or recorded

    def _matmul_backend(self, rows: int) -> AbstractContextManager:
        """With which kernels torch multiplies ``rows`` rows."""
        if self._deterministic:
            return onednn_as_it_is()
        return single_row_products() if rows == 1 and self._favours_single_row else nullcontext()

    @contextmanager
    def _products(self, rows: int) -> Iterator[None]:
        """How ``rows`` rows are multiplied with the weights."""
        with self._matmul_backend(rows), RowTiledProducts() if self._deterministic else nullcontext():
            yield

    @torch.inference_mode()
    def prepare_decode(
        self,
        max_num_seqs: int,
        max_model_len: int,
        backend: str | Callable | None,
        record: Callable[[Step], Step] | None,
    ) -> float:
        """Run decode steps of up to ``max_num_seqs`` sequences compiled by torch.compile's ``backend``, recorded, or
        both, from now on. Returns the seconds that took. Raises ModelError for a model that cannot."""
        model, cache = self.model, self.cache

        def decoder(input_ids: torch.Tensor, position_ids: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
            return model.hidden(input_ids, position_ids, attention_batch=batch, kv_cache=cache)

        def tiled(*inputs: Any) -> torch.Tensor:
            with RowTiledProducts():
                return decoder(*inputs)

        info = model.info
        batch = DecodeBatch(self._manager, max_num_seqs, max_model_len, model.device, info.dtype, self.sink_rotary)
        steps = DecodeSteps(
            info.source.name, tiled if self._deterministic else decoder, batch, backend=backend, record=record
        )
        seconds = steps.warm_up()
        self.decode_steps = steps
        return seconds

    def _shifts(self, positions: list[int]) -> list[int]:
        """By how much the query at each position is turned back for the sinks; empty where it never is."""
        if self.sink_rotary is None:
            return []
        group = next(group for group in self.cache.plan.groups if group.num_sink_tokens)
        return [sink_shift(position, group.window, group.num_sink_tokens) for position in positions]

    def batch(self, chunks: list[Chunk]) -> AttentionBatch:
        """Where the chunks' tokens lie in the cache."""
        size, device = self._manager.block_size, self.model.device
        lengths = [chunk.end - chunk.start for chunk in chunks]
        positions = numpy.concatenate([numpy.arange(chunk.start, chunk.end) for chunk in chunks])
        rows = numpy.repeat(numpy.arange(len(chunks)), lengths)
        blocks, slots_in_block = positions // size, positions % size
        slots, tables = [], []
        for pool in range(len(self._manager.pools)):
            ids = [numpy.frombuffer(self._manager.table(c.request.seq_id, pool), numpy.int32) for c in chunks]
            table = numpy.zeros((len(chunks), max(map(len, ids))), numpy.int32)
            for row, own in zip(table, ids):
                row[: len(own)] = own
            tables.append(torch.from_numpy(table).to(device))
            slots.append(torch.from_numpy(table[rows, blocks].astype(numpy.int64) * size + slots_in_block).to(device))
        turn, shifts = None, self._shifts(positions.tolist())
        if self.sink_rotary is not None and any(shifts):
            turn = self._turn(self.sink_rotary.back(torch.tensor(shifts), device))
        return AttentionBatch(
            query_start_loc=torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device),
            seq_lens=torch.tensor([chunk.end for chunk in chunks], dtype=torch.int32, device=device),
            positions=torch.from_numpy(positions).to(device),
            slot_mapping=tuple(slots),
            block_tables=tuple(tables),
            sink_turn=turn,
        )

    def _turn(self, turn: SinkTurn) -> SinkTurn:
        """In the dtype that every layer would make of it."""
        wide = torch.promote_types(self.model.info.dtype, torch.float32)
        return replace(turn, cos=turn.cos.to(wide), sin=turn.sin.to(wide))

    @torch.inference_mode()
    def run(self, chunks: list[Chunk], observer: Observer | None = None) -> torch.Tensor:
        """Write the chunks' K/V and return the last hidden state of every row, [num_tokens, hidden_size]."""
        self.cache.copy(self._manager.copies)
        self._manager.copies.clear()
        steps = self.decode_steps
        if steps is not None and observer is None and not self.position_offset and steps.takes(chunks):
            with self._matmul_backend(len(chunks)):  # row tiles are part of a compiled step
                return steps.run(chunks, self._shifts([chunk.start for chunk in chunks]))
        batch = replace(self.batch(chunks), observer=observer)
        ids = [token for chunk in chunks for token in chunk.token_ids]
        with self._products(len(ids)):
            return self.model.hidden(
                torch.tensor([ids], device=self.model.device),
                batch.positions[None] + self.position_offset,
                attention_batch=batch,
                kv_cache=self.cache,
            )

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [rows, hidden_size] -> float32 (float64 for a float64 model) logits [rows, vocab]."""
        with self._products(hidden.shape[0]):
            logits = self.model.logits(hidden)
        return logits if logits.dtype is torch.float64 else logits.float()

    @torch.inference_mode()
    def first_bad_layer(self, chunk: Chunk) -> int | None:
        """The first layer whose K/V of the chunk's tokens in the cache are not finite; None where all are."""
        batch = self.batch([chunk])
        for index, layer in sorted(self.cache.layers.items()):
            pool = layer.pool
            k, v = read_slots(pool.arena, pool.layout, pool.offset, batch.slot_mapping[layer.group.pool_id])
            if not (k.isfinite().all() and v.isfinite().all()):
                return index
        return None
