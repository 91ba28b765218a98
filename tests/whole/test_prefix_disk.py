"""The prefix cache on disk: after a restart a request gives the bits of a cold one, and no fault of a file changes one.

Deterministic mode, float32; hybrids, which have no such mode, with chunks that end at the same places. Each case
asserts what was read.
"""

import os
import shutil

import pytest
from commands import json_of, lean, refused
from desk import SEEDED, ask
from disk_cache import engine, files, read_tokens, said, written
from helpers import refusal
from safetensors.torch import load_file, save_file
from tiny import tokens

from lean import LLM, EngineConfig
from lean.cache.disk_folder import DiskFolder
from lean.cli.cache import ID_LENGTH
from lean.model.load import LoadedModel

WINDOW = {"window": 40, "sinks": 3}
CASES = [
    ("llama", "fp32", {}),
    ("llama", "int8 with residual", {"prefill_chunk": 7}),
    ("llama", "int4 with residual", WINDOW),
    ("llama", "fp8 without residual", {"window": 21, "sinks": 0, "prefill_chunk": 7}),
    ("gemma3", "k8v4 with residual", {}),
    ("gpt_oss", "fp32", {}),
    ("mixtral", "int8 with residual", {}),
    ("gemma4_text+shared", "int8 with residual", {}),
    ("deepseek_v3", "int8 with residual", {}),
]
HYBRIDS = ["lfm2", "qwen3_5_text"]


# --- cold = warm from disk ---


@pytest.mark.parametrize(("kind", "form", "config"), CASES, ids=str)
def test_after_a_restart_a_request_begins_on_disk_and_gives_the_same_bits(begin, kind, form, config):
    prompt, begins = tokens(5 * 16 + 3), tokens(2 * 16 + 5)
    cold = begin(kind, form, **config)
    first = said(cold, prompt, ask(20))
    assert first[0] == 0
    longer = [*prompt, *first[1][0][0], *tokens(9, 5)]
    branch = [*begins, *tokens(30, 6)]
    wanted = {}
    for name, ids in {"longer": longer, "branch": branch}.items():
        cold.reset_prefix_cache()
        wanted[name] = said(cold, ids)[1]
    cold.reset_prefix_cache()
    assert said(cold, prompt, ask(20)) == first
    written(cold)

    warm = begin(kind, form, **config)
    assert said(warm, prompt, ask(20)) == (80, first[1])
    assert (read_tokens(warm), warm.stats().disk.damaged) == (80, 0)
    assert said(warm, longer) == (96, wanted["longer"])
    assert said(warm, branch)[1] == wanted["branch"]
    written(warm)

    again = begin(kind, form, **config)
    together = again.generate([longer, branch, tokens(50, 9)], ask(5))
    assert [[(out.token_ids, out.logprobs, out.text)] for out in together[:2]] == list(wanted.values())
    assert together[0].cached_tokens == 96
    assert read_tokens(again) >= 96
    written(again)


@pytest.mark.parametrize("kind", HYBRIDS)
def test_states_of_a_hybrid_are_kept_on_disk_too(begin, kind):
    prompt, config = tokens(70), {"deterministic": False}
    first = said(begin(kind, "fp32", prefix_cache_dir=None, **config), prompt)
    one = begin(kind, "fp32", **config)
    assert said(one, prompt) == first
    written(one)
    other = begin(kind, "fp32", **config)
    assert said(other, prompt) == (64, first[1])
    assert read_tokens(other) == 64
    written(other)


def test_forks_and_seeds_after_a_restart_are_those_of_a_cold_request(begin):
    prompt, params = tokens(52), ask(30, n=3, **SEEDED)
    one = begin()
    first = said(one, prompt, params)
    written(one)
    other = begin()
    assert said(other, prompt, params) == (48, first[1])
    written(other)


def test_only_the_same_salt_finds_a_prompt_on_disk(begin):
    prompt = tokens(60)

    def cached(llm: LLM, salt: str | None) -> int:
        return next(iter([*llm.stream(prompt, ask(1), cache_salt=salt)])).cached_tokens

    one = begin()
    assert cached(one, "a") == 0
    written(one)
    other = begin()
    assert [cached(other, salt) for salt in (None, "", "b", "a")] == [0, 0, 0, 48]
    written(other)


