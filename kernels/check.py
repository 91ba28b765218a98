"""A numeric self-test: the kernels that serve a device against the torch reference, on the same pool."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from lean.kernels import reference
from lean.kernels.call import AttentionCall, EncodeCall, WriteCall
from lean.kernels.layout import KVLayout
from lean.kernels.ops import LayerPool, paged_attention, write_tokens
from lean.quant.codecs import raw_format
from lean.quant.formats import parse_kv_dtype

_HEADS, _GROUP, _DIM, _BLOCK = 2, 3, 64, 32
_LENGTHS = (1, 33, 180)  # of sequences
_PROMPT = 40
_RULE: dict[str, Any] = {"window": 100, "num_sink_tokens": 4, "residual_length": 40, "num_exact_sinks": 4}

Step = Callable[[], torch.Tensor]


class _Random:
    """Draws the same numbers in every run."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.device, self.dtype = device, dtype

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.device, self.dtype)

    def permutation(self, count: int) -> torch.Tensor:
        return torch.randperm(count, generator=self.generator)


@dataclass(frozen=True)
class _Pools:
    """A pool of a KV format and its exact pool, with the same block tables for both."""

    main: LayerPool
    exact: LayerPool
    tables: torch.Tensor

    @classmethod
    def empty(cls, kv_dtype: str, random: _Random) -> "_Pools":
        """Pools of NaN with permuted block tables."""
        device = random.device
        k_format, v_format = parse_kv_dtype(kv_dtype)
        blocks = [-(-length // _BLOCK) for length in _LENGTHS]
        layout = KVLayout(k_format, v_format, _HEADS, _DIM, _DIM, _BLOCK)
        k_exact, v_exact = (replace(raw_format(random.dtype), rotate=fmt.rotate) for fmt in (k_format, v_format))
        main, exact = (
            LayerPool(torch.full((sum(blocks) + 1, own.nbytes), 255, dtype=torch.uint8, device=device), own, 0)
            for own in (layout, replace(layout, k_format=k_exact, v_format=v_exact))
        )
        order = (1 + random.permutation(sum(blocks))).int()
        tables = torch.nn.utils.rnn.pad_sequence(list(order.split(blocks)), batch_first=True).to(device)
        return cls(main, exact, tables)

    def slots(self, sequence: int, positions: torch.Tensor) -> torch.Tensor:
        return self.tables[sequence][positions // _BLOCK].long() * _BLOCK + positions % _BLOCK

    def write(self, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        write_tokens(self.main, key, value, slots, self.exact, slots)

    def by_reference(self, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> list[torch.Tensor]:
        """The arenas as they must be after `write`."""
        arenas = []
        for pool in (self.main, self.exact):
            arenas.append(pool.arena.clone())
            reference.kv_write(WriteCall(arenas[-1], key, value, slots, 0, _BLOCK, *pool.codes))
        if self.main.layout.k_format.by_channel:
            k_formats = self.main.codes[0], self.exact.codes[0]
            main, exact = arenas
            reference.encode_keys(EncodeCall(main, exact, slots, slots, 0, 0, _BLOCK, _HEADS, _DIM, *k_formats))
        return arenas

    def hold(self, arenas: list[torch.Tensor]) -> bool:
        return all(torch.equal(pool.arena, arena) for pool, arena in zip((self.main, self.exact), arenas))


class _Rows:
    """Query rows of one step: the last ``prompt`` tokens of the last sequence, and one of each other."""

    def __init__(self, pools: _Pools, random: _Random, prompt: int) -> None:
        counts = torch.tensor([1] * (len(_LENGTHS) - 1) + [prompt])
        shape = int(counts.sum()), _HEADS * _GROUP, _DIM
        self.pools, self.query, self.turned = pools, random.normal(*shape), random.normal(*shape)
        self.starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int().to(random.device)
        self.lengths = torch.tensor(_LENGTHS, dtype=torch.int32, device=random.device)

    def attend(self) -> torch.Tensor:
        pools = self.pools
        return paged_attention(
            self.query, pools.main, pools.tables, self.starts, self.lengths,
            scale=_DIM**-0.5, query_sink=self.turned, exact=pools.exact, exact_block_tables=pools.tables, **_RULE,
        )  # fmt: skip

    def error(self, found: torch.Tensor) -> float:
        """Largest difference of ``found`` from the reference, over the largest output."""
        main, exact, tables = self.pools.main, self.pools.exact, self.pools.tables
        wanted = reference.paged_attention(
            AttentionCall(
                self.query, self.turned, main.arena, tables, exact.arena, tables, self.starts, self.lengths,
                sink_logits=None, layer_offset=0, exact_layer_offset=0, block_size=_BLOCK, num_kv_heads=_HEADS,
                v_dim=_DIM, k_format=main.codes[0], v_format=main.codes[1],
                exact_k_format=exact.codes[0], exact_v_format=exact.codes[1],
                scale=_DIM**-0.5, softcap=0.0, **_RULE,
            )
        ).float()  # fmt: skip
        if not found.isfinite().all():
            return float("inf")
        return float((found.float() - wanted).abs().max() / wanted.abs().max())


def worst_error(
    device: torch.device, kv_dtype: str, dtype: torch.dtype, record: Callable[[Step], Step] | None = None
) -> float:
    """Largest difference of attention's outputs from the reference's, over the largest output; infinite where bytes
    that ``kv_write`` leaves differ, or anything is not finite.

    One step decodes two sequences and prefills a chunk, another one decodes three sequences, as decode steps do. Both
    have a window, sinks, a residual and permuted block tables.

    record: makes a step that runs again without Python; with it, the step of three sequences is also recorded, and
    replayed on other inputs.
    """
    random = _Random(device, dtype)
    pools = _Pools.empty(kv_dtype, random)
    for sequence, length in enumerate(_LENGTHS):
        slots = pools.slots(sequence, torch.arange(length, device=device))
        key, value = random.normal(length, _HEADS, _DIM), random.normal(length, _HEADS, _DIM)
        wanted = pools.by_reference(key, value, slots)
        pools.write(key, value, slots)
        if not pools.hold(wanted):
            return float("inf")
    mixed, decode = _Rows(pools, random, _PROMPT), _Rows(pools, random, 1)
    errors = [rows.error(rows.attend()) for rows in (mixed, decode)]
    if record is not None:
        errors.append(_replayed_error(decode, random, record))
    return max(errors)


def _replayed_error(rows: _Rows, random: _Random, record: Callable[[Step], Step]) -> float:
    """The error of a recorded decode step that writes each sequence's last token, replayed on other tokens."""
    pools, count = rows.pools, len(_LENGTHS)
    key, value = random.normal(count, _HEADS, _DIM), random.normal(count, _HEADS, _DIM)
    last = [pools.slots(sequence, rows.lengths[sequence : sequence + 1].long() - 1) for sequence in range(count)]
    slots = torch.cat(last)

    def step() -> torch.Tensor:
        pools.write(key, value, slots)
        return rows.attend()

    replay = record(step)
    for inputs in (key, value, rows.query, rows.turned):
        inputs.copy_(random.normal(*inputs.shape))
    wanted = pools.by_reference(key, value, slots)
    found = replay()
    return rows.error(found) if pools.hold(wanted) else float("inf")
