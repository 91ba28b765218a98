"""A numeric self-test: the kernels that serve a device against the torch reference, on the same pool."""

from dataclasses import replace
from typing import Any

import torch

from lean.kernels import reference
from lean.kernels.call import AttentionCall, WriteCall
from lean.kernels.layout import KVLayout
from lean.kernels.ops import LayerPool, kv_write, paged_attention
from lean.quant.codecs import raw_format
from lean.quant.formats import parse_kv_dtype

_HEADS, _GROUP, _DIM, _BLOCK = 2, 3, 64, 32
_LENGTHS = (1, 33, 180)  # of sequences: the last one brings a chunk of a prompt, the others a token each
_PROMPT = 40
_RULE: dict[str, Any] = {"window": 100, "num_sink_tokens": 4, "residual_length": 20, "num_exact_sinks": 4}


class _Random:
    """Draws the same numbers in every run."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.device, self.dtype = device, dtype

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.device, self.dtype)

    def permutation(self, count: int) -> torch.Tensor:
        return torch.randperm(count, generator=self.generator)


def worst_error(device: torch.device, kv_dtype: str, dtype: torch.dtype) -> float:
    """Largest difference of attention's outputs from the reference's, over the largest output; infinite where bytes
    that ``kv_write`` leaves differ, or anything is not finite.

    One step decodes two sequences and prefills a chunk, with a window, sinks, a residual and permuted block tables.
    """
    random = _Random(device, dtype)
    k_format, v_format = parse_kv_dtype(kv_dtype)
    blocks = [-(-length // _BLOCK) for length in _LENGTHS]
    layout = KVLayout(k_format, v_format, _HEADS, _DIM, _DIM, _BLOCK)
    k_exact, v_exact = (replace(raw_format(dtype), rotate=fmt.rotate) for fmt in (k_format, v_format))
    main, exact = (
        LayerPool(torch.full((sum(blocks) + 1, own.nbytes), 255, dtype=torch.uint8, device=device), own, 0)
        for own in (layout, replace(layout, k_format=k_exact, v_format=v_exact))
    )
    order = (1 + random.permutation(sum(blocks))).int()
    tables = torch.nn.utils.rnn.pad_sequence(list(order.split(blocks)), batch_first=True).to(device)
    if not _writes_the_same_bytes([main, exact], tables, random):
        return float("inf")
    found, wanted = _outputs(main, exact, tables, random)
    if not found.isfinite().all():
        return float("inf")
    return float((found - wanted).abs().max() / wanted.abs().max())


def _writes_the_same_bytes(pools: list[LayerPool], tables: torch.Tensor, random: _Random) -> bool:
    """Fill the pools; whether the reference leaves the same bytes."""
    written = []
    for table, length in zip(tables, _LENGTHS):
        position = torch.arange(length, device=random.device)
        slots = table[position // _BLOCK].long() * _BLOCK + position % _BLOCK
        written.append((random.normal(length, _HEADS, _DIM), random.normal(length, _HEADS, _DIM), slots))
    for pool in pools:
        theirs = pool.arena.clone()
        for key, value, slots in written:
            kv_write(pool, key, value, slots)
            reference.kv_write(WriteCall(theirs, key, value, slots, 0, _BLOCK, *pool.codes))
        if not torch.equal(pool.arena, theirs):
            return False
    return True


def _outputs(
    main: LayerPool, exact: LayerPool, tables: torch.Tensor, random: _Random
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention by the kernels and by the reference, float32 [rows, q_heads, dim]."""
    shape = 2 + _PROMPT, _HEADS * _GROUP, _DIM
    query, turned = random.normal(*shape), random.normal(*shape)
    starts = torch.tensor([0, 1, 2, 2 + _PROMPT], dtype=torch.int32, device=random.device)
    lengths = torch.tensor(_LENGTHS, dtype=torch.int32, device=random.device)
    scale = _DIM**-0.5
    found = paged_attention(
        query, main, tables, starts, lengths,
        scale=scale, query_sink=turned, exact=exact, exact_block_tables=tables, **_RULE,
    )  # fmt: skip
    wanted = reference.paged_attention(
        AttentionCall(
            query, turned, main.arena, tables, exact.arena, tables, starts, lengths,
            sink_logits=None, layer_offset=0, exact_layer_offset=0, block_size=_BLOCK, num_kv_heads=_HEADS, v_dim=_DIM,
            k_format=main.codes[0], v_format=main.codes[1],
            exact_k_format=exact.codes[0], exact_v_format=exact.codes[1],
            scale=scale, softcap=0.0, **_RULE,
        )
    )  # fmt: skip
    return found.float(), wanted.float()
