"""The start-up guard: silent on healthy models, and it names the layers that a format breaks."""

import pytest
import torch
from faults import outlier_keys, sabotage
from tiny import tiny_checkpoint

from lean import LLM, EngineConfig
from lean.cli.ending import run_to_end
from lean.cli.main import run_command
from lean.probe import NUM_TOKENS, NotProbed, probe, probe_text, probe_tokens

FORMATS = ("int8", "fp8", "k8v4", "int4")


@pytest.fixture(autouse=True)
def _home(home):
    """Each test keeps its verdicts in a separate folder."""


def engine(model, kv_dtype="int8", **config):
    return LLM(model if not hasattr(model, "is_dir") else str(model), EngineConfig(kv_dtype, max_num_seqs=1, **config))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma3", "phi3", "mixtral"])
@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_healthy_models_get_no_warning(tiny, kind, kv_dtype):
    options = {"sliding_window": 128} if kind == "gemma3" else {}
    verdict = probe(engine(tiny(kind, **options), kv_dtype), keep=False)
    assert verdict.warning is None, verdict
    assert all(error.both > 0 for error in verdict.layers)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_keys_by_channel_are_checked_with_a_residual_of_one_group(tiny, kind):
    options = {"sliding_window": 128} if kind == "gemma3" else {}
    verdict = probe(engine(tiny(kind, **options), "pc4v3"), keep=False)
    assert verdict.warning is None, verdict
    assert all(error.both > error.values / 2 > 0 < error.keys for error in verdict.layers)


@pytest.mark.parametrize(("kv_dtype", "layer"), [*((kv_dtype, 0) for kv_dtype in FORMATS), ("int8", 1)])
def test_two_enormous_key_biases_are_found_in_their_layer(tmp_path, kv_dtype, layer):
    verdict = probe(engine(outlier_keys(tmp_path / "model", layer), kv_dtype), keep=False)
    assert f"keys of layer {layer} " in verdict.warning
    assert f"--kv-skip-layers {layer}" in verdict.warning
    assert "\n" not in verdict.warning


def test_what_the_warning_advises_helps(tmp_path):
    folder = outlier_keys(tmp_path / "model")
    assert probe(engine(folder, "int8", kv_skip_layers="0"), keep=False).warning is None


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_scales_that_are_wrong_everywhere_are_found(tiny, kv_dtype, monkeypatch):
    llm = engine(tiny("llama"), kv_dtype)
    healthy = probe(llm, keep=False)
    sabotage(monkeypatch, 1.05, layers={1}, keys_only=True)
    slightly = probe(llm, keep=False)
    assert slightly.layers[1].keys > healthy.layers[1].keys
    assert slightly.layers[1].values == healthy.layers[1].values
    assert slightly.layers[0] == healthy.layers[0]
    monkeypatch.undo()
    sabotage(monkeypatch, 3.0)
    broken = probe(llm, keep=False)
    assert healthy.kld < slightly.kld < broken.kld
    assert "keys and values of layers" in broken.warning or "values of layers" in broken.warning


def test_errors_are_local_to_a_layer(tmp_path):
    """Layers after a broken one get the inputs that an exact cache gives them."""
    healthy = probe_tokens(engine(tiny_checkpoint(tmp_path / "a", "qwen2")), list(range(3, 200)))
    broken = probe_tokens(engine(outlier_keys(tmp_path / "b")), list(range(3, 200)))
    assert broken.layers[0].keys > 5 * healthy.layers[0].keys
    assert broken.layers[1].keys < 2 * healthy.layers[1].keys


def test_nothing_is_read_exact_and_the_engine_is_left_alone(tiny):
    llm = engine(tiny("llama"), "int4", kv_residual_length=200)
    before = [arena.clone() for arena in llm.cache.arenas]
    verdict = probe(llm, keep=False)
    other = probe(engine(tiny("llama"), "int4", kv_residual_length=0), keep=False)
    assert verdict.layers == other.layers
    assert verdict.kld == other.kld
    assert llm.stats().tokens_held == 0
    assert all(torch.equal(a, b) for a, b in zip(before, llm.cache.arenas))


def test_exact_caches_and_windows_that_the_residual_covers_are_not_probed(tiny):
    assert probe(engine(tiny("llama"), "fp32"), keep=False) is None
    assert probe(engine(tiny("mistral")), keep=False) is None  # its window is shorter than the residual


def test_a_window_is_probed_as_it_is_read(tiny):
    verdict = probe(engine(tiny("llama"), window=100, sinks=4), keep=False)
    assert verdict.warning is None


def test_the_text_is_long_enough_even_for_a_byte_level_tokenizer(tiny):
    ids = probe_text(engine(tiny("llama")))
    assert len(ids) == NUM_TOKENS >= 256
    assert ids[0] == 1  # BOS


def test_a_verdict_is_kept_until_the_model_or_the_format_changes(tmp_path, home, monkeypatch):
    folder = tiny_checkpoint(tmp_path / "model", "llama")
    first = probe(engine(folder))
    monkeypatch.setattr("lean.probe.probe_tokens", lambda *_: pytest.fail("probed again"))
    assert probe(engine(folder)) == first
    assert len(list((home / "probes").iterdir())) == 1
    for options in ({"kv_dtype": "fp8"}, {"kv_skip_layers": "0"}):
        with pytest.raises(pytest.fail.Exception):
            probe(engine(folder, **options))
    (folder / "model.safetensors").touch()
    with pytest.raises(pytest.fail.Exception):
        probe(engine(folder))


def test_a_damaged_or_unwritable_note_does_no_harm(tmp_path, home):
    llm = engine(tiny_checkpoint(tmp_path / "model", "llama"))
    first = probe(llm)
    [file] = (home / "probes").iterdir()
    file.write_text("{")
    assert probe(llm) == first
    file.unlink()
    file.parent.rmdir()
    file.parent.write_text("in the way")
    assert probe(llm) == first


def test_where_memory_is_short_nothing_is_checked(tiny, monkeypatch):
    llm = engine(tiny("llama"))
    monkeypatch.setattr("lean.probe.free_bytes", lambda device: 50_000)
    with pytest.raises(NotProbed, match=r"^the KV format was not checked on this model: only 0\.0 MiB are free$"):
        probe(llm, keep=False)
    monkeypatch.undo()

    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr("lean.probe.probe_tokens", fail)
        with pytest.raises(NotProbed):
            probe(llm, keep=False)
    assert probe(llm, keep=False).warning is None


def test_the_command_answers_all_the_same(tiny, monkeypatch, capsys):
    monkeypatch.setattr("lean.probe.free_bytes", lambda device: 50_000)
    monkeypatch.setattr("sys.argv", ["lean", "run", str(tiny("llama")), "hi", "--no-chat", "--max-tokens", "2"])
    assert run_to_end(run_command) == 0
    assert "note: the KV format was not checked on this model" in " ".join(capsys.readouterr().err.split())
