"""The values that back ends take hold the arguments of the ops, each under its own name and in its place."""

from typing import Any, get_type_hints

import pytest
import torch
from attention_oracle import RULES, Heads, PagedCache, Tokens
from torch._subclasses import FakeTensorMode

from lean.kernels.call import CALLS, AttentionCall, WriteCall, layout_of
from lean.kernels.layout import KVLayout
from lean.kernels.ops import LayerPool, kv_write, paged_attention
from lean.quant import FP8, INT4, INT8, KVFormat

HEADS = Heads(4, 2, 16, 24)
TYPES = {
    "Tensor": torch.Tensor, "Optional[Tensor]": torch.Tensor | None, "int": int, "float": float, "bool": bool,
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_the_fields_are_the_arguments_of_the_schema_in_its_order(name: str) -> None:
    schema = getattr(torch.ops.lean, name).default._schema
    assert CALLS[name]._fields == tuple(argument.name for argument in schema.arguments)
    hints = get_type_hints(CALLS[name])
    assert [hints[a.name] for a in schema.arguments] == [TYPES[str(a.type)] for a in schema.arguments]


def calls(rule: str) -> list[Any]:
    """The call values of one step: a write into each of the two pools, then attention."""
    seen: list[Any] = []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "lean":
                assert not kwargs
                seen.append(CALLS[func._opname]._make(args))
            return func(*args, **(kwargs or {}))

    tokens = Tokens.random(12, HEADS)
    with Spy():
        cache = PagedCache(HEADS, "k8v4", [12], exact_dtype=torch.float32)
        cache.step([(0, tokens, 0, 12)], RULES[rule])
    layouts = [pool.layout for pool in cache.pools]
    assert [type(call) for call in seen] == [WriteCall, WriteCall, AttentionCall]
    assert [call.layout for call in seen] == [*layouts, layouts[0]]
    return [*seen, layouts]


def test_a_call_knows_the_layout_of_the_pools_it_was_made_for() -> None:
    *_, attention, layouts = calls("everything")
    assert [attention.layout, attention.exact_layout] == layouts
    *_, attention, layouts = calls("full")
    assert attention.exact_arena is None
    assert attention.exact_layout is attention.layout


def test_equal_integers_share_one_layout() -> None:
    first = layout_of(INT8.code, INT4.code, 2, 64, 128, 16)
    assert first == KVLayout(INT8, INT4, 2, 64, 128, 16)
    assert layout_of(INT8.code, INT4.code, 2, 64, 128, 16) is first
    assert layout_of(FP8.code, INT4.code, 2, 64, 128, 16) != first
    assert first.offsets == (0, first.k_scales_offset, first.v_codes_offset, first.v_scales_offset)


def test_every_number_of_a_format_names_one_format() -> None:
    assert [KVFormat.from_code(code).code for code in KVFormat.codes()] == list(KVFormat.codes())


def test_keyword_arguments_reach_the_ops_by_name() -> None:
    """Eagerly, and where tensors have shapes alone."""
    write, _, attention, _ = calls("everything")
    positional = torch.ops.lean.paged_attention(*attention)
    named = dict(reversed(attention._asdict().items()))
    assert torch.equal(torch.ops.lean.paged_attention(**named), positional)
    torch.ops.lean.kv_write(**write._asdict())
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert torch.ops.lean.paged_attention(**named).shape == positional.shape


def test_the_wrappers_hand_every_setting_to_its_own_field() -> None:
    layout = KVLayout(INT8, INT8, 2, 16, 16, 8)
    pool = LayerPool(torch.zeros(4, 2 * layout.nbytes, dtype=torch.uint8), layout, layout.nbytes)
    tables = torch.ones(1, 1, dtype=torch.int32)
    ends = torch.tensor([0, 3], dtype=torch.int32)
    seen: list[Any] = []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "lean":
                seen.append(CALLS[func._opname]._make(args))
            return func(*args, **(kwargs or {}))

    rule = {"scale": 0.5, "softcap": 7.0, "window": 9, "num_sink_tokens": 1, "residual_length": 5, "num_exact_sinks": 2}
    x, query = torch.zeros(3, 2, 16), torch.zeros(3, 4, 16)
    with Spy():
        kv_write(pool, x, x, torch.arange(8, 11))
        paged_attention(query, pool, tables, ends, ends[1:], exact=pool, exact_block_tables=tables, **rule)
    write, attention = seen
    assert (write.layer_offset, write.block_size, write.k_format, write.v_format) == (layout.nbytes, 8, *pool.codes)
    assert {name: getattr(attention, name) for name in rule} == rule
    assert (attention.layer_offset, attention.exact_layer_offset) == (layout.nbytes, layout.nbytes)
    assert (attention.num_kv_heads, attention.v_dim, attention.block_size) == (2, 16, 8)
