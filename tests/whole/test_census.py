"""The census on a sample of types, what it says about faults of an engine, and the page that it writes.

`make census` runs every type; the sample has the kinds that differ most.
"""

import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path

import census_check
import census_models
import census_page
import census_workers
import pytest
import torch
import transformers
from census_check import Row, check
from census_workers import run_each
from safetensors.torch import load_file

from lean import LLM, ConfigError, EngineError
from lean.engine import assemble
from lean.model.load import LoadedModel

PROGRAM = Path(__file__).with_name("census.py")
PAGE = census_page.PATH.read_text(encoding="utf-8")
SAME_RELEASE = census_page.version_of(PAGE) == transformers.__version__

SAMPLE = {  # what is special about a type
    "apertus": "an activation with learned parameters",
    "aria_text": "experts, shared ones among them",
    "codegen": "rotates pairs of neighbours, on some dims only",
    "cohere": "attention and MLP side by side, no norm between them",
    "ctrl": "adds sinusoids to the embedding",
    "deepseek_v32": "refused: attends to the keys that an indexer picks",
    "ernie4_5_moe": "experts in some layers",
    "gpt_bigcode": "one K/V head, learned positions",
    "gpt_neox": "partial rotation",
    "hunyuan_v1_dense": "norms of queries and keys after their rotation",
    "hyperclovax": "multipliers of embeddings, residuals, attention and logits",
    "jetmoe": "experts of attention",
    "mamba": "refused: state space",
    "ministral": "windows in every other layer",
    "nanochat": "rotates the other way round",
    "opt": "learned positions with an offset",
    "persimmon": "LayerNorm of queries and keys, partial rotation",
    "smollm3": "layers without rotation",
    "starcoder2": "biases everywhere",
    "xlnet": "refused: no attention interface",
}


@pytest.mark.parametrize("name", SAMPLE)
def test_a_type_gives_the_numbers_of_transformers_or_is_refused_as_the_page_says(name):
    if census_models.type_of(name) not in census_models.types():
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    row = check(name)
    assert row.good, row
    if SAME_RELEASE:
        assert (row.state, row.window) == census_page.states_of(PAGE)[name], row


# --- faults are found ---


@pytest.fixture
def one_layer(monkeypatch):
    """Models of type llama are smaller still."""
    monkeypatch.setitem(census_models.rules()["types"], "llama", {"num_hidden_layers": 1})


def raising(error: Exception):
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    return fail


def scaled(patch: pytest.MonkeyPatch) -> None:
    compute = LoadedModel.logits
    patch.setattr(LoadedModel, "logits", lambda self, hidden: compute(self, hidden) * 1.01)


def last_token_replaced(patch: pytest.MonkeyPatch) -> None:
    compute = census_check.greedy
    patch.setattr(census_check, "greedy", lambda *args: [[*ids[:-1], 7] for ids in compute(*args)])


def chunks_confused(patch: pytest.MonkeyPatch) -> None:
    """Right in one shot, wrong in chunks."""
    compute = census_check.packed_logits
    patch.setattr(census_check, "packed_logits", lambda llm: [rows.roll(16, 0) for rows in compute(llm)])


def step_fails(patch: pytest.MonkeyPatch) -> None:
    """The engine starts and gives up later: that is no refusal."""
    patch.setattr(LLM, "generate", raising(EngineError("the step failed")))


def int8_not_finite(patch: pytest.MonkeyPatch) -> None:
    start = census_check.engine

    def broken(model: object, **options: object) -> object:
        llm = start(model, **options)
        if options.get("kv_dtype") == "int8":
            llm.logits = lambda hidden: hidden * torch.nan
        return llm

    patch.setattr(census_check, "engine", broken)


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (scaled, "logits differ"),
        (chunks_confused, "logits differ"),
        (last_token_replaced, "greedy decoding: token 11"),
        (int8_not_finite, "int8"),
        (step_fails, "the step failed"),
    ],
)
def test_wrong_numbers_are_called_wrong(one_layer, monkeypatch, fault, why):
    fault(monkeypatch)
    row = check("llama")
    assert (row.state, row.dtype, row.good) == ("wrong", "float32", False)
    assert why in row.why


@pytest.mark.parametrize("change", [{"window": 31}, {"sinks": 3}, {"window": 48}])
def test_a_window_of_another_size_is_called_wrong(one_layer, monkeypatch, change):
    start = census_check.engine

    def other(model: object, **options: object) -> object:
        return start(model, **(options | change if options.get("window") else options))

    monkeypatch.setattr(census_check, "engine", other)
    row = check("llama")
    assert (row.state, row.window, row.good) == ("served", "wrong", False)


