"""K by channel through the ops: the torch reference, and the C++ kernels with every instruction set forced."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from attention_oracle import FILLS, RULES, Heads, PagedCache, Rule, Tokens, error, expected, same_bits

from lean.kernels.cpu import binding, build
from lean.kernels.layout import KVLayout
from lean.kernels.ops import LayerPool, encode_keys, kv_write, write_tokens
from lean.kernels.parts import k_parts
from lean.quant import CHANNEL_TOKENS, INT3, INT8, PC4, decode_channels, encode, encode_channels, parse_kv_dtype

FORMATS = ("pc4v3", "k=pc3,v=int8", "k=pc5,v=bf16")
READ = {name: rule for name, rule in RULES.items() if rule.residual_length >= CHANNEL_TOKENS}
every_format = pytest.mark.parametrize("kv_dtype", FORMATS)
every_rule = pytest.mark.parametrize("rule", READ.values(), ids=READ)


@pytest.fixture(params=("reference", *binding.ISAS), autouse=True)
def back_end(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Every test runs with the reference and with each instruction set of this CPU."""
    if request.param == "reference":
        monkeypatch.setenv("LEAN_KERNELS", "reference")
    elif build.find_library() is None:
        pytest.skip(f"not built: {build.HOW}")
    else:
        monkeypatch.setenv("LEAN_CPU_ISA", request.param)
    try:
        binding.choose()
    except ValueError:
        pytest.skip(f"this CPU has no {request.param}")
    yield request.param
    monkeypatch.undo()
    binding.choose()
    torch.set_num_threads(1)


def cache_of(kv_dtype: str, lengths: list[int], heads: Heads, **options: object) -> PagedCache:
    return PagedCache(heads, kv_dtype, lengths, **{"block_size": 32, "exact_dtype": torch.float32, **options})


@every_rule
@every_format
def test_prefill_chunk_and_decode_in_one_batch_equal_the_formula(kv_dtype: str, rule: Rule) -> None:
    heads = Heads()
    a, b, c = (Tokens.random(count, heads, seed=count) for count in (150, 331, 100))
    cache = cache_of(kv_dtype, [150, 331, 100], heads, block_size=64)
    cache.write([(1, b, 0, 330), (2, c, 0, 45)])
    parts = [(2, c, 45, 100), (1, b, 330, 331), (0, a, 0, 150)]
    sink_logits = torch.linspace(-2, 3, heads.num_q_heads)
    for rows, (_, tokens, start, stop) in zip(cache.step(parts, rule, sink_logits), parts):
        assert error(rows, expected(tokens, kv_dtype, rule, start, stop, sink_logits)) < 4e-6


@pytest.mark.parametrize("dims", [(n, n) for n in (16, 64, 80, 96, 112, 128, 256)] + [(192, 128), (64, 16)], ids=str)
@pytest.mark.parametrize("kv_dtype", FORMATS[:2])
def test_every_head_dim_equals_the_formula_and_decodes_to_the_bits_of_prefill(
    kv_dtype: str, dims: tuple[int, int]
) -> None:
    heads, rule = Heads(5, 1, *dims), replace(READ["everything"], scale=dims[0] ** -0.5)
    tokens = Tokens.random(140, heads)
    cache = cache_of(kv_dtype, [140], heads)
    rows = cache.run(tokens, rule, 140)
    assert error(rows, expected(tokens, kv_dtype, rule)) < 4e-6
    for count in (1, 2, 5):
        assert same_bits(cache.attend([(0, tokens, 140 - count, 140)], rule)[0], rows[-count:])


@pytest.mark.parametrize("num_q_heads", [1, 2, 3, 4, 8, 9])
def test_every_group_size_equals_the_formula_and_decodes_to_the_bits_of_prefill(num_q_heads: int) -> None:
    heads, rule = Heads(num_q_heads, 1, 64, 64), Rule(residual_length=32, scale=0.125)
    tokens = Tokens.random(150, heads)
    cache = cache_of("pc4v3", [150], heads)
    rows = cache.run(tokens, rule, 150)
    assert error(rows, expected(tokens, "pc4v3", rule)) < 4e-6
    assert same_bits(cache.attend([(0, tokens, 149, 150)], rule)[0], rows[-1:])


