"""`kv_write` puts the bytes of `lean.quant.encode` where the design says, and nothing anywhere else."""

import pytest
import torch
from attention_oracle import FILLS, KV_DTYPES, Heads, PagedCache, Rule, Tokens, exact_formats, filled

from lean.kernels.layout import KVLayout
from lean.kernels.ops import LayerPool, kv_write, paged_attention
from lean.kernels.parts import read_slots
from lean.quant import KVFormat, encode, parse_kv_dtype, quantize_dequantize, rotate_back

DIMS = [(16, 16), (24, 40), (72, 72), (64, 128), (256, 256)]


def aligned(nbytes: int) -> int:
    return (nbytes + 15) // 16 * 16


def parts_of(
    block: torch.Tensor, offset: int, heads: Heads, formats: tuple[KVFormat, KVFormat], block_size: int
) -> list[torch.Tensor]:
    """Views of one block, [K codes | K scales | V codes | V scales] from ``offset`` on, each [kv_head, slot, bytes]."""
    views = []
    for fmt, dim in zip(formats, (heads.k_dim, heads.v_dim)):
        scale_bytes = {"int8": 2, "fp8": 2, "int4": -(-dim // 32)}.get(fmt.name, -(-dim // 64) * (fmt.bits < 8))
        for row_bytes in (dim * fmt.bits // 8, scale_bytes):
            nbytes = heads.num_kv_heads * block_size * row_bytes
            views.append(block[offset : offset + nbytes].view(heads.num_kv_heads, block_size, row_bytes))
            offset += aligned(nbytes)
    return views


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("rotated_exact", [False, True], ids=["quantized pool", "exact pool"])
def test_the_encoded_bytes_lie_at_the_documented_offsets_and_nothing_else_changes(
    kv_dtype: str, dims: tuple[int, int], rotated_exact: bool
) -> None:
    heads, block_size = Heads(2, 2, *dims), 8
    formats = parse_kv_dtype(kv_dtype)
    if rotated_exact:
        formats = exact_formats(formats, torch.bfloat16)
    layout = KVLayout(*formats, heads.num_kv_heads, *dims, block_size)
    offset, count = layout.nbytes, 11
    tokens = Tokens.random(count, heads)
    # Slots in no order over blocks 1, 2 and 4; block 3 and the null block stay untouched.
    free = torch.cat([torch.arange(8, 24), torch.arange(32, 40)])
    slots = free[torch.randperm(24, generator=torch.Generator().manual_seed(0))[:count]]
    for fill in FILLS:
        arena = filled((5, 3 * layout.nbytes), fill)
        wanted = arena.clone()
        kv_write(LayerPool(arena, layout, offset), tokens.key, tokens.value, slots)
        rows = []
        for x, fmt in zip((tokens.key, tokens.value), formats):
            codes, scales = encode(x, fmt)
            rows += [codes, scales.contiguous().view(torch.uint8)]
        for i, slot in enumerate(slots.tolist()):
            parts = parts_of(wanted[slot // block_size], offset, heads, formats, block_size)
            for part, own in zip(parts, rows):
                part[:, slot % block_size] = own[i]
        assert torch.equal(arena, wanted)


@pytest.mark.parametrize("kv_dtype", ["fp32", "int8", "int4"])
def test_the_last_layer_of_the_last_block_is_whole(kv_dtype: str) -> None:
    heads, formats = Heads(3, 3, 24, 24), parse_kv_dtype(kv_dtype)
    layout = KVLayout(*formats, 3, 24, 24, 8)
    arena = filled((3, 2 * layout.nbytes), "0x7f")
    before = arena.clone()
    tokens = Tokens.random(16, heads)
    kv_write(LayerPool(arena, layout, layout.nbytes), tokens.key, tokens.value, torch.arange(8, 24))
    codes, scales = encode(tokens.value[-1, -1], formats[1])
    *_, v_codes, v_scales = parts_of(arena[2], layout.nbytes, heads, formats, 8)
    assert torch.equal(v_codes[-1, -1], codes)
    assert torch.equal(v_scales[-1, -1], scales.view(torch.uint8))
    assert torch.equal(arena[:, : layout.nbytes], before[:, : layout.nbytes])
    assert torch.equal(arena[0], before[0])


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_negative_slots_are_padding(kv_dtype: str) -> None:
    heads = Heads()
    tokens = Tokens.random(6, heads)
    layout = KVLayout(*parse_kv_dtype(kv_dtype), heads.num_kv_heads, heads.k_dim, heads.v_dim, 8)
    padded, plain, untouched = (filled((3, layout.nbytes), "0xff") for _ in range(3))
    kv_write(LayerPool(padded, layout, 0), tokens.key, tokens.value, torch.tensor([9, -1, 10, -1, -7, 23]))
    kept = torch.tensor([0, 2, 5])
    kv_write(LayerPool(plain, layout, 0), tokens.key[kept], tokens.value[kept], torch.tensor([9, 10, 23]))
    assert torch.equal(padded, plain)
    pool = LayerPool(untouched, layout, 0)
    kv_write(pool, tokens.key, tokens.value, torch.full((6,), -1))
    kv_write(pool, tokens.key[:0], tokens.value[:0], torch.zeros(0, dtype=torch.int64))
    assert torch.equal(untouched, filled((3, layout.nbytes), "0xff"))


def test_a_slot_written_again_holds_the_newer_token() -> None:
    tokens, newer = (Tokens.random(8, Heads(), seed=seed) for seed in range(2))
    cache = PagedCache(Heads(), "int4", [8])
    cache.write([(0, tokens, 0, 8)])
    cache.write([(0, newer, 0, 8)])
    fresh = PagedCache(Heads(), "int4", [8])
    fresh.write([(0, newer, 0, 8)])
    assert torch.equal(cache.pools[0].arena, fresh.pools[0].arena)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8", "int4", "bf16"])
def test_equal_input_values_give_equal_bytes_in_every_input_dtype(kv_dtype: str, dtype: torch.dtype) -> None:
    tokens = Tokens.random(20, Heads(), dtype=torch.bfloat16)
    as_float = Tokens(*(x.float() for x in vars(tokens).values()))
    if dtype is torch.float16:
        as_float = Tokens(*(x.half().float() for x in vars(tokens).values()))
    typed = Tokens(*(x.to(dtype) for x in vars(as_float).values()))
    caches = [PagedCache(Heads(), kv_dtype, [20]) for _ in range(2)]
    for cache, own in zip(caches, (as_float, typed)):
        cache.write([(0, own, 0, 20)])
    assert torch.equal(caches[0].pools[0].arena, caches[1].pools[0].arena)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8", "int4"])
def test_extreme_finite_tokens_leave_no_nan_in_the_cache(kv_dtype: str) -> None:
    heads = Heads(1, 1, 32, 32)
    tokens = Tokens.random(6, heads)
    size = torch.tensor([0.0, 1e-30, 1e-6, 1e4, 1e9, 1e30])[:, None, None]
    tokens = Tokens(tokens.query, tokens.query_sink, tokens.key.clamp(-1, 1) * size, tokens.value.clamp(-1, 1) * size)
    cache = PagedCache(heads, kv_dtype, [6])
    cache.write([(0, tokens, 0, 6)])
    rows = torch.cat([cache.attend([(0, tokens, i, i + 1)], Rule(window=1))[0] for i in range(6)])
    assert rows.isfinite().all()
    assert not rows[0].any()


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_single_slots_can_be_read_back(kv_dtype: str) -> None:
    tokens = Tokens.random(20, Heads())
    cache = PagedCache(Heads(), kv_dtype, [20])
    cache.write([(0, tokens, 0, 20)])
    pool, table = cache.pools[0], cache.tables[0][0].long()
    slots = torch.stack([table[1] * 16 + 3, table[0] * 16 + 15])  # positions 19 and 15
    for read, x, fmt in zip(
        read_slots(pool.arena, pool.layout, pool.offset, slots),
        (tokens.key, tokens.value),
        parse_kv_dtype(kv_dtype),
    ):
        assert torch.equal(rotate_back(read) if fmt.rotate else read, quantize_dequantize(x[[19, 15]], fmt))


@pytest.mark.parametrize("kv_dtype", ["int8", "k8v4"])
def test_blocks_beyond_two_gigabytes_are_reached(kv_dtype: str) -> None:
    """Byte offsets need 64 bits. The arena is never touched but for four blocks, so it costs no memory."""
    heads = Heads(2, 1, 64, 64)
    layout = KVLayout(*parse_kv_dtype(kv_dtype), 1, 64, 64, 16)
    stride, count = 1 << 20, 4200
    arena = torch.empty(count, stride, dtype=torch.uint8)
    pool = LayerPool(arena, layout, stride - layout.nbytes)
    table = torch.tensor([[count - 1, 2049, 1, 4097]], dtype=torch.int32)
    arena[[0, *table[0].tolist()]] = 0xFF
    tokens = Tokens.random(60, heads)
    i = torch.arange(60)
    kv_write(pool, tokens.key, tokens.value, table[0, i // 16].long() * 16 + i % 16)
    small = PagedCache(heads, kv_dtype, [60])
    small.write([(0, tokens, 0, 60)])
    for block, other in zip(table[0].tolist(), small.tables[0][0].tolist()):
        own = small.pools[0].arena[other, layout.nbytes : 2 * layout.nbytes]
        assert torch.equal(arena[block, -layout.nbytes :], own)
    ends = torch.tensor([0, 60], dtype=torch.int32)
    rows = paged_attention(tokens.query, pool, table, ends, ends[1:], scale=0.25)
    assert torch.equal(rows, small.attend([(0, tokens, 0, 60)], Rule())[0])


@pytest.mark.parametrize("block_size", [8, 32, 256])
@pytest.mark.parametrize("dim", [8, 24, 64, 128, 256])
@pytest.mark.parametrize("kv_dtype", ["bf16", "int8", "fp8", "int4", "k8v4"])
def test_a_pool_spends_the_bytes_of_its_format_and_less_than_64_more_per_block(
    kv_dtype: str, dim: int, block_size: int
) -> None:
    """The bytes per token that a layout states are those that the arena holds."""
    layout = KVLayout(*parse_kv_dtype(kv_dtype), 3, dim, dim, block_size)
    groups = -(-dim // 32)
    per_vector = {"bf16": 2 * dim, "int8": dim + 2, "fp8": dim + 2, "int4": dim // 2 + groups}
    k, v = ("int8", "int4") if kv_dtype == "k8v4" else (kv_dtype, kv_dtype)
    assert layout.bytes_per_token == 3 * (per_vector[k] + per_vector[v])
    assert 0 <= layout.nbytes - block_size * layout.bytes_per_token < 64
