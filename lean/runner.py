"""Runs one step: packs the scheduled chunks, calls the model, and reads logits off hidden states."""

from contextlib import AbstractContextManager, nullcontext

import torch

from lean.attention import AttentionBatch
from lean.block_manager import BlockManager
from lean.kernels.reference import read_slots
from lean.kv_cache import KVCache
from lean.model import LoadedModel
from lean.products import RowTiledProducts
from lean.scheduler import Chunk

LOGIT_SLICE = 64  # rows of logits that exist at once when many are wanted


class Runner:
    """Binds a model to a cache. Holds no request state."""

    def __init__(self, model: LoadedModel, cache: KVCache, manager: BlockManager, deterministic: bool) -> None:
        self._model = model
        self._cache = cache
        self._manager = manager
        self._deterministic = deterministic
        self.position_offset = 0  # added to every position the rotary sees; attention is relative, so tests can move it

    def _products(self) -> AbstractContextManager:
        return RowTiledProducts() if self._deterministic else nullcontext()

    def _batch(self, chunks: list[Chunk]) -> AttentionBatch:
        size = self._manager.block_size
        lengths = [chunk.end - chunk.start for chunk in chunks]
        positions = torch.cat([torch.arange(chunk.start, chunk.end) for chunk in chunks])
        slots, tables = [], []
        for pool in range(len(self._manager.pools)):
            ids = [torch.tensor(self._manager.table(chunk.request.id, pool)) for chunk in chunks]
            tables.append(torch.nn.utils.rnn.pad_sequence(ids, batch_first=True).int())
            rows = torch.repeat_interleave(torch.arange(len(chunks)), torch.tensor(lengths))
            slots.append(tables[-1][rows, positions // size].long() * size + positions % size)
        device = self._model.device
        return AttentionBatch(
            query_start_loc=torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device),
            seq_lens=torch.tensor([chunk.end for chunk in chunks], dtype=torch.int32, device=device),
            positions=positions.to(device),
            slot_mapping=tuple(s.to(device) for s in slots),
            block_tables=tuple(t.to(device) for t in tables),
        )

    @torch.inference_mode()
    def run(self, chunks: list[Chunk]) -> torch.Tensor:
        """Write the chunks' K/V and return the last hidden state of every row, [num_tokens, hidden_size]."""
        self._cache.copy(self._manager.copies)
        self._manager.copies.clear()
        batch = self._batch(chunks)
        ids = [token for chunk in chunks for token in chunk.token_ids]
        with self._products():
            return self._model.hidden(
                torch.tensor([ids], device=self._model.device),
                batch.positions[None] + self.position_offset,
                attention_batch=batch,
                kv_cache=self._cache,
            )

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [rows, hidden_size] -> float32 (float64 for a float64 model) logits [rows, vocab]."""
        with self._products():
            logits = self._model.logits(hidden)
        return logits if logits.dtype is torch.float64 else logits.float()

    @torch.inference_mode()
    def first_bad_layer(self, chunk: Chunk) -> int | None:
        """The first layer whose K/V of the chunk's tokens in the cache are not finite; None where all are."""
        batch = self._batch([chunk])
        for index, layer in sorted(self._cache.layers.items()):
            pool = layer.pool
            k, v = read_slots(pool.arena, pool.layout, pool.offset, batch.slot_mapping[layer.group.pool])
            if not (k.isfinite().all() and v.isfinite().all()):
                return index
        return None
