"""The bits of a row from the Triton attention kernels, in other chunks, other batches and beside other keys."""

from dataclasses import replace
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
from attention_oracle import RULES, Heads, PagedCache, Rule, Tokens, same_bits
from torch._subclasses import FakeTensorMode
from triton_interpreter import triton_kernels

from lean.engine import deterministic
from lean.kernels.layout import KVLayout
from lean.kernels.ops import LayerPool, paged_attention
from lean.quant import parse_kv_dtype

COUNT = 200
ROW_HEADS = Heads(3, 1, 32, 32)
ROWS = Tokens.random(COUNT, ROW_HEADS)


def run(kv_dtype: str, rule: Rule, bounds: tuple[int, ...], *, apart: bool = False, seed: int = 0) -> torch.Tensor:
    """Rows from bounds[0] on, in steps that end at the other bounds."""
    cache = PagedCache(ROW_HEADS, kv_dtype, [COUNT], exact_dtype=torch.float32, seed=seed)
    cache.write([(0, ROWS, 0, bounds[0])])
    rows = []
    for start, stop in pairwise(bounds):
        cache.write([(0, ROWS, start, stop)])
        with triton_kernels(apart=apart):
            rows += cache.attend([(0, ROWS, start, stop)], rule)
    return torch.cat(rows)


@pytest.mark.parametrize(
    ("kv_dtype", "rule"), [("int8", "full"), ("int8", "everything"), ("fp8", "everything"), ("int4", "everything"),
                           ("bf16", "full")]
)  # fmt: skip
def test_prefill_chunks_of_any_size_give_the_bits_of_one_shot(kv_dtype: str, rule: str) -> None:
    wanted = run(kv_dtype, RULES[rule], (160, COUNT))
    assert same_bits(run(kv_dtype, RULES[rule], (160, 177, 179, COUNT), seed=1), wanted)


@pytest.mark.parametrize("kv_dtype", ["int8", "k8v4"])
def test_deterministic_mode_gives_the_bits_of_decoding_token_by_token(kv_dtype: str) -> None:
    rule = RULES["everything"]
    stepwise = run(kv_dtype, rule, tuple(range(150, 156)))
    for bounds in ((150, 155), (150, 152, 155)):
        assert same_bits(run(kv_dtype, rule, bounds, apart=True), stepwise)


@pytest.mark.parametrize(("device", "calls"), [("cuda", 1), ("cpu", 0)])
def test_deterministic_mode_gives_attention_its_rows_apart_on_a_gpu(device: str, calls: int) -> None:
    layout = KVLayout(*parse_kv_dtype("int8"), 2, 64, 64, 16)
    with (
        FakeTensorMode(),
        torch.device(device),
        deterministic.RowTiledProducts(),
        patch.object(deterministic, "rows_apart", side_effect=list) as apart,
    ):
        pool = LayerPool(torch.empty(9, layout.nbytes, dtype=torch.uint8), layout, 0)
        tables, starts, lengths = (torch.empty(shape, dtype=torch.int32) for shape in ((3, 2), (4,), (3,)))
        out = paged_attention(torch.empty(20, 4, 64), pool, tables, starts, lengths, scale=0.125)
    assert out.shape == (20, 4, 64)
    assert apart.call_count == calls


@pytest.mark.parametrize(("kv_dtype", "rule"), [("int8", "full"), ("fp8", "everything"), ("int4", "everything")])
def test_a_decode_row_has_the_same_bits_in_any_batch(kv_dtype: str, rule: str) -> None:
    """Alone, beside longer and shorter ones, beside a prefill, and beside a neighbour full of NaN."""
    lengths = (150, 1, 300, 129)
    sequences = [Tokens.random(n, ROW_HEADS, seed=n) for n in lengths]
    nan = Tokens(*(x * torch.nan for x in vars(sequences[3]).values()))
    cache = PagedCache(ROW_HEADS, kv_dtype, (*lengths, 129), exact_dtype=torch.float32)
    cache.write([(s, tokens, 0, len(tokens)) for s, tokens in enumerate((*sequences, nan))])
    last = [(s, tokens, len(tokens) - 1, len(tokens)) for s, tokens in enumerate((*sequences, nan))]
    prefill = (3, sequences[3], 121, 129)
    with triton_kernels():
        alone = [cache.attend([part], RULES[rule])[0] for part in last]
        for batch in ([0, 1, 2, 3], [2, 0], [4, 0, 4, 1]):
            for s, own in zip(batch, cache.attend([last[s] for s in batch], RULES[rule])):
                assert own.isnan().all() if s == 4 else same_bits(own, alone[s])
        rows = cache.attend([prefill, last[0], last[2]], RULES[rule])
        assert same_bits(rows[0], cache.attend([prefill], RULES[rule])[0])
        assert same_bits(rows[1], alone[0])
        assert same_bits(rows[2], alone[2])


@pytest.mark.parametrize(
    ("kv_dtype", "rule"), [("int8", "full"), ("int8", "everything"), ("fp8", "everything"), ("int4", "everything"),
                           ("bf16", "everything")]
)  # fmt: skip
def test_keys_that_a_row_does_not_see_do_not_change_its_bits(kv_dtype: str, rule: str) -> None:
    """Keys a thousand times as large, later in the chunk or outside the window, must not change any scale."""
    wanted = run(kv_dtype, RULES[rule], (160, 180))
    i = torch.arange(COUNT)[:, None, None]
    large = torch.where((i >= 170) | (i < 40) & (i > 5) & bool(RULES[rule].window), 1000.0, 1.0)
    tokens = replace(ROWS, key=ROWS.key * large, value=ROWS.value * large)
    cache = PagedCache(ROW_HEADS, kv_dtype, [COUNT], exact_dtype=torch.float32)
    cache.write([(0, tokens, 0, 180)])
    with triton_kernels():
        rows = cache.attend([(0, ROWS, 160, 180)], RULES[rule])[0]
    assert same_bits(rows[:10], wanted[:10])
