"""Options: flags win over a file, a file wins over defaults; impossible values are refused with the key's name."""

from pathlib import Path

import pytest
import yaml
from helpers import refusal

from lean.config import EngineConfig
from lean.options import ENGINE_KEYS, SAMPLING_KEYS, Options, read_yaml
from lean.sampling_params import SamplingParams
from lean.server.config import SERVER_KEYS

CONFIGS = sorted(Path(__file__).parents[1].glob("configs/*.yaml"))


def test_options_are_read_from_yaml(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(
        "# comment\nkv_dtype: k8v4\nkv_memory: 1.5GiB\nmax_model_len: 4096\ndeterministic: true\nsinks: null\n"
    )
    expected = EngineConfig(kv_dtype="k8v4", kv_memory=3 * 2**29, max_model_len=4096, deterministic=True)
    assert Options.from_yaml(file).engine == expected
    file.write_text("")
    assert Options.from_yaml(str(file)) == Options.merge()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kv_type: int8", ("kv_type", "kv_dtype")),
        ("3: int8", ("3", "kv_dtype")),
        ("temprature: 1", ("temprature", "temperature")),
        ("temperature: -1", ("temperature", "-1")),
        ("stop: ['']", ("stop",)),
        ("model: 3", ("model",)),
        ("kv_dtype: bf16\nkv_residual_length: 64\nnum_blocks: 3\nkv_memory: 1MiB", ("num-blocks", "kv-memory")),
        ("max_num_batched_tokens: 4", ("max-num-batched-tokens 4", "max-num-seqs 8")),
        ("block_size: '32'", ("block-size", "'32'")),
        ("block_size: 31", ("block-size", "31")),
        ("max_num_seqs: true", ("max-num-seqs",)),
        ("max_num_seqs: 1.5", ("max-num-seqs", "1.5")),
        ("max_num_seqs: null", ("max-num-seqs",)),
        ("max_model_len: [1]", ("max-model-len",)),
        ("deterministic: 1", ("deterministic",)),
        ("kv_dtype: 8", ("kv-dtype",)),
        ("kv_memory: lots", ("lots",)),
        ("- kv_dtype", ("key: value",)),
        ("kv_dtype: [", ("cannot read",)),
        ("\x00", ("cannot read",)),
        ("kv_memory: 1:30", ("cannot read size '1:30'",)),
        ("seed: 0123", ("line 1", "0123", "123", "83 (octal)")),
        ("window: 64\nseed: 089", ("line 2", "089", "89")),
        ("max_tokens: 10\nseed: 1\nmax_tokens: 20", ("line 3", "'max_tokens' is given twice", "line 1")),
        ("max_model_len: 8.5e-1", ("max-model-len", "0.85")),
        ("max_model_len: .inf", ("max-model-len", "inf")),
    ],
)
def test_a_yaml_file_that_cannot_be_used_is_refused_with_its_fault(tmp_path, text, words):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    message = refusal(Options.from_yaml, file)
    assert all(word in message for word in (*words, file.name))


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("temperature: 1e-6", "temperature", 1e-6),
        ("temperature: 1E+0", "temperature", 1.0),
        ("top_p: .5", "top_p", 0.5),
        ("min_p: 5.e-2", "min_p", 0.05),
        ("max_model_len: 8e3", "max_model_len", 8000),
        ("max_model_len: 8_192", "max_model_len", 8192),
        ("seed: 0x1F", "seed", 31),
        ("seed: 0", "seed", 0),
        ("kv_skip_layers: 0", "kv_skip_layers", "0"),
        ("kv_skip_layers: -1", "kv_skip_layers", "-1"),
        ("kv_skip_layers: 0,1,-1", "kv_skip_layers", "0,1,-1"),
        ("deterministic: yes", "deterministic", True),
        ("deterministic: off", "deterministic", False),
        ("stop: ['1e-6', '0123', '1:30', 'yes']", "stop", ("1e-6", "0123", "1:30", "yes")),
    ],
)
def test_yaml_is_read_as_people_write_it_and_printed_so_that_it_is_read_alike(tmp_path, text, key, value):
    file = tmp_path / "config.yaml"
    for content in (text, None):
        file.write_text(Options.from_yaml(file).to_yaml() if content is None else content)
        options = Options.from_yaml(file)
        assert getattr(options.engine if key in ENGINE_KEYS else options.sampling, key) == value


def test_a_yaml_file_that_does_not_exist_or_is_not_text_is_refused_by_name(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x80")
    for name in ("missing", "binary", "."):
        assert str(tmp_path / name) in refusal(Options.from_yaml, tmp_path / name)


def test_later_layers_win():
    options = Options.merge({"block_size": 16, "top_k": 3, "model": "a"}, {"top_k": 5, "kv_memory": "2KiB"}, {"n": 2})
    assert (options.engine.block_size, options.engine.kv_memory) == (16, 2048)
    assert (options.sampling.top_k, options.sampling.n, options.model) == (5, 2, "a")


def test_no_key_means_two_things():
    assert not set(ENGINE_KEYS) & set(SAMPLING_KEYS)


def test_printed_options_can_be_read_again(tmp_path):
    options = Options(
        "some model",
        EngineConfig(kv_dtype="k=int8,v=int4", kv_memory=2**20, deterministic=True),
        SamplingParams(temperature=0.5, stop=("a\n", ": b"), stop_token_ids=(3,), logit_bias={5: -1.5}, seed=0),
    )
    file = tmp_path / "printed.yaml"
    file.write_text(options.to_yaml(), encoding="utf-8")
    assert Options.from_yaml(file) == options
    assert set(yaml.safe_load(options.to_yaml())) == {"model", *ENGINE_KEYS, *SAMPLING_KEYS}


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_every_option_of_the_ready_made_files_is_valid_and_explained(file):
    assert read_yaml(file, SERVER_KEYS)
    lines = file.read_text().splitlines()
    for before, line in zip(["", *lines], lines):
        if line and not line.startswith("#"):
            assert before.startswith("#") or ":" in before, f"{line!r} has no comment"


def test_a_file_may_hold_what_only_flags_make_possible(tmp_path):
    file = tmp_path / "few.yaml"
    file.write_text("max_num_batched_tokens: 4\n")
    assert Options.merge(read_yaml(file), {"max_num_seqs": 2}).engine.step_tokens == 4
    assert "max-num-seqs 8" in refusal(Options.from_yaml, file)
