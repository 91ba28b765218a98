"""Benchmarks run end to end on tiny models, say what they measured, and refuse in one line. Times are not judged."""

import json

import pytest
import torch
from census_models import build
from commands import lean, refused

from lean.eval.bench.profile import PARTS
from lean.eval.bench.timing import Timing, draw_rows, take_turns

KEYS = {
    "name", "format", "num_q_heads", "num_kv_heads", "head_dim", "context", "threads", "median_ms", "spread", "gb_s",
    "bandwidth_share", "peer", "peer_ms", "ratio",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tiny):
    return str(tiny("llama"))


@pytest.fixture(autouse=True)
def _small_buffers(monkeypatch):
    monkeypatch.setattr("lean.eval.bench.attention.COLD_BYTES", 2**16)
    monkeypatch.setattr("lean.eval.bench.memory.COLD_BYTES", 2**16)


def rows(*args):
    found = [json.loads(line) for line in lean(*args, "--json").splitlines()]
    assert all(row.keys() == KEYS for row in found)
    assert all(row["median_ms"] > 0 for row in found)
    for row in found:
        if row["peer"]:
            assert row["ratio"] > 0
    return found


def test_attention_rows_name_formats_residuals_and_peers():
    args = (
        "bench",
        "attention",
        "--shape",
        "4/2x16",
        "--context",
        "70,130",
        "--kv-dtype",
        "bf16,int8",
        "--rounds",
        "2",
    )
    found = rows(*args, "--residual", "0,64", "--rounds", "2")
    assert {row["format"] for row in found} == {"bf16", "int8", "int8 R 64"}
    assert {row["peer"] for row in found} == {"sdpa", "sdpa-folded"}
    assert {(row["num_q_heads"], row["num_kv_heads"], row["head_dim"]) for row in found} == {(4, 2, 16)}
    assert {row["context"] for row in found} == {70, 130}
    for row in found:
        assert row["ratio"] == pytest.approx(row["peer_ms"] / row["median_ms"], rel=1e-3)
        assert row["bandwidth_share"] > 0


def test_attention_contenders_compute_the_same():
    """lean and the peers attend to the same keys, so their outputs agree."""
    from lean.eval.bench.attention import Shape, lean_calls, sdpa_calls

    def outcome(calls):
        torch.manual_seed(7)
        return calls()

    shape, device = Shape(4, 2, 32), torch.device("cpu")
    torch.manual_seed(7)
    exact, nbytes = lean_calls("bf16", 0, shape, 100, torch.bfloat16, device)
    torch.manual_seed(7)
    grouped = sdpa_calls(False, shape, 100, device)
    torch.manual_seed(7)
    folded = sdpa_calls(True, shape, 100, device)
    torch.manual_seed(7)
    quantized, _ = lean_calls("int8", 64, shape, 100, torch.bfloat16, device)
    want = grouped[0]().flatten()
    assert nbytes == 100 * 2 * 2 * 32 * 2
    assert torch.allclose(exact[1]().flatten(), want, atol=2e-2)
    assert torch.allclose(folded[0]().flatten(), want, atol=2e-2)
    assert torch.allclose(quantized[-1]().flatten(), want, atol=4e-2)


def test_decode_and_prefill_beside_transformers(folder):
    for command in ("decode", "prefill"):
        found = rows(
            "bench", command, folder, "--kv-dtype", "fp32,int8", "--context", "40,80", "--against", "transformers"
        )
        assert [(row["format"], row["context"]) for row in found] == [
            ("fp32", 40), ("int8", 40), ("fp32", 80), ("int8", 80),
        ]  # fmt: skip
        assert {row["peer"] for row in found} == {"transformers"}
        assert (found[0]["gb_s"] is None) == (command == "prefill")


def test_every_sequence_of_a_batch_decodes_in_every_step_that_counts(folder):
    from lean import LLM, EngineConfig
    from lean.errors import EngineError
    from lean.eval.bench.model import _STEPS_IN_ALL, bench_length
    from lean.eval.bench.peers import Lean

    config = EngineConfig(max_num_seqs=5, max_num_batched_tokens=40, prefill_chunk=30, max_model_len=400)
    model = LLM(folder, config).model
    length = bench_length("batch", config, [100], 5)
    assert length < 400
    engine = Lean(model, EngineConfig(**{**vars(config), "max_model_len": length}), 5)
    engine.read(list(range(3, 103)))
    for _ in range(_STEPS_IN_ALL):
        engine.step()
    short = Lean(model, EngineConfig(**{**vars(config), "max_model_len": 110}), 5)
    short.read(list(range(3, 103)))
    with pytest.raises(EngineError, match="of 5 sequences"):
        _ = [short.step() for _ in range(40)]


def test_batch_compares_tokens_per_second(folder):
    [row] = rows("bench", "batch", folder, "--context", "40", "--sequences", "3")
    assert row["ratio"] == pytest.approx(3 * row["peer_ms"] / row["median_ms"], rel=1e-3)


