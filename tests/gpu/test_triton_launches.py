"""How the Triton kernels are launched: by shapes alone, compiled once, and only for caches that they can serve."""

from dataclasses import replace

import pytest
import torch
from triton_interpreter import TARGET, plan_attention, plan_kv_write

from lean.kernels.call import AttentionCall, WriteCall
from lean.kernels.layout import KVLayout
from lean.kernels.triton import common, launch, parameters
from lean.quant import parse_kv_dtype, raw_format


def test_what_no_kernel_serves_is_named() -> None:
    int4, int8, fp64 = (parse_kv_dtype(name)[0] for name in ("int4", "int8", "fp64"))
    assert launch.lacking(int8, int8, 80, 80, torch.bfloat16) is None
    assert "head_dim 72" in (launch.lacking(int4, int4, 72, 72, torch.bfloat16) or "")
    assert "fp64" in (launch.lacking(fp64, fp64, 64, 64, torch.bfloat16) or "")
    assert "320" in (launch.lacking(int8, int8, 320, 64, torch.bfloat16) or "")
    assert "float64" in (launch.lacking(int8, int8, 64, 64, torch.float64) or "")


@pytest.mark.parametrize("version", [(3, 6), (3, 7), (3, 9), (3, 10)])
def test_only_prefill_on_sm_100_and_sm_103_before_triton_3_9_lets_the_compiler_move_ptx(monkeypatch, version) -> None:
    monkeypatch.setattr(parameters, "_TRITON", version)
    moved = {100, 103} if version < (3, 9) else set()
    for arch in (75, 80, 86, 87, 89, 90, 100, 103, 110, 120, 121):
        target = parameters.Target("cuda", arch)
        assert target.widen == common.PACKED.value
        assert target.widen_in_prefill(64) == (common.PACKED_PURE if arch in moved else common.PACKED).value
        assert target.widen_in_prefill(32) == common.PACKED.value
    for target in (TARGET, parameters.Target("hip", "gfx942"), parameters.Target("hip", "gfx1100")):
        assert target.widen == target.widen_in_prefill(64) == common.PORTABLE.value


def test_a_launch_depends_on_shapes_alone() -> None:
    """So that a step can be captured into a graph: planning reads no value, of tensors that have none."""
    layout = KVLayout(*parse_kv_dtype("int8"), 2, 64, 64, 16)
    exact = KVLayout(*(replace(raw_format(torch.bfloat16), rotate=True),) * 2, 2, 64, 64, 16)
    with torch.device("meta"):
        arena, exact_arena = (torch.empty(9, x.nbytes, dtype=torch.uint8) for x in (layout, exact))
        tables = torch.empty(4, 8, dtype=torch.int32)
        for rows in (4, 40):
            query = torch.empty(rows, 6, 64, dtype=torch.bfloat16)
            codes = [fmt.code for x in (layout, exact) for fmt in (x.k_format, x.v_format)]
            lengths = torch.empty(5, dtype=torch.int32), torch.empty(4, dtype=torch.int32)
            call = AttentionCall(
                query, query, arena, tables, exact_arena, tables, *lengths, None,
                0, 0, 16, 2, 64, *codes, 0.125, 0.0, 70, 4, 16, 4,
            )  # fmt: skip
            out, launches = plan_attention.plan_paged_attention(call, TARGET)
            assert out.shape == query.shape
            assert [planned.kernel.__name__ for planned in launches] == [
                "decode",
                "merge",
                "turn_query",
                "prefill",
                "merge",
            ][: 5 if rows > 4 else 2]


def test_what_changes_from_step_to_step_compiles_no_kernel_again() -> None:
    """Triton compiles anew for an integer of 1 and for a multiple of 16: no batch and no context may cause that."""
    layout = KVLayout(*parse_kv_dtype("int8"), 2, 64, 64, 16)
    exact = KVLayout(*(replace(raw_format(torch.bfloat16), rotate=True),) * 2, 2, 64, 64, 16)
    codes = [fmt.code for x in (layout, exact) for fmt in (x.k_format, x.v_format)]
    compiled: dict[str, set[tuple]] = {}
    for seqs, rows, blocks in ((1, 1, 1), (1, 70, 5), (3, 3, 16), (3, 40, 33), (16, 16, 320), (16, 512, 7)):
        with torch.device("meta"):
            arena, exact_arena = (torch.empty(9, x.nbytes, dtype=torch.uint8) for x in (layout, exact))
            x, slots = torch.empty(rows, 2, 64, dtype=torch.bfloat16), torch.empty(rows, dtype=torch.int64)
            tables, query = torch.empty(seqs, blocks, dtype=torch.int32), torch.empty(rows, 6, 64, dtype=torch.bfloat16)
            lengths = torch.empty(seqs + 1, dtype=torch.int32), torch.empty(seqs, dtype=torch.int32)
            call = AttentionCall(
                query, None, arena, tables, exact_arena, tables, *lengths, None,
                0, 0, 16, 2, 64, *codes, 0.125, 0.0, 0, 0, 64, 4,
            )  # fmt: skip
            _, launches = plan_attention.plan_paged_attention(call, TARGET)
            launches += plan_kv_write.plan_kv_write(WriteCall(arena, x, x, slots, 0, 16, *codes[:2]), TARGET)
        for planned in launches:
            assert planned.kernel.kwargs["do_not_specialize"] == common.OF_STEP
            key = tuple(
                value
                for name, value in planned.arguments.items()
                if isinstance(value, int | tuple) and name not in common.OF_STEP
            )
            compiled.setdefault(planned.kernel.__name__, set()).add(key)
    # Decode and its merge are compiled twice, for every row and beside a prefill. The prefill has a third merge.
    assert {name: len(keys) for name, keys in compiled.items()} == {
        "decode": 2,
        "merge": 3,
        "turn_query": 1,
        "prefill": 1,
        "kv_write": 1,
    }
