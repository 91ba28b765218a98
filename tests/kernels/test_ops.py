"""The ops as torch sees them, and what their wrappers refuse."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_oracle import RULES, Heads, PagedCache, Tokens, filled

from lean.kernels import serving
from lean.kernels.layout import KVLayout
from lean.kernels.ops import LayerPool, kv_write, paged_attention
from lean.quant import FP32, INT4, INT8

HEADS = Heads(4, 2, 16, 24)
LAYOUT = KVLayout(INT8, INT8, 2, 16, 16, 8)
FORMATS = ["bf16", "int8", "fp8", "int4", "k8v4"]


def pool(layout: KVLayout = LAYOUT, num_blocks: int = 4) -> LayerPool:
    return LayerPool(filled((num_blocks, layout.nbytes), "0xff"), layout, 0)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def arguments(kv_dtype: str, rule: str) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The arguments that the wrappers pass to the two ops."""
    seen: list[tuple[Any, ...]] = []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "lean":
                seen.append(args)
            return func(*args, **(kwargs or {}))

    tokens = Tokens.random(12, HEADS)
    cache = PagedCache(HEADS, kv_dtype, [12], block_size=8, exact_dtype=torch.float32)
    with Spy():
        cache.step([(0, tokens, 0, 12)], RULES[rule], torch.zeros(4))
    return seen[0], seen[-1]


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_kv_write_is_a_well_behaved_torch_op(kv_dtype: str) -> None:
    torch.library.opcheck(torch.ops.lean.kv_write.default, arguments(kv_dtype, "full")[0])


@pytest.mark.parametrize("rule", ["full", "everything"])
@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_paged_attention_is_a_well_behaved_torch_op(kv_dtype: str, rule: str) -> None:
    torch.library.opcheck(torch.ops.lean.paged_attention.default, arguments(kv_dtype, rule)[1])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("kv_dtype", ["fp8", "k8v4"])