def test_prefix_compares_prompts_that_are_in_the_cache_with_those_that_are_not(folder, monkeypatch):
    monkeypatch.setattr("lean.eval.bench.prefix.COMMON", 64)
    found = rows("bench", "prefix", folder, "--context", "70", "--requests", "3")
    peers = {row["name"]: (row["context"], row["peer"]) for row in found}
    assert peers == {
        "prompt again": (70, "first time"),
        "prompt from disk": (70, "first time"),
        "3 requests that begin alike": (64 + 50, "no prefix cache"),
        "no common beginning": (256, "no prefix cache"),
    }
    assert all(row["ratio"] == pytest.approx(row["peer_ms"] / row["median_ms"], rel=1e-3) for row in found)
    assert "--context" in refused("bench", "prefix", folder, "--context", "20", "--requests", "0")


def test_profile_accounts_for_the_whole_step(folder):
    report = json.loads(lean("bench", "profile", folder, "--context", "40", "--json"))
    parts = report["contexts"]["40"]
    assert set(parts) == {*PARTS, "whole"}
    assert all(parts[part] > 0 for part in PARTS)
    printed = lean("bench", "profile", folder, "--context", "40")
    assert all(part in printed for part in PARTS)


def test_a_picture_has_a_line_per_format_and_peer(folder, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "decode.png"
    lean("bench", "decode", folder, "--context", "30,60", "--plot", str(file))
    assert file.read_bytes().startswith(b"\x89PNG")
    assert draw_rows.__doc__


def test_contenders_take_turns():
    order = []
    timings = take_turns({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 3, torch.device("cpu"))
    assert len(order) == 8
    assert all({*order[i : i + 2]} == {"a", "b"} for i in range(0, 8, 2))
    assert set(timings) == {"a", "b"}


def test_spread_is_half_the_middle_half_over_the_median():
    assert Timing.of([1, 2, 3, 4, 5]) == Timing(3, 1 / 3)
    assert Timing.of([1.0]) == Timing(1.0, 0.0)


def test_a_pair_of_formats_is_measured_whole_in_either_order(folder):
    found = rows("bench", "decode", folder, "--kv-dtype", "v=int4,k=int8,k=fp8,v=int4,bf16", "--context", "30")
    assert [row["format"] for row in found] == ["v=int4,k=int8", "k=fp8,v=int4", "bf16"]
    assert "unknown KV format" in refused("bench", "decode", folder, "--kv-dtype", "int8,int2")


def test_formats_beside_each_other_keep_the_options_that_apply_to_them(folder):
    args = ("--kv-dtype", "int8,bf16", "--context", "30", "--kv-residual-length", "8", "--sinks", "2")
    assert {row["format"] for row in rows("bench", "decode", folder, *args)} == {"int8", "bf16"}
    assert rows("bench", "attention", "--shape", "4/2x16", "--context", "64", "--kv-dtype", "auto", "--rounds", "1")


def test_what_cannot_be_measured_is_refused_in_one_line(folder):
    assert "unknown peer" in refused("bench", "attention", "--against", "vllm")
    assert "--shape" in refused("bench", "attention", "--shape", "9-3")
    assert "multiple of KV heads" in refused("bench", "attention", "--shape", "9/2x64")
    assert "unknown peer" in refused("bench", "decode", folder, "--context", "30", "--against", "vllm")
    assert "--gguf" in refused("bench", "decode", folder, "--context", "30", "--against", "llama.cpp")
    assert "--context" in refused("bench", "decode", folder, "--context", "many")
    assert "--context -5" in refused("bench", "decode", folder, "--context", "-5")
    assert "--rounds 0" in refused("bench", "attention", "--rounds", "0")
    assert "--max-model-len" in refused("bench", "decode", folder, "--context", "30", "--max-model-len", "99")
    assert "--compile" in refused("bench", "profile", folder, "--context", "30", "--compile")


def test_keys_by_channel_need_a_residual_that_holds_a_group():
    arguments = "--shape", "2/1x16", "--context", "70", "--kv-dtype", "pc4v3", "--rounds", "1", "--against", "none"
    assert [row["format"] for row in rows("bench", "attention", *arguments, "--residual", "0,64")] == ["pc4v3 R 64"]
    assert "pc4v3 needs a residual of at least 32" in refused("bench", "attention", *arguments, "--residual", "0")


def test_latent_vectors_are_one_shape_of_attention():
    found = rows("bench", "attention", "--shape", "4/1x40:32", "--context", "70", "--kv-dtype", "int8", "--rounds", "2")
    assert {(row["num_q_heads"], row["num_kv_heads"], row["head_dim"]) for row in found} == {(4, 1, 40)}
    assert "first 48 of the 40" in refused("bench", "attention", "--shape", "4/1x40:48")
    assert "first 32 of the 64" in refused("bench", "attention", "--shape", "4/1x64:32")
    assert "cannot be in k6v4" in refused("bench", "attention", "--shape", "4/1x96:64", "--kv-dtype", "k6v4")


def test_expanded_is_a_peer_of_latent_attention_alone(tmp_path, folder):
    build("deepseek_v3", tmp_path / "mla")
    arguments = "--context", "30", "--kv-dtype", "fp32", "--dtype", "float32", "--against", "expanded"
    [row] = rows("bench", "decode", str(tmp_path / "mla"), *arguments)
    assert (row["peer"], row["num_kv_heads"]) == ("expanded", 1)
    assert "latent attention" in refused("bench", "decode", folder, *arguments)