@pytest.mark.parametrize(
    ("part", "error", "state", "late"),
    [
        ("plan_cache", ConfigError("it has too many layers"), "refused", False),
        ("try_layers", ConfigError("it has too many layers"), "refused", True),
        ("plan_cache", ConfigError("two\nlines"), "traceback", False),
        ("try_layers", KeyError("lean"), "traceback", False),
    ],
)
def test_only_a_line_before_weights_are_read_is_a_good_refusal(one_layer, monkeypatch, part, error, state, late):
    monkeypatch.setattr(assemble, part, raising(error))
    row = check("llama")
    assert (row.state, row.late, row.good) == (state, late, state == "refused" and not late)
    assert "\n" not in row.why


def test_float64_is_compared_where_float32_is_too_coarse_and_excuses_no_fault(one_layer, monkeypatch):
    bound = 1e-10  # float32 does not hold it
    monkeypatch.setattr(census_check, "bound_of", lambda logits: bound)
    monkeypatch.setattr(census_check, "ANSWER", 2)
    row = check("llama")
    assert (row.state, row.dtype) == ("served", "float64")
    assert row.error < bound
    scaled(monkeypatch)
    row = check("llama")
    assert (row.state, row.dtype) == ("wrong", "float32")


def test_a_model_whose_attention_hardly_counts_is_not_compared(one_layer, monkeypatch):
    randomise = census_models.randomise

    def weak(model: torch.nn.Module, *args: object) -> None:
        randomise(model, *args)
        for name, parameter in model.named_parameters():
            if "o_proj" in name:
                parameter.data *= 1e-4

    monkeypatch.setattr(census_models, "randomise", weak)
    row = check("llama")
    assert row.state == "not run"
    assert "hardly depend" in row.transformers


@pytest.mark.parametrize("name", ["starcoder2", "gpt_oss"])
def test_no_parameter_of_a_small_model_is_constant(name, tmp_path):
    census_models.build(name, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert not [key for key, tensor in tensors.items() if tensor.std() < 0.01]


# --- processes ---


def strange(item: str) -> str:
    if item == "sleeps":
        time.sleep(60)
    if item == "crashes":
        os.kill(os.getpid(), signal.SIGKILL)
    if item == "leaves":
        os._exit(3)
    if item == "grows":
        torch.empty(census_workers.MOST_BYTES, dtype=torch.uint8)
    print("done")
    return item.upper()


def test_a_process_that_fails_ends_alone(tmp_path):
    found = {
        name: rest
        for name, *rest in run_each(strange, ["sleeps", "crashes", "leaves", "works"], tmp_path, jobs=2, seconds=1)
    }
    assert {name: (result, problem) for name, (result, problem, _) in found.items()} == {
        "sleeps": (None, "did not finish in 1 s"),
        "crashes": (None, "was ended by signal 9"),
        "leaves": (None, "ended with exit code 3"),
        "works": ("WORKS", ""),
    }
    assert (tmp_path / "works.log").read_text() == "done\n"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the data of a process")
def test_a_process_that_grows_is_stopped(tmp_path):
    [(_, result, problem, _)] = run_each(strange, ["grows"], tmp_path)
    assert (result, problem) == (None, "ended with exit code 1")
    assert "memory" in (tmp_path / "grows.log").read_text()


@pytest.fixture
def census(monkeypatch, capsys):
    """``census(*arguments)``: (exit code, what the program prints)."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("OMP_NUM_THREADS", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "1")

    def run(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["census", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(PROGRAM), run_name="__main__")
        return ended.value.code, "".join(capsys.readouterr())

    return run


def test_the_program_keeps_results_and_writes_no_page_without_all_of_them(census, tmp_path):
    results = tmp_path / "results.jsonl"
    code, out = census("--types", "bloom", "--results", results, "--write")
    assert code == 1
    assert "not written" in out
    assert json.loads(results.read_text())["state"] == "refused"
    assert "[1/1] bloom" in out
    code, out = census("--types", "no-such-type")
    assert code == 2
    assert "no-such-type" in out


# --- the page ---


def test_the_page_lists_every_row_once_with_its_reason():
    rows = [
        Row("llama", "served", dtype="float64", error=1e-7, spread=0.1, window="refused", window_why="no | rotation"),
        Row("llama+late", "refused", "a reason", late=True),
        Row("bert", "not run", transformers="ValueError: sizes"),
    ]
    text = census_page.page(rows, "5.0.0")
    assert census_page.version_of(text) == "5.0.0"
    assert census_page.states_of(text) == {
        "llama": ("served", "refused"),
        "llama+late": ("refused late", ""),
        "bert": ("not run", ""),
    }
    assert "| `llama` | served | 1e-06 (float64) | refused | `--window`: no \\| rotation |" in text
    assert "| all | 1 | 1 | 1 |" in text
    assert "a reason" in text


@pytest.mark.skipif(not SAME_RELEASE, reason="docs/models.md is about another release of transformers")
def test_the_page_of_this_release_lists_every_type_and_every_variant():
    listed = census_page.states_of(PAGE)
    assert sorted(listed) == sorted([*census_models.types(), *census_models.variants()])