def test_both_ops_compile_into_one_graph_and_write_in_place(kv_dtype: str, backend: str) -> None:
    tokens = Tokens.random(20, HEADS)
    plain, compiled = (PagedCache(HEADS, kv_dtype, [20], exact_dtype=torch.float32) for _ in range(2))
    rule = dict(vars(RULES["everything"]))  # made here, since torch 2.11 traces no vars()
    slots = [tables[0, torch.arange(20) // 16].long() * 16 + torch.arange(20) % 16 for tables in plain.tables]
    ends = ints(0, 20)

    def layer(cache: PagedCache, t: Tokens) -> torch.Tensor:
        for own, own_slots in zip(cache.pools, slots):
            kv_write(own, t.key + 1, t.value, own_slots)
        exact = {"exact": cache.pools[1], "exact_block_tables": cache.tables[1]}
        out = paged_attention(
            t.query, cache.pools[0], cache.tables[0], ends, ends[1:], query_sink=t.query_sink, **exact, **rule
        )
        return 2 * out

    torch._dynamo.reset()
    rows = torch.compile(layer, fullgraph=True, backend=backend)(compiled, tokens)
    assert torch.equal(rows, layer(plain, tokens))
    for own, other in zip(compiled.pools, plain.pools):
        assert torch.equal(own.arena, other.arena)


def test_the_back_end_can_be_asked_for_and_a_wrong_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setenv("LEAN_KERNELS", "reference")
    assert "reference" in serving.backend(cpu)
    monkeypatch.setenv("LEAN_KERNELS", "fastest")
    with pytest.raises(ValueError, match="LEAN_KERNELS='fastest' is unknown"):
        serving.backend(cpu)
    monkeypatch.undo()
    serving.backend(cpu)  # what serves is settled there


POOL_ERRORS: dict[str, tuple[str, Callable[[], LayerPool]]] = {
    "dtype": ("arena must be uint8", lambda: LayerPool(torch.zeros(4, LAYOUT.nbytes), LAYOUT, 0)),
    "rank": ("arena must be uint8", lambda: LayerPool(pool().arena.flatten(), LAYOUT, 0)),
    "strided bytes": ("arena must be uint8", lambda: LayerPool(filled((4, 4096), "0xff")[:, ::2], LAYOUT, 0)),
    "odd offset": ("multiples of 16", lambda: LayerPool(filled((4, 4096), "0xff"), LAYOUT, 8)),
    "odd stride": ("multiples of 16", lambda: LayerPool(filled((4, LAYOUT.nbytes + 8), "0xff"), LAYOUT, 0)),
    "outside the block": ("leaves a block", lambda: LayerPool(pool().arena, LAYOUT, 16)),
    "block size": ("block_size must be one of", lambda: pool(replace(LAYOUT, block_size=24))),
    "misaligned arena": ("multiples of 16", lambda: LayerPool(filled((4, 4096), "0xff")[:, 8:], LAYOUT, 0)),
    "k_dim": ("divisible by 8", lambda: pool(replace(LAYOUT, k_dim=20))),
    "v_dim": ("divisible by 8", lambda: pool(replace(LAYOUT, v_format=INT4, v_dim=12))),
}


@pytest.mark.parametrize(("message", "build"), POOL_ERRORS.values(), ids=POOL_ERRORS.keys())
def test_a_pool_refuses_what_its_layout_does_not_fit(message: str, build: Callable[[], LayerPool]) -> None:
    with pytest.raises(ValueError, match=message):
        build()


WRITE_ERRORS = {
    "key heads": ("do not fit", (torch.ones(3, 4, 16), torch.ones(3, 2, 16), torch.arange(3))),
    "value dim": ("do not fit", (torch.ones(3, 2, 16), torch.ones(3, 2, 8), torch.arange(3))),
    "rank": ("do not fit", (torch.ones(3, 32), torch.ones(3, 2, 16), torch.arange(3))),
    "values": ("3 keys, 2 values, 3 slots", (torch.ones(3, 2, 16), torch.ones(2, 2, 16), torch.arange(3))),
    "slots": ("3 keys, 3 values, 4 slots", (torch.ones(3, 2, 16), torch.ones(3, 2, 16), torch.arange(4))),
}


@pytest.mark.parametrize(("message", "tensors"), WRITE_ERRORS.values(), ids=WRITE_ERRORS.keys())
def test_kv_write_refuses_shapes_that_do_not_fit(message: str, tensors: tuple[torch.Tensor, ...]) -> None:
    own = pool()
    before = own.arena.clone()
    with pytest.raises(ValueError, match=message):
        kv_write(own, *tensors)
    assert torch.equal(own.arena, before)


ATTENTION_ERRORS: dict[str, tuple[str, dict[str, Any]]] = {
    "query rank": ("does not fit", {"query": torch.ones(3, 64)}),
    "query dim": ("does not fit", {"query": torch.ones(3, 4, 8)}),
    "query heads": ("does not fit", {"query": torch.ones(3, 3, 16)}),
    "query_start_loc": ("number of sequences", {"query_start_loc": ints(0, 1, 3)}),
    "block_tables": ("number of sequences", {"block_tables": torch.ones(2, 1, dtype=torch.int32)}),
    "sinks without window": ("num_sink_tokens needs a window", {"num_sink_tokens": 4}),
    "residual without pool": ("a residual needs an exact pool", {"residual_length": 8}),
    "pool without residual": ("a residual needs an exact pool", {"exact": pool(), "exact_block_tables": ints(1)[None]}),
    "pool without tables": ("a residual needs an exact pool", {"exact": pool(), "residual_length": 8}),
    "tables without pool": ("a residual needs an exact pool", {"exact_block_tables": ints(1)[None]}),
    "query_sink": ("is not shaped like query", {"query_sink": torch.ones(2, 4, 16)}),
    "sink_logits": (r"must be \[4\]", {"sink_logits": torch.ones(2)}),
}


RIGHT = {
    "query": torch.ones(3, 4, 16),
    "pool": pool(),
    "block_tables": ints(1)[None],
    "query_start_loc": ints(0, 3),
    "seq_lens": ints(3),
    "scale": 0.25,
}


@pytest.mark.parametrize(("message", "wrong"), ATTENTION_ERRORS.values(), ids=ATTENTION_ERRORS.keys())
def test_paged_attention_refuses_arguments_that_do_not_fit(message: str, wrong: dict[str, Any]) -> None:
    paged_attention(**RIGHT)
    with pytest.raises(ValueError, match=message):
        paged_attention(**{**RIGHT, **wrong})


EXACT = replace(FP32, rotate=True)


def exact(**changes: Any) -> dict[str, Any]:
    """Arguments of a residual whose exact pool differs from the quantized one in more than its format."""
    layout = replace(LAYOUT, **{"k_format": EXACT, "v_format": EXACT, **changes})
    return {"exact": pool(layout), "exact_block_tables": ints(1)[None], "residual_length": 8}


SILENT_ERRORS: dict[str, dict[str, Any]] = {
    "exact block size": exact(block_size=16),
    "exact heads": exact(num_kv_heads=4),
    "exact dim": exact(v_dim=32),
    "exact pool in another basis": exact(k_format=FP32, v_format=FP32),
    "exact tables of other sequences": {**exact(), "exact_block_tables": torch.ones(2, 1, dtype=torch.int32)},
    "exact sinks without residual": {"num_exact_sinks": 4},
    "negative window": {"window": -1},
    "negative residual": {"residual_length": -1},
    "negative softcap": {"softcap": -2.0},
    "infinite softcap": {"softcap": float("inf")},
    "float block table": {"block_tables": torch.ones(1, 1)},
}


@pytest.mark.parametrize("wrong", SILENT_ERRORS.values(), ids=SILENT_ERRORS.keys())
def test_paged_attention_refuses_what_it_would_get_wrong_in_silence(wrong: dict[str, Any]) -> None:
    paged_attention(**RIGHT, **exact())
    with pytest.raises(ValueError):
        paged_attention(**{**RIGHT, **wrong})
