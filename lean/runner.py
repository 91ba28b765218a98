"""Runs one step: packs the scheduled chunks, calls the model, and reads logits off hidden states."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from lean.attention import AttentionBatch, Observer
from lean.block_manager import BlockManager
from lean.kernels.layout import sink_shift
from lean.kernels.reference import read_slots
from lean.kv_cache import KVCache
from lean.model import LoadedModel
from lean.products import RowTiledProducts
from lean.rotary import SinkRotary
from lean.scheduler import Chunk


class Runner:
    """Binds a model to a cache. Holds no request state."""

    def __init__(self, model: LoadedModel, cache: KVCache, manager: BlockManager, deterministic: bool) -> None:
        self.model = model
        self.cache = cache
        self._manager = manager
        self._deterministic = deterministic
        self.sink_rotary: SinkRotary | None = None  # given where sinks stay visible beyond a window
        self.position_offset = 0  # added to every position the rotary sees; attention is relative, so tests can move it

    def _products(self) -> AbstractContextManager:
        return RowTiledProducts() if self._deterministic else nullcontext()

    def batch(self, chunks: list[Chunk]) -> AttentionBatch:
        """Where the chunks' tokens lie in the cache."""
        size = self._manager.block_size
        lengths = [chunk.end - chunk.start for chunk in chunks]
        positions = torch.cat([torch.arange(chunk.start, chunk.end) for chunk in chunks])
        slots, tables = [], []
        for pool in range(len(self._manager.pools)):
            ids = [torch.frombuffer(self._manager.table(c.request.id, pool), dtype=torch.int32) for c in chunks]
            tables.append(torch.nn.utils.rnn.pad_sequence(ids, batch_first=True))
            rows = torch.repeat_interleave(torch.arange(len(chunks)), torch.tensor(lengths))
            slots.append(tables[-1][rows, positions // size].long() * size + positions % size)
        device = self.model.device
        turn = None
        if self.sink_rotary is not None:
            group = next(group for group in self.cache.plan.groups if group.num_sink_tokens)
            shifts = [sink_shift(p, group.window, group.num_sink_tokens) for p in positions.tolist()]
            turn = self.sink_rotary.back(torch.tensor(shifts), device) if any(shifts) else None
        return AttentionBatch(
            query_start_loc=torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device),
            seq_lens=torch.tensor([chunk.end for chunk in chunks], dtype=torch.int32, device=device),
            positions=positions.to(device),
            slot_mapping=tuple(s.to(device) for s in slots),
            block_tables=tuple(t.to(device) for t in tables),
            sink_turn=turn,
        )

    @torch.inference_mode()
    def run(self, chunks: list[Chunk], observer: Observer | None = None) -> torch.Tensor:
        """Write the chunks' K/V and return the last hidden state of every row, [num_tokens, hidden_size]."""
        self.cache.copy(self._manager.copies)
        self._manager.copies.clear()
        batch = replace(self.batch(chunks), observer=observer)
        ids = [token for chunk in chunks for token in chunk.token_ids]
        with self._products():
            return self.model.hidden(
                torch.tensor([ids], device=self.model.device),
                batch.positions[None] + self.position_offset,
                attention_batch=batch,
                kv_cache=self.cache,
            )

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [rows, hidden_size] -> float32 (float64 for a float64 model) logits [rows, vocab]."""
        with self._products():
            logits = self.model.logits(hidden)
        return logits if logits.dtype is torch.float64 else logits.float()

    @torch.inference_mode()
    def first_bad_layer(self, chunk: Chunk) -> int | None:
        """The first layer whose K/V of the chunk's tokens in the cache are not finite; None where all are."""
        batch = self.batch([chunk])
        for index, layer in sorted(self.cache.layers.items()):
            pool = layer.pool
            k, v = read_slots(pool.arena, pool.layout, pool.offset, batch.slot_mapping[layer.group.pool])
            if not (k.isfinite().all() and v.isfinite().all()):
                return index
        return None