@pytest.mark.parametrize("offset", [20.0, -100.0])
def test_channels_far_from_zero_are_scored_without_a_loss_of_digits(offset: float) -> None:
    heads, rule = Heads(3, 1, 64, 64), Rule(residual_length=32, scale=0.02)
    tokens = Tokens.random(150, heads)
    tokens.key[..., ::7] += offset
    rows = cache_of("pc4v3", [150], heads).run(tokens, rule, 150)
    assert error(rows, expected(tokens, "pc4v3", rule)) < 2e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_exact_copies_in_half_precision_are_the_source(dtype: torch.dtype) -> None:
    tokens, rule = Tokens.random(130, Heads(), dtype=dtype), READ["everything"]
    rows = cache_of("pc4v3", [130], Heads(), exact_dtype=dtype).run(tokens, rule, 130)
    wanted = expected(tokens, "pc4v3", rule)
    rounding = torch.finfo(dtype).eps / 2 * wanted.abs()
    assert ((rows.double() - wanted).abs() <= 1.001 * rounding + 4e-6 * wanted.abs().max()).all()


@every_rule
@pytest.mark.parametrize("kv_dtype", FORMATS[:2])
def test_any_chunks_give_the_bits_of_one_shot_over_poison_and_with_evicted_blocks(kv_dtype: str, rule: Rule) -> None:
    """Incomplete groups, evicted blocks and the null block hold NaN."""
    heads = Heads(4, 2, 32, 32)
    tokens = Tokens.random(200, heads)
    wanted = cache_of(kv_dtype, [200], heads, fill="zeros").run(tokens, rule, 200)
    for chunk, block_size in ((31, 32), (96, 64)):
        cache = cache_of(kv_dtype, [200], heads, block_size=block_size, seed=chunk)
        assert same_bits(cache.run(tokens, rule, chunk, evict=True), wanted), f"chunk {chunk}"
    cache = cache_of(kv_dtype, [200], heads)
    rows = cache.run(Tokens(*(x[:184] for x in vars(tokens).values())), rule, 184, evict=True)
    rows = torch.cat((rows, cache.run(tokens, rule, 1, start=184, evict=True)))
    assert same_bits(rows, wanted)


@every_format
def test_a_row_has_the_same_bits_in_any_batch_and_number_of_threads(kv_dtype: str) -> None:
    heads, lengths, rule = Heads(4, 2, 32, 32), (700, 1, 33, 129, 513), READ["everything"]
    sequences = [Tokens.random(n, heads, seed=n) for n in lengths]
    cache = cache_of(kv_dtype, lengths, heads)
    cache.write([(s, tokens, 0, len(tokens)) for s, tokens in enumerate(sequences)])
    wanted = [
        cache.attend([(s, t, max(0, len(t) - 20), len(t))], replace(rule, window=0, num_sink_tokens=0))[0]
        for s, t in enumerate(sequences)
    ]
    for threads, count, batch in ((1, 1, range(5)), (3, 3, (4, 1, 0)), (2, 20, range(5))):
        torch.set_num_threads(threads)
        parts = [(s, sequences[s], max(0, lengths[s] - count), lengths[s]) for s in batch]
        for (s, _, start, stop), rows in zip(parts, cache.attend(parts, replace(rule, window=0, num_sink_tokens=0))):
            assert same_bits(rows, wanted[s][start - stop :]), f"sequence {s}, {count} rows, {threads} threads"


def awkward(dtype: torch.dtype) -> torch.Tensor:
    """[224, 2, 48]: groups that round badly, overflow, are constant, zero or not finite."""
    x = torch.randn(7, 32, 2, 48, generator=torch.Generator().manual_seed(0)) + torch.linspace(-100, 100, 48)
    x *= 10.0 ** torch.tensor([-42.0, -8, -4, 0, 4, 20, 36]).view(-1, 1, 1, 1)
    x[3, :, 0, :8] = torch.arange(32).view(-1, 1) / 2.0 - 7.5  # ties
    x[3, :, 1, :8], x[3, :, 1, 8:12], x[4, :, 0, :3] = 0.0, 3.7, -0.0
    for place, bad in enumerate((torch.nan, torch.inf, -torch.inf)):
        x[4, 9, 1, 5 * place] = bad
    return x.flatten(0, 1).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("kv_dtype", ["k=pc3,v=int8", "pc4v3", "k=pc5,v=int8"])
