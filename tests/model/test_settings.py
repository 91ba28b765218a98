"""Settings of config.json are followed, or refused by name before weights are read."""

import json
import math
import shutil

import pytest
from helpers import refusal
from safetensors.torch import load_file, save_file
from tiny import tokens

from lean import LLM, EngineConfig
from lean.model.info import inspect_model
from lean.store.source import resolve

FILE = "model.safetensors"


@pytest.fixture
def edited(tiny, tmp_path):
    """``edited(kind, key=value)``: a tiny checkpoint with other values in its config.json."""

    def copy(kind="llama", **settings):
        folder = tmp_path / "edited"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tiny(kind), folder)
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | settings))
        return folder

    return copy


def inspect(folder):
    return inspect_model(resolve(str(folder)), EngineConfig())


BAD = {
    "no layers": {"num_hidden_layers": 0},
    "a billion layers": {"num_hidden_layers": 10**9},
    "layers that are not in the file": {"num_hidden_layers": 24},
    "many layers that are not in the file": {"num_hidden_layers": 2000},
    "text as a number": {"num_hidden_layers": "3"},
    "null as a number": {"hidden_size": None},
    "true as a number": {"num_attention_heads": True},
    "negative heads": {"num_attention_heads": -4},
    "no kv heads": {"num_key_value_heads": 0},
    "kv heads that do not divide": {"num_key_value_heads": 3},
    "more kv heads than heads": {"num_key_value_heads": 8},
    "no head_dim": {"head_dim": 0},
    "a fraction": {"hidden_size": 64.5},
    "another vocabulary": {"vocab_size": 300},
    "a terabyte of weights": {"intermediate_size": 2**31 - 1},
    "more than 32 bits": {"intermediate_size": 10**30},
    "no positions": {"max_position_embeddings": 0},
    "endless positions": {"max_position_embeddings": 2**40},
    "eps negative": {"rms_norm_eps": -1e-6},
    "eps nan": {"rms_norm_eps": math.nan},
    "eps as text": {"rms_norm_eps": "1e-6"},
    "theta 0": {"rope_theta": 0},
    "theta nan": {"rope_theta": math.nan},
    "theta as text": {"rope_theta": "10000"},
    "rope factor 0": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 0}},
    "rope factor null": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": None}},
    "unknown rope": {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}},
    "rope as a list": {"rope_parameters": [1]},
    "unknown activation": {"hidden_act": "wiggle"},
    "activation as a number": {"hidden_act": 3},
    "unknown dtype": {"dtype": "nope"},
    "dtype as a number": {"dtype": 3},
    "eos as text": {"eos_token_id": "2"},
    "eos true": {"eos_token_id": True},
    "eos nested": {"eos_token_id": [2, [3]]},
    "padding beyond the vocabulary": {"pad_token_id": 9999},
    "text_config of a text model": {"text_config": {"vocab_size": 3}},
    "text_config as a number": {"text_config": 3},
    "quantization_config as a number": {"quantization_config": 3},
}


@pytest.mark.parametrize("settings", BAD.values(), ids=BAD)
def test_an_impossible_setting_is_refused_by_name_before_weights_are_read(edited, settings):
    message = refusal(inspect, edited(**settings))
    named = {
        "num_hidden_layers": "model.layers.3",
        "num_key_value_heads": "k_proj",
        "vocab_size": "embed_tokens",
        "intermediate_size": "gate_proj",
    }
    (key,) = settings
    assert key in message or named.get(key, key) in message or "factor" in message or "rope_type" in message


def test_a_null_setting_has_the_default_of_its_class(edited):
    settings = {"head_dim": None, "rope_scaling": None, "eos_token_id": None, "pretraining_tp": None}
    assert inspect(edited(**settings)).layers == inspect(edited()).layers


@pytest.mark.parametrize("window", [32, 0, -5, 2**63, 1e30, "abc", True])
def test_a_window_that_the_class_never_reads_is_ignored_and_noted(edited, tiny, window):
    info = inspect(edited(sliding_window=window))
    assert [layer.window for layer in info.layers] == [0, 0, 0]
    assert any("sliding_window" in note and "no effect" in note for note in info.notes)
    assert not any("sliding_window" in note for note in inspect(edited()).notes)


def test_a_stray_window_changes_no_number(edited, tiny):
    ids = tokens(100)
    stray, plain = (
        LLM(str(folder), EngineConfig()).score(ids) for folder in (edited(sliding_window=32), tiny("llama"))
    )
    assert (stray == plain).all()


@pytest.mark.parametrize("window", [0, -5, 2**31, 2**63, 1e30, 16.0, "abc", True, [3]])
def test_an_impossible_window_of_a_class_that_reads_it_is_refused(edited, window):
    assert "sliding_window" in refusal(inspect, edited("mistral", sliding_window=window))


@pytest.mark.parametrize(("kind", "windows"), [("mistral", {32}), ("qwen2", {0}), ("gemma3", {0, 32}), ("phi3", {0})])
def test_the_window_is_that_of_the_code_of_the_model(tiny, kind, windows):
    assert {layer.window for layer in inspect(tiny(kind)).layers} == windows


# --- the head ---


def heads(edited, change, **settings):
    folder = edited(**settings)
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    return folder


def test_a_tied_head_is_the_embedding_even_where_the_file_holds_another_one(edited, tiny, caplog):
    ids = tokens(40)
    other = LLM(str(edited(tie_word_embeddings=True)), EngineConfig())
    assert "lm_head.weight" in caplog.text
    assert "tie_word_embeddings" in caplog.text
    assert len(caplog.records) == 1
    module = other.model.module
    assert module.get_output_embeddings().weight is module.get_input_embeddings().weight

    def tie(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    untied = LLM(str(heads(edited, tie, tie_word_embeddings=False)), EngineConfig())
    assert (other.score(ids) == untied.score(ids)).all()


def test_a_tied_head_that_equals_the_embedding_or_is_missing_is_not_mentioned(edited, caplog):
    def tie(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    def drop(tensors):
        del tensors["lm_head.weight"]

    for change in (tie, drop):
        LLM(str(heads(edited, change, tie_word_embeddings=True)), EngineConfig())
        assert not caplog.records


def test_a_head_that_is_neither_tied_nor_in_the_files_is_refused_as_missing(edited):
    def drop(tensors):
        del tensors["lm_head.weight"]

    message = refusal(inspect, heads(edited, drop, tie_word_embeddings=False))
    assert "missing" in message
    assert "lm_head.weight" in message
