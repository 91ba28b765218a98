"""Temporary memory of the torch reference: bounded by the shape of the heads, at any context length."""

import weakref
from typing import Any

import pytest
import torch
from attention_oracle import RULES, Heads, PagedCache, Rule, Tokens
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lean.kernels import reference
from lean.kernels.call import AttentionCall


class Allocations(TorchDispatchMode):
    """Sums what the torch calls inside the reference allocate; views and its arguments count nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.peak = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.lean.paged_attention.default:
            with self:
                return reference.paged_attention(AttentionCall(*args))
        known = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in known and storage._cdata not in self.alive:
                self.alive[storage._cdata] = storage.nbytes()
                self.largest = max(self.largest, storage.nbytes())
                weakref.finalize(storage, self.alive.pop, storage._cdata, None)
        self.peak = max(self.peak, sum(self.alive.values()))
        return out


def measure(
    heads: Heads, kv_dtype: str, rule: Rule, dtype: torch.dtype, context: int, chunk: int, seqs: int = 1
) -> tuple[int, int]:
    """Peak beside the output, and the largest single temporary, of one call."""
    tokens = Tokens.random(context, heads, dtype=dtype)
    cache = PagedCache(heads, kv_dtype, [context] * seqs, block_size=32, exact_dtype=dtype)
    for seq in range(seqs):
        cache.write([(seq, tokens, 0, context)])
    query, query_sink = (x[-chunk:].repeat(seqs, 1, 1) for x in (tokens.query, tokens.query_sink))
    sink_logits = torch.zeros(heads.num_q_heads, dtype=dtype)
    lengths = [chunk] * seqs, [context] * seqs
    with Allocations() as allocations:
        out = cache.attend_packed(query, query_sink, list(range(seqs)), *lengths, rule, sink_logits)
    assert allocations.peak > 0
    return allocations.peak - out.untyped_storage().nbytes(), allocations.largest


SHAPES = [Heads(9, 3, 64, 64), Heads(4, 1, 256, 256), Heads(8, 8, 16, 16), Heads(20, 1, 32, 32), Heads(2, 2, 192, 128)]
CASES = [(heads, torch.float32) for heads in SHAPES] + [(SHAPES[3], torch.float64), (SHAPES[3], torch.bfloat16)]


@pytest.mark.parametrize("rule", ["full", "everything"])
@pytest.mark.parametrize(("heads", "dtype"), CASES, ids=str)
def test_a_prefill_chunk_stays_inside_the_stated_workspace(heads: Heads, dtype: torch.dtype, rule: str) -> None:
    shape = (heads.num_q_heads, heads.num_kv_heads, heads.k_dim, heads.v_dim)
    bound = reference.workspace_bytes(*shape, itemsize=8 if dtype is torch.float64 else 4)
    peak, _ = measure(heads, "int4", RULES[rule], dtype, context=3000 if heads.num_q_heads == 9 else 600, chunk=512)
    assert bound / 3 < peak <= bound


@pytest.mark.parametrize("rule", ["full", "everything"])
@pytest.mark.parametrize(("heads", "dtype"), CASES, ids=str)
@pytest.mark.parametrize("kv_dtype", ["bf16", "int8", "int4"])
def test_decode_rows_of_many_sequences_stay_inside_it_too(
    kv_dtype: str, heads: Heads, dtype: torch.dtype, rule: str
) -> None:
    shape = (heads.num_q_heads, heads.num_kv_heads, heads.k_dim, heads.v_dim)
    bound = reference.workspace_bytes(*shape, itemsize=8 if dtype is torch.float64 else 4)
    few, many = (measure(heads, kv_dtype, RULES[rule], dtype, context=300, chunk=1, seqs=n)[0] for n in (24, 48))
    assert many <= bound
    assert many - few <= 16 * 1024  # the list of sequences


@pytest.mark.parametrize("chunk", [1, 512])
@pytest.mark.parametrize("rule", ["full", "everything"])
@pytest.mark.parametrize("kv_dtype", ["bf16", "int8", "fp8", "k8v4"])
def test_no_temporary_grows_with_the_context(kv_dtype: str, rule: str, chunk: int) -> None:
    heads = Heads(4, 2, 32, 32)
    short, long = (
        measure(heads, kv_dtype, RULES[rule], torch.float32, context=context, chunk=chunk) for context in (700, 3000)
    )
    # The gathered block ids and the table's views are all that may differ.
    assert short == pytest.approx(long, abs=1024)
    assert long[1] <= 8 * 4 * reference.QUERY_TILE * reference.KEY_TILE
