"""Sampling defaults are those that the model's files give; what lean cannot follow is named."""

import json
import shutil

import pytest
from gguf_files import write_gguf
from helpers import refusal

from lean.model.generation import generation_defaults
from lean.store.source import resolve


@pytest.fixture
def defaults(tiny, tmp_path):
    """``defaults(**fields)``: of a checkpoint with these fields in generation_config.json."""
    folder = shutil.copytree(tiny("llama", num_hidden_layers=1), tmp_path / "copy")

    def read(**fields):
        (folder / "generation_config.json").write_text(json.dumps(fields))
        return generation_defaults(resolve(str(folder)))[1]

    return read


@pytest.fixture
def gguf_defaults(tiny, tmp_path):
    """``gguf_defaults(**keys)``: of a GGUF file with these keys of `general.sampling`."""

    def read(**keys):
        pairs = {f"general.sampling.{key}": value for key, value in keys.items()}
        file = write_gguf(tiny("llama", num_hidden_layers=1), tmp_path / "tiny.gguf", keys=pairs)
        return generation_defaults(resolve(str(file)))[1]

    return read


def test_a_checkpoint_samples_only_where_it_says_so(defaults, caplog):
    fields = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}
    assert defaults(**fields) == {"repetition_penalty": 1.1}
    assert defaults(**fields, do_sample=False) == {"repetition_penalty": 1.1}
    assert defaults(**fields, do_sample=True) == fields
    assert defaults(do_sample=True, temperature=None, top_k=5) == {"temperature": 1.0, "top_k": 5}
    assert caplog.text == ""


@pytest.mark.parametrize(
    "field", [{"no_repeat_ngram_size": 3}, {"suppress_tokens": [5]}, {"num_beams": 4}, {"bad_words_ids": [[5]]}]
)
def test_fields_that_lean_does_not_follow_are_named(defaults, caplog, field):
    assert defaults(**field) == {}
    assert f"does not follow {next(iter(field))}" in caplog.text


def test_fields_that_are_off_are_not_named(defaults, caplog):
    assert defaults(no_repeat_ngram_size=0, suppress_tokens=None, num_beams=1, typical_p=1.0, length_penalty=0.5) == {}
    assert caplog.text == ""


def test_a_gguf_file_samples_as_it_recommends(gguf_defaults, caplog):
    assert gguf_defaults() == {}
    keys = {"temp": 0.7, "top_p": 0.95, "top_k": 20, "min_p": 0.05}
    wanted = {"temperature": 0.7, "top_p": 0.95, "top_k": 20, "min_p": 0.05}
    assert gguf_defaults(**keys, mirostat=0, mirostat_tau=5.0, xtc_probability=0.0, penalty_repeat=1.0) == wanted
    assert gguf_defaults(top_k=64) == {"temperature": 1.0, "top_k": 64}
    assert gguf_defaults(temp=0.0, top_k=-1) == {"temperature": 0.0, "top_k": 0}
    assert caplog.text == ""


@pytest.mark.parametrize("key", [{"mirostat": 2}, {"xtc_probability": 0.5}, {"penalty_repeat": 1.5}, {"sequence": "k"}])
def test_sampling_of_a_gguf_file_that_lean_does_not_follow_is_named(gguf_defaults, caplog, key):
    assert gguf_defaults(**key) == {}
    assert f"does not follow general.sampling.{next(iter(key))}" in caplog.text


def test_impossible_sampling_of_a_gguf_file_is_refused(gguf_defaults):
    assert "top-p" in refusal(gguf_defaults, top_p=7.0)
    assert "general.sampling.temp is 'hot'" in refusal(gguf_defaults, temp="hot")