def test_log_probabilities_of_a_prompt_and_scores_are_computed_anew(begin):
    prompt = tokens(60)
    one = begin()
    said(one, prompt)
    written(one)
    other = begin()
    assert said(other, prompt, ask(1, prompt_logprobs=0))[0] == 0
    other.score(prompt)
    assert other.stats().disk.blocks_read == 0
    assert said(other, prompt)[0] == 48  # registered meanwhile
    written(other)


# --- who may read what ---


OTHERS = [
    ("another format", {"form": "int4 with residual"}),
    ("another block size", {"block_size": 8}),
    ("no residual", {"form": "int8 without residual"}),
    ("a window", WINDOW),
    ("unquantized layers", {"kv_skip_layers": "0"}),
    ("another dtype", {"dtype": "float64"}),
    ("not deterministic", {"deterministic": False}),
    ("another model", {"kind": "mixtral"}),
]


@pytest.mark.parametrize(("name", "other"), OTHERS, ids=[name for name, _ in OTHERS])
def test_another_model_or_other_options_find_nothing(begin, name, other):
    one, prompt = begin(), tokens(60)
    said(one, prompt)
    written(one)
    llm = begin(**other)
    assert said(llm, prompt)[0] == 0
    assert llm.stats().disk.blocks_read == 0
    written(llm)


def test_options_that_do_not_decide_bits_find_everything(begin):
    one, prompt = begin(), tokens(60)
    first = said(one, prompt)
    written(one)
    llm = begin(prefill_chunk=9, max_num_seqs=1, max_model_len=200, threads=1, prefix_tail_memory=0)
    assert said(llm, prompt) == (48, first[1])
    written(llm)


def test_other_weights_under_the_same_path_find_nothing(model_path, begin, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(model_path("llama"), model)
    one, prompt = engine(str(model), tmp_path / "cache", "fp32"), tokens(60)
    said(one, prompt)
    written(one)
    weights = load_file(model / "model.safetensors")
    name = next(key for key in weights if key.endswith("k_proj.weight"))
    save_file({**weights, name: weights[name] + 0.01}, model / "model.safetensors", {"format": "pt"})
    llm = engine(str(model), tmp_path / "cache", "fp32")
    assert said(llm, prompt)[0] == 0
    assert len(DiskFolder.existing(tmp_path / "cache").kinds()) == 2
    written(llm)


def test_a_codec_of_another_version_finds_nothing(begin, monkeypatch):
    one, prompt = begin(), tokens(60)
    said(one, prompt)
    written(one)
    monkeypatch.setattr("lean.engine.fingerprint.CODEC_VERSION", 999)
    llm = begin()
    assert said(llm, prompt)[0] == 0
    written(llm)


def test_a_loaded_model_and_a_foreign_folder_are_refused(begin, tmp_path):
    model: LoadedModel = begin(prefix_cache_dir=None).model
    config = EngineConfig(prefix_cache_dir=str(tmp_path / "x"), deterministic=True, dtype="float32")
    assert "LoadedModel" in refusal(LLM, model, config)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "thesis.txt").write_text("mine")
    assert "other files" in refusal(begin)


# --- lean cache ---


def test_lean_cache_lists_checks_and_removes(begin, tmp_path, capsys):
    folder = str(tmp_path / "cache")
    one = begin()
    said(one, tokens(60))
    written(one)
    [entry] = json_of("cache", "ls", folder)["entries"]
    assert entry["about"]["pools"][0]["format"] == "int8"
    assert entry["files"] == len(files(one)) > 0
    assert entry["id"][:ID_LENGTH] in lean("cache", "ls", folder)
    assert "0 damaged" in lean("cache", "check", folder)
    os.truncate(files(one)[0], 100)
    with pytest.raises(SystemExit):
        lean("cache", "check", folder)
    assert "--all" in refused("cache", "rm", folder)
    assert "no entry" in refused("cache", "rm", folder, "zzz")
    lean("cache", "rm", folder, entry["id"][:6])
    assert lean("cache", "ls", folder) == "the prefix cache is empty\n"
    for command in ("ls", "check"):
        assert "no prefix cache" in refused("cache", command, str(tmp_path))