def test_the_bytes_are_those_of_quant_for_any_exact_copies(kv_dtype: str, rotated: bool, dtype: torch.dtype) -> None:
    k, v = parse_kv_dtype(kv_dtype)
    k, x = replace(k, rotate=rotated), awkward(dtype)
    layout = KVLayout(k, v, 2, 48, 48, 64)
    raw = replace(parse_kv_dtype(str(dtype).removeprefix("torch."))[0], rotate=rotated)
    exact_layout = replace(layout, k_format=raw, v_format=replace(raw, rotate=v.rotate))
    pool = LayerPool(torch.full((5, 2 * layout.nbytes), 0xFF, dtype=torch.uint8), layout, layout.nbytes)
    exact = LayerPool(torch.zeros(6, 2 * exact_layout.nbytes, dtype=torch.uint8), exact_layout, exact_layout.nbytes)
    slots = torch.arange(64, 64 + 224)
    write_tokens(pool, x, torch.zeros_like(x), slots, exact, slots + 64)
    copies = k_parts(exact.arena, exact_layout, exact.offset)[0][2:].transpose(1, 2).flatten(0, 1)[:224]
    groups = copies.contiguous().view(dtype).unflatten(0, (7, 32)).transpose(1, 2)
    wanted_codes, wanted_channels = encode_channels(groups, k)
    codes, channels = k_parts(pool.arena, layout, pool.offset)
    assert torch.equal(codes[1:].unflatten(2, (2, 32)).transpose(1, 2).flatten(0, 1)[:7], wanted_codes)
    assert torch.equal(channels[1:].transpose(1, 2).flatten(0, 1)[:7], wanted_channels)


def test_a_group_is_written_when_its_last_token_is_and_by_no_other() -> None:
    heads = Heads(2, 2, 32, 32)
    tokens = Tokens.random(96, heads)
    cache = cache_of("pc4v3", [96], heads, fill="zeros")
    layout = cache.pools[0].layout

    def groups_written() -> list[int]:
        codes, channels = k_parts(cache.pools[0].arena, layout, cache.pools[0].offset)
        blocks = cache.tables[0][0].long()
        assert torch.equal(codes[blocks].flatten(1).any(1), channels[blocks].flatten(1).any(1))
        return codes[blocks].flatten(1).any(1).nonzero().flatten().tolist()

    for first, last, wanted in ((0, 31, []), (31, 32, [0]), (32, 50, [0]), (50, 96, [0, 1, 2])):
        cache.write([(0, tokens, first, last)])
        assert groups_written() == wanted


def test_padding_and_tokens_amid_groups_write_no_key() -> None:
    cache = cache_of("pc4v3", [64], Heads(2, 2, 32, 32), fill="0x7f")
    pool, exact = cache.pools
    before = pool.arena.clone()
    encode_keys(pool, exact, torch.tensor([-1, -33, 32, 62, 94]), torch.tensor([-1, -33, 32, 62, 94]))
    encode_keys(pool, exact, torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    assert torch.equal(pool.arena, before)


def test_values_are_written_beside_keys_by_channel_as_alone() -> None:
    heads = Heads(2, 2, 64, 32)
    tokens = Tokens.random(20, heads)
    layout = KVLayout(PC4, INT3, 2, 64, 32, 32)
    arena = torch.zeros(2, layout.nbytes, dtype=torch.uint8)
    kv_write(LayerPool(arena, layout, 0), tokens.key, tokens.value, torch.arange(32, 52))
    codes, scales = encode(tokens.value, INT3)
    assert not arena[:, : layout.v_codes_offset].any()
    found = arena[1, layout.v_codes_offset : layout.v_scales_offset].view(2, 32, 12)
    assert torch.equal(found[:, :20].transpose(0, 1), codes)
    found = arena[1, layout.v_scales_offset : layout.v_scales_offset + 64].view(2, 32, 1)
    assert torch.equal(found[:, :20].transpose(0, 1), scales)


def test_pools_that_cannot_hold_keys_by_channel_are_refused() -> None:
    def pool(layout: KVLayout) -> LayerPool:
        return LayerPool(torch.zeros(2, layout.nbytes, dtype=torch.uint8), layout, 0)

    for layout, why in (
        (KVLayout(PC4, INT3, 1, 64, 64, 16), "pc4 needs a block_size that is a multiple of 32, got 16"),
        (KVLayout(PC4, INT3, 1, 72, 64, 32), "divisible by 16"),
        (KVLayout(INT8, PC4, 1, 64, 64, 32), "pc4 is a format of K alone"),
    ):
        with pytest.raises(ValueError, match=why):
            pool(layout)
    keys = pool(KVLayout(PC4, INT3, 1, 64, 64, 32))
    with pytest.raises(ValueError, match="pc4 is encoded from an exact pool, and there is none"):
        write_tokens(keys, torch.zeros(1, 1, 64), torch.zeros(1, 1, 64), torch.tensor([32]))
    for other in (keys, pool(KVLayout(INT8, INT8, 1, 64, 64, 32))):
        with pytest.raises(ValueError, match="keys are encoded from an exact pool by channel"):
            encode_keys(keys, other, torch.tensor([32]), torch.tensor([32]))


def test_poison_is_nan_as_scales_of_channels() -> None:
    """Else the tests above would not show that incomplete groups are unread."""
    poison = torch.full((1, 32), FILLS["0xff"][0], dtype=torch.uint8)
    assert decode_channels(torch.zeros(32, 8, dtype=torch.uint8), poison, PC4).isnan().all()
