"""A numeric self-test: the kernels that serve a device against the torch reference, on the same pool."""

from dataclasses import replace
from typing import Any

import torch

from lean.kernels import reference
from lean.kernels.layout import KVLayout
from lean.kernels.ops import LayerPool, kv_write, paged_attention
from lean.quant.codecs import raw_format
from lean.quant.formats import parse_kv_dtype

_HEADS, _GROUP, _DIM, _BLOCK = 2, 3, 64, 32
_LENGTHS = (1, 33, 180)  # of sequences: the last one brings a prompt, the others a token each
_PROMPT = 40


def worst_error(device: torch.device, kv_dtype: str, dtype: torch.dtype) -> float:
    """Largest difference of attention's outputs from the reference's, over the largest output; infinite where bytes
    that ``kv_write`` leaves differ, or anything is not finite.

    Decodes and a prefill chunk together, with a window, sinks and a residual, over a permuted block table.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    k_format, v_format = parse_kv_dtype(kv_dtype)
    blocks = [-(-length // _BLOCK) for length in _LENGTHS]
    layout = KVLayout(k_format, v_format, _HEADS, _DIM, _DIM, _BLOCK)
    k_exact, v_exact = (replace(raw_format(dtype), rotate=fmt.rotate) for fmt in (k_format, v_format))
    layouts = [layout, replace(layout, k_format=k_exact, v_format=v_exact)]
    pools = [
        LayerPool(torch.full((sum(blocks) + 1, own.nbytes), 255, dtype=torch.uint8, device=device), own, 0)
        for own in layouts
    ]
    order = (1 + torch.randperm(sum(blocks), generator=generator)).int()
    tables = torch.nn.utils.rnn.pad_sequence(list(order.split(blocks)), batch_first=True).to(device)
    written = []
    for table, length in zip(tables, _LENGTHS):
        position = torch.arange(length, device=device)
        slots = table[position // _BLOCK].long() * _BLOCK + position % _BLOCK
        written.append((draw(length, _HEADS, _DIM), draw(length, _HEADS, _DIM), slots))
    for pool in pools:
        theirs = pool.arena.clone()
        for key, value, slots in written:
            kv_write(pool, key, value, slots)
            own = pool.layout
            reference.kv_write(theirs, key, value, slots, 0, _BLOCK, own.k_format.code, own.v_format.code)
        if not torch.equal(pool.arena, theirs):
            return float("inf")
    rows = [1, 1, _PROMPT]
    query, turned = draw(sum(rows), _HEADS * _GROUP, _DIM), draw(sum(rows), _HEADS * _GROUP, _DIM)
    starts = torch.tensor([0, 1, 2, 2 + _PROMPT], dtype=torch.int32, device=device)
    lengths = torch.tensor(_LENGTHS, dtype=torch.int32, device=device)
    rule: dict[str, Any] = {"window": 100, "num_sink_tokens": 4, "residual_length": 20, "num_exact_sinks": 4}
    main, exact = pools
    found = paged_attention(
        query,
        main,
        tables,
        starts,
        lengths,
        scale=_DIM**-0.5,
        query_sink=turned,
        exact=exact,
        exact_block_tables=tables,
        **rule,
    ).float()
    wanted = reference.paged_attention(
        query,
        turned,
        main.arena,
        tables,
        exact.arena,
        tables,
        starts,
        lengths,
        sink_logits=None,
        layer_offset=0,
        exact_layer_offset=0,
        block_size=_BLOCK,
        num_kv_heads=_HEADS,
        v_dim=_DIM,
        k_format=k_format.code,
        v_format=v_format.code,
        exact_k_format=k_exact.code,
        exact_v_format=v_exact.code,
        scale=_DIM**-0.5,
        softcap=0.0,
        **rule,
    ).float()
    if not found.isfinite().all():
        return float("inf")
    return float((found - wanted).abs().max() / wanted.abs().max())
