"""`naive.paged_attention` is the formula, and the tiled reference computes the same numbers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from attention_oracle import KV_DTYPES, RULES, Heads, PagedCache, Part, Rule, Tokens, error, expected

from lean.kernels import naive, reference
from lean.kernels.call import AttentionCall, from_arguments

HEADS = Heads(6, 2, 24, 40)
LOGITS = torch.linspace(-2, 3, HEADS.num_q_heads)
# float32 is computed in float32. bf16 queries too, and the output is then rounded: by 2^-9 of a number, twice at most.
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 2**-8}


@contextmanager
def served_by(serve: Callable[[AttentionCall], torch.Tensor]) -> Iterator[None]:
    with patch.object(torch.ops.lean, "paged_attention", from_arguments("paged_attention", serve)):
        yield


def odd_lengths(kv_dtype: str, dtype: torch.dtype) -> tuple[PagedCache, list[Part]]:
    """A decode row, a chunk and a whole prompt, of sequences of 63, 111 and 285 tokens."""
    lengths = (63, 111, 285)
    sequences = [Tokens.random(count, HEADS, seed=count, dtype=dtype) for count in lengths]
    cache = PagedCache(HEADS, kv_dtype, lengths, exact_dtype=dtype)
    cache.write([(s, tokens, 0, len(tokens)) for s, tokens in enumerate(sequences)])
    return cache, [(2, sequences[2], 284, 285), (1, sequences[1], 80, 111), (0, sequences[0], 0, 63)]


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_it_equals_an_independent_formula_in_float64(kv_dtype: str, rule: Rule) -> None:
    cache, parts = odd_lengths(kv_dtype, torch.float64)
    with served_by(naive.paged_attention):
        outputs = cache.attend(parts, rule, LOGITS)
    for rows, (_, tokens, start, stop) in zip(outputs, parts):
        assert error(rows, expected(tokens, kv_dtype, rule, start, stop, LOGITS)) < 1e-12


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_the_reference_equals_it_at_odd_lengths(kv_dtype: str, rule: Rule, dtype: torch.dtype) -> None:
    cache, parts = odd_lengths(kv_dtype, dtype)
    outputs = []
    for serve in (naive.paged_attention, reference.paged_attention):
        with served_by(serve):
            outputs.append(cache.attend(parts, rule, LOGITS))
    for wanted, rows in zip(*outputs):
        assert rows.dtype is wanted.dtype is dtype
        assert error(rows, wanted.double()) < TOLERANCE[dtype]


@pytest.mark.parametrize("serve", [naive.paged_attention, reference.paged_attention], ids=["naive", "reference"])
@pytest.mark.parametrize("sink_logits", [None, LOGITS], ids=["plain", "sink_logits"])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_empty_rows_and_padding_rows_are_zeros(
    rule: Rule, sink_logits: torch.Tensor | None, serve: Callable[[AttentionCall], torch.Tensor]
) -> None:
    tokens = Tokens.random(41, HEADS)
    cache = PagedCache(HEADS, "int8", [41] * 3, exact_dtype=torch.float32)
    cache.write([(1, tokens, 0, 41)])
    # A cached sequence with no row, a row of a sequence with no tokens, a prompt, and two rows of no sequence.
    query = torch.cat((tokens.query[:1], tokens.query, tokens.query[:2]))
    with served_by(serve):
        out = cache.attend_packed(query, None, [0, 2, 1], [0, 1, 41], [33, 0, 41], rule, sink_logits)
    assert not out[0].any()
    assert not out[42:].any()
    without_sink_query = Tokens(tokens.query, tokens.query, tokens.key, tokens.value)
    assert error(out[1:42], expected(without_sink_query, "int8", rule, sink_logits=sink_logits)) < 4e-6


def test_evicted_blocks_and_unwritten_slots_are_not_read() -> None:
    rule = RULES["everything"]
    tokens = Tokens.random(111, HEADS)
    outputs = []
    for fill in ("zeros", "0xff"):
        cache = PagedCache(HEADS, "k8v4", [160], exact_dtype=torch.float32, fill=fill)
        cache.write([(0, tokens, 0, 111)])
        cache.evict(108, rule)
        with served_by(naive.paged_attention):
            outputs.append(cache.attend([(0, tokens, 108, 111)], rule)[0])
    assert torch.equal(*outputs)
    assert error(outputs[0], expected(tokens, "k8v4", rule, 108)) < 1e-6
