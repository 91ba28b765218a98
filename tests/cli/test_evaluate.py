"""``lean eval`` as a user sees it: what is printed, the keys of --json, and refusals in one line."""

import pytest
from commands import json_of, lean, refused
from tiny import tiny_checkpoint, tokens

from lean.errors import LeanError

PPL_KEYS = {
    "token_ppl", "word_ppl", "byte_ppl", "nll", "nll_stderr", "tokens_scored", "bytes_per_token", "bytes_held",
    "corpus", "context", "stride", "chunk", "bos", "config",
}  # fmt: skip
KLD_KEYS = {
    "kld_mean", "kld_stderr", "kld_median", "kld_p99", "kld_p999", "top1", "top5", "ppl", "ppl_exact", "tokens_scored",
    "bytes_per_token", "floor_kld_mean", "config",
}  # fmt: skip
TEXT = "The quick brown fox jumps over the lazy dog. " * 20


@pytest.fixture(scope="module")
def folder(tiny):
    return str(tiny("llama"))


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return str(file)


def test_ppl_reports_its_figures_and_the_configuration_they_hold_for(folder, text):
    report = json_of("eval", "ppl", folder, "--text", text, "--context", "64", "--stride", "32", "--curve")
    assert report.keys() >= PPL_KEYS
    assert (report["context"], report["stride"], report["bos"], report["chunk"]) == (64, 32, "first", 512)
    assert report["tokens_scored"] == len(TEXT)
    assert report["corpus"]["name"] == "text.txt"
    assert report["config"]["kv_dtype"] == "int8"
    assert report["config"]["kernels"]
    assert sum(bucket["tokens"] for bucket in report["curve"]) == len(TEXT)
    printed = lean("eval", "ppl", folder, "--text", text, "--context", "64", "--stride", "32", "--curve")
    assert f"token perplexity {report['token_ppl']:.4f}" in printed
    assert "context 64, stride 32, chunk 512, BOS first" in printed


def test_kld_reports_the_floor_the_layers_and_where_answers_first_differ(folder, text):
    args = ("eval", "kld", folder, "--text", text, "--kv-dtype", "int4", "--max-tokens", "200", "--per-layer")
    report = json_of(*args, "--greedy", "2", "--greedy-tokens", "8")
    assert report.keys() >= KLD_KEYS
    assert abs(report["floor_kld_mean"]) < report["kld_mean"]
    assert report["tokens_scored"] == 200
    assert [row["layer"] for row in report["layers"]] == [0, 1, 2]
    assert report["greedy_divergence"]["prompts"] == 2
    printed = lean(*args)
    assert f"mean KLD {report['kld_mean']:.6f}" in printed
    assert "--kv-skip-layers" in printed


def test_kld_of_a_window_is_measured_against_full_attention(folder, text):
    args = ("eval", "kld", folder, "--text", text, "--kv-dtype", "fp32", "--dtype", "float32")
    assert json_of(*args)["kld_mean"] < 1e-6
    assert json_of(*args, "--window", "64")["kld_mean"] > 1e-6


def test_kld_refuses_too_long_a_context_and_takes_memory_only_for_the_text_it_reads(folder, text):
    assert "--context 600" in refused("eval", "kld", folder, "--text", text, "--context", "600")
    assert "--context 0" in refused("eval", "kld", folder, "--text", text, "--context", "0")
    report = json_of(
        "eval", "kld", folder, "--text", text, "--max-tokens", "100", "--window", "64", "--kv-memory", "1MiB"
    )
    assert report["config"]["max_model_len"] == 101
    assert report["context"] == 100


def test_needle_prints_a_map_and_draws_it(folder, tmp_path):
    pytest.importorskip("matplotlib")
    args = ("eval", "needle", folder, "--lengths", "380", "--depths", "0,100", "--trials", "2", "--no-chat")
    report = json_of(*args, "--plot", str(tmp_path / "map.png"))
    assert [(cell["length"], cell["depth"], cell["trials"]) for cell in report["cells"]] == [(380, 0, 2), (380, 100, 2)]
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("command", ["ppl", "kld"])
def test_what_cannot_be_used_is_refused_in_one_line(folder, text, command):
    assert "--text or --corpus" in refused("eval", command, folder, "--text", text, "--corpus", "python-docs")
    assert "unknown corpus" in refused("eval", command, folder, "--corpus", "wiki")
    assert "cannot read" in refused("eval", command, folder, "--text", text + "x")
    assert "no such file" in refused("eval", command, "/no/model", "--text", text)
    assert "bos 'last'" in refused("eval", command, folder, "--text", text, "--bos", "last")
    assert "unknown KV format" in refused("eval", command, folder, "--text", text, "--kv-dtype", "int2")


def test_non_finite_weights_end_the_evaluation(tmp_path, text):
    """The error names step and layer of the first chunk. JSON never holds NaN."""
    from safetensors.torch import load_file, save_file

    folder = tiny_checkpoint(tmp_path / "model", "llama")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for command in ("ppl", "kld"):
        with pytest.raises(LeanError, match=r"non-finite numbers at step 1.*layer 2"):
            lean("eval", command, str(folder), "--text", text, "--json")


def test_gemma_in_half_precision_is_finite_or_refused(tmp_path, text):
    """Embeddings that overflow float16 end with an error, not with NaN; bfloat16 can hold them."""
    from safetensors.torch import load_file, save_file

    folder = tiny_checkpoint(tmp_path / "model", "gemma3")
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"] *= 1_000_000
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(LeanError, match="bfloat16"):
        lean("eval", "ppl", str(folder), "--text", text, "--dtype", "float16", "--json")
    assert json_of("eval", "ppl", str(folder), "--text", text, "--dtype", "bfloat16")["nll"] > 0


def test_tasks_report_every_metric_with_its_error(folder):
    pytest.importorskip("lm_eval")
    report = json_of("eval", "tasks", folder, "--tasks", "lean_cloze", "--limit", "3")
    assert report["tasks"]["lean_cloze"]["num_items"] == 3
    assert "acc" in report["tasks"]["lean_cloze"]["metrics"]
    assert report["config"]["kv_dtype"] == "int8"
    assert "unknown task" in refused("eval", "tasks", folder, "--tasks", "no_such_task").lower()


def test_options_can_be_read_before_anything_runs(folder):
    assert "kv_dtype: fp8" in lean("eval", "ppl", folder, "--kv-dtype", "fp8", "--print-config")


def test_scores_are_the_engines(folder, text):
    from lean import LLM, EngineConfig

    llm = LLM(folder, EngineConfig(max_num_seqs=1))
    ids = [1, *llm.model.tokenizer(TEXT)["input_ids"]][:400]
    report = json_of("eval", "ppl", folder, "--text", text, "--max-tokens", "399")
    assert report["nll"] == pytest.approx(-float(llm.score(ids).double().mean()), rel=1e-6)
    assert tokens(3)  # the byte tokenizer's ids
