"""One place knows which kernels serve a layer: the op that runs, the name that users read, and who records steps."""

from typing import Any

import pytest
import torch
from helpers import refusal

from lean import LLM, EngineConfig
from lean.kernels import ops, reference, serving
from lean.kernels.call import AttentionCall, Need, WriteCall
from lean.kernels.layout import KVLayout
from lean.kernels.serving import backend, is_recordable, needs_of
from lean.kernels.triton import backend as triton_backend
from lean.quant import parse_kv_dtype
from lean.report import start_up_line

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
SERVED: dict[str, tuple[str, int, torch.dtype]] = {
    "int8": ("int8", 128, torch.bfloat16),
    "int4": ("int4", 64, torch.float16),
    "narrow": ("k8v4", 32, torch.float32),
    "head_dim 80": ("int8", 80, torch.bfloat16),
}
REFUSED: dict[str, tuple[str, int, torch.dtype]] = {
    "float64": ("int8", 64, torch.float64),
    "fp64": ("fp64", 64, torch.float32),
    "head_dim 320": ("int8", 320, torch.bfloat16),
    "head_dim 80": ("int4", 80, torch.bfloat16),
}


def layout(kv_dtype: str, dim: int) -> KVLayout:
    return KVLayout(*parse_kv_dtype(kv_dtype), 1, dim, dim, 16)


def needs(kv_dtype: str, dim: int, dtype: torch.dtype) -> list[Need]:
    return needs_of([layout(kv_dtype, dim)], dtype)


def calls(kv_dtype: str, dim: int, dtype: torch.dtype) -> tuple[WriteCall, AttentionCall]:
    own = layout(kv_dtype, dim)
    codes, rows = (own.k_format.code, own.v_format.code), torch.zeros(1, 1, dim, dtype=dtype)
    arena, ints = torch.zeros(2, own.nbytes, dtype=torch.uint8), torch.zeros(1, dtype=torch.int32)
    write = WriteCall(arena, rows, rows, ints.long(), 0, 16, *codes)
    none: dict[str, Any] = dict.fromkeys(("query_sink", "exact_arena", "exact_block_tables", "sink_logits"))
    attention = AttentionCall(
        query=rows, arena=arena, block_tables=ints[None], query_start_loc=torch.tensor([0, 1]), seq_lens=ints + 1,
        layer_offset=0, exact_layer_offset=0, block_size=16, num_kv_heads=1, v_dim=dim, k_format=codes[0],
        v_format=codes[1], exact_k_format=codes[0], exact_v_format=codes[1], scale=1.0, softcap=0.0, window=0,
        num_sink_tokens=0, residual_length=0, num_exact_sinks=0, **none,
    )  # fmt: skip
    return write, attention


@pytest.fixture
def served_by(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The back ends that have served calls of the ops on a GPU, in order."""
    found: list[str] = []
    for name, module in (("Triton", triton_backend), ("torch reference", reference)):
        for op in ("kv_write", "paged_attention"):
            monkeypatch.setattr(module, op, lambda call, name=name: found.append(name))
    return found


def run(case: tuple[str, int, torch.dtype]) -> None:
    for name, call in zip(("kv_write", "paged_attention"), calls(*case)):
        ops.on_gpu(name)(call)


@pytest.mark.parametrize("case", SERVED.values(), ids=SERVED.keys())
def test_triton_serves_what_the_name_says(case: tuple[str, int, torch.dtype], served_by: list[str]) -> None:
    run(case)
    assert served_by == ["Triton", "Triton"]
    assert backend(CUDA, needs(*case)) == "Triton"
    assert is_recordable(CUDA, needs(*case))


@pytest.mark.parametrize(("reason", "case"), REFUSED.items(), ids=REFUSED.keys())
def test_the_reference_serves_the_rest_and_the_name_says_why(
    reason: str, case: tuple[str, int, torch.dtype], served_by: list[str]
) -> None:
    run(case)
    assert served_by == ["torch reference", "torch reference"]
    name = backend(CUDA, needs(*case))
    assert name.startswith("torch reference (cuda): ")
    assert reason in name
    assert not is_recordable(CUDA, needs(*case))


def test_one_layer_without_a_kernel_is_named_and_prevents_recording() -> None:
    mixed = [*needs(*SERVED["int8"]), *needs(*REFUSED["head_dim 80"])]
    name = backend(CUDA, mixed)
    assert name.startswith("Triton, and for some layers the torch reference: int4 with head_dim 80")
    assert not is_recordable(CUDA, mixed)


def test_without_triton_and_where_it_is_asked_for_the_reference_serves(
    monkeypatch: pytest.MonkeyPatch, served_by: list[str]
) -> None:
    monkeypatch.setenv("LEAN_KERNELS", "reference")
    run(SERVED["int8"])
    assert "as LEAN_KERNELS asks" in backend(CUDA)
    assert not is_recordable(CUDA, needs(*SERVED["int8"]))
    monkeypatch.undo()
    monkeypatch.setattr(serving, "has_triton", lambda: False)
    assert "Triton, which is not installed" in backend(CUDA, needs(*SERVED["int8"]))
    assert not is_recordable(CUDA, needs(*SERVED["int8"]))
    assert served_by == ["torch reference", "torch reference"]


def test_nothing_is_recorded_on_a_cpu() -> None:
    assert not is_recordable(CPU, needs(*SERVED["int8"]))


def test_the_start_up_line_of_a_float64_model_on_a_cpu_names_the_reference(tiny: Any) -> None:
    if backend(CPU).startswith("torch reference"):
        pytest.skip("the C++ kernels are not built")
    config = EngineConfig(dtype="float64", max_model_len=64)
    line = start_up_line(LLM(str(tiny("llama")), config))
    assert line.endswith("kernels: torch reference (cpu): float64 has no C++ kernel")


def test_an_unknown_back_end_is_refused_before_weights_are_read(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEAN_KERNELS", "fastest")
    assert "LEAN_KERNELS='fastest'" in refusal(LLM, str(tiny("llama")), EngineConfig())
