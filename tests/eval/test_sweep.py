"""lean sweep: every cell through one model, kept as it ends, and resumed with the same results."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
import yaml
from helpers import refusal

import lean.eval.sweep.run as sweep_module
from lean import EngineConfig
from lean.cache.plan import plan_cache
from lean.cli.sweep import _formats
from lean.cli.sweep import sweep as command
from lean.errors import ConfigError, LeanError, UserError
from lean.eval.corpus import Corpus
from lean.eval.sweep.cells import EXACT, Cell, Impossible, from_json, to_json
from lean.eval.sweep.grid import Grid
from lean.eval.sweep.run import run_sweep
from lean.model.load import inspect_model
from lean.quant import BF16
from lean.store.source import resolve

TEXT = Corpus("letters", "A short text, read again and again by a model that knows nothing. " * 4, "made here")
BASE = EngineConfig(max_num_seqs=1, prefill_chunk=64)
GRID = Grid(("int8", "int4"), (None, 64), (0, 32), max_tokens=120, context=256)


class Silent:
    """Progress that nobody sees."""

    def begin(self, cells, done, tokens_per_cell):
        self.cells, self.done = cells, done

    def say(self, what): ...
    def advance(self, tokens): ...
    def ended(self, result): ...


class KilledAfter(Silent):
    """Stops the sweep when so many cells have ended, or while the next one runs."""

    def __init__(self, cells, inside=False):
        self.left, self.inside = cells, inside

    def ended(self, result):
        self.left -= 1
        if not self.left and not self.inside:
            raise KeyboardInterrupt

    def say(self, what):
        if not self.left and self.inside and what.endswith("speed"):
            raise KeyboardInterrupt


def run(model, out, grid=GRID, base=BASE, corpus=TEXT, progress=None):
    return run_sweep(resolve(str(model)), base, grid, corpus, Path(out), progress or Silent())


def figures(sweep):
    """All that does not depend on the hour."""
    timed = {"speed", "seconds", "date"}
    return [{key: value for key, value in to_json(cell).items() if key not in timed} for cell in sweep.results]


@pytest.fixture(scope="module")
def model(tiny):
    return tiny("llama")


@pytest.fixture(scope="module")
def done(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("sweep")
    return SimpleNamespace(out=out, sweep=run(model, out))


def test_the_grid_begins_with_the_exact_cache_and_has_no_cell_twice():
    cells = Grid(("int8",), (64, None, 64), (0, 64, 0)).cells()
    assert cells[:2] == [Cell(EXACT), Cell(EXACT, window=64)]
    assert cells[2:] == [Cell("int8", 0, 64), Cell("int8", 64, 64), Cell("int8"), Cell("int8", 64)]


def test_every_cell_is_measured_with_what_its_name_says(done):
    assert [cell.cell for cell in done.sweep.measured] == GRID.cells()
    for cell in done.sweep.measured:
        assert cell.fidelity.tokens_scored == 120
        assert cell.speed.tokens_per_s > 0
        assert cell.speed.ratio_low <= cell.speed.ratio <= cell.speed.ratio_high


def test_the_first_cell_is_the_floor_and_formats_lie_above_it(done):
    floor, *others = [cell.fidelity.kld_mean for cell in done.sweep.measured]
    assert abs(floor) < 1e-9
    assert all(kld > 10 * abs(floor) for kld in others)


def test_windows_are_compared_with_the_exact_cache_that_sees_all(done):
    found = {cell.cell: cell for cell in done.sweep.measured}
    assert found[Cell(EXACT, window=64)].fidelity.kld_mean > 100 * found[Cell("int8")].fidelity.kld_mean
    assert len({cell.fidelity.ppl_exact for cell in done.sweep.measured}) == 1


def test_sizes_are_those_of_a_bf16_model_with_blocks_and_residual(done, model):
    info = inspect_model(resolve(str(model)))
    found = {cell.cell: cell.nbytes for cell in done.sweep.measured}
    config = EngineConfig("int4", kv_residual_length=32, max_num_seqs=1)
    plan = plan_cache(info.layers, config, BF16)
    assert str(info.dtype) == "torch.float32"
    assert found[Cell("int4", 32)].held == plan.bytes_at(256) > found[Cell("int4")].held
    assert found[Cell("int4", 32)].per_token == plan.bytes_per_token
    assert found[Cell(EXACT)].token_ratio == 1
    assert found[Cell("int4", 0, 64)].held_bf16 == found[Cell(EXACT)].held_bf16


def test_results_survive_their_file(done):
    lines = (done.out / "results.jsonl").read_bytes().splitlines()
    assert [from_json(json.loads(line)) for line in lines] == done.sweep.results


@pytest.mark.parametrize("inside", [False, True], ids=["between cells", "inside a cell"])
def test_a_sweep_that_was_stopped_goes_on_to_the_same_results(model, done, tmp_path, inside):
    with pytest.raises(KeyboardInterrupt):
        run(model, tmp_path, progress=KilledAfter(3, inside))
    assert len((tmp_path / "results.jsonl").read_bytes().splitlines()) == 3
    progress = Silent()
    assert figures(run(model, tmp_path, progress=progress)) == figures(done.sweep)
    assert (progress.done, progress.cells) == (3, len(GRID.cells()) - 3)


def test_a_torn_last_line_is_dropped_and_its_cell_runs_again(model, done, tmp_path):
    copy(done.out, tmp_path)
    written = (tmp_path / "results.jsonl").read_bytes()
    (tmp_path / "results.jsonl").write_bytes(written[:-20])
    assert figures(run(model, tmp_path)) == figures(done.sweep)
    assert len((tmp_path / "results.jsonl").read_bytes().splitlines()) == len(GRID.cells())


def copy(source, target):
    for name in ("config.yaml", "results.jsonl"):
        (target / name).write_bytes((source / name).read_bytes())


def test_a_finished_sweep_loads_no_weights(model, done, tmp_path, monkeypatch):
    copy(done.out, tmp_path)
    monkeypatch.setattr(sweep_module, "LLM", None)
    assert run(model, tmp_path).results == done.sweep.results


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"grid": replace(GRID, max_tokens=100)}, "grid.max_tokens is 120 there and 100 here"),
        ({"grid": replace(GRID, formats=("int8",))}, "grid.formats"),
        ({"base": replace(BASE, prefill_chunk=32)}, "engine.prefill_chunk"),
        ({"corpus": Corpus("letters", TEXT.text + "!", "made here")}, "corpus.sha256"),
    ],
)
def test_a_folder_of_another_sweep_is_refused_and_left_alone(model, done, tmp_path, change, named):
    copy(done.out, tmp_path)
    before = (tmp_path / "results.jsonl").read_bytes()
    assert named in refusal(run, model, tmp_path, **change)
    assert (tmp_path / "results.jsonl").read_bytes() == before


def test_results_that_lean_did_not_write_are_refused(model, done, tmp_path):
    (tmp_path / "results.jsonl").write_text("mine\n")
    assert "without its config.yaml" in refusal(run, model, tmp_path)
    copy(done.out, tmp_path)
    (tmp_path / "results.jsonl").write_text('{"a": 1}\n')
    assert "line 1 is not a result" in refusal(run, model, tmp_path)
    assert (tmp_path / "results.jsonl").read_text() == '{"a": 1}\n'
    (tmp_path / "file").write_text("")
    assert "cannot write into" in refusal(run, model, tmp_path / "file")


def test_two_sweeps_do_not_share_a_folder(model, tmp_path):
    class Second(Silent):
        def begin(self, cells, done, tokens_per_cell):
            assert "another sweep" in refusal(run, model, tmp_path)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(model, tmp_path, progress=Second())


def test_cells_that_cannot_be_are_kept_with_their_reason(tiny, tmp_path):
    model = tiny("llama", head_dim=12)
    grid = Grid(("int8", "fp32"), (None, 32), (0, 32), max_tokens=40, context=64)
    sweep = run(model, tmp_path, grid)
    reasons = {cell.cell: cell.reason for cell in sweep.impossible}
    assert "head_dim 12 does not fit int8" in reasons[Cell("int8")]
    assert "no layer is quantized" in reasons[Cell("fp32", 32)]
    assert {cell.cell for cell in sweep.measured} == {
        Cell(EXACT), Cell(EXACT, window=32), Cell("fp32"), Cell("fp32", 0, 32)
    }  # fmt: skip
    assert run(model, tmp_path, grid).results == sweep.results


def test_a_window_within_the_residual_is_said_to_be_the_exact_cache(model, tmp_path):
    sweep = run(model, tmp_path, Grid(("int8",), (32,), (32,), max_tokens=60, context=64))
    (cell,) = sweep.impossible
    assert cell == Impossible(Cell("int8", 32, 32), cell.reason)
    assert "the residual of 32 covers them" in cell.reason


def test_a_window_longer_than_the_text_is_marked(model, tmp_path):
    sweep = run(model, tmp_path, Grid(("int8",), (100,), (0,), max_tokens=60, context=64))
    assert {cell.cell.window: cell.window_reached for cell in sweep.measured} == {None: True, 100: False}


def test_what_no_engine_can_run_is_an_error_and_not_a_cell(model, tmp_path):
    assert "max-model-len 600 exceeds" in refusal(run, model, tmp_path, base=replace(BASE, max_model_len=600))
    assert not (tmp_path / "results.jsonl").read_bytes()
    assert len(run(model, tmp_path, replace(GRID, formats=(), windows=(None,))).results) == 1  # the folder is free


@pytest.mark.parametrize(
    "change", [{"formats": ("int9",)}, {"windows": (0,)}, {"residuals": (-1,)}, {"max_tokens": 1}, {"context": 0}]
)
def test_impossible_grids_are_refused(change):
    with pytest.raises(ConfigError):
        replace(GRID, **change)


def test_needles_and_tasks_run_on_the_cells_engine(model, tmp_path, monkeypatch):
    seen = []

    def run_needle(llm, text, lengths, depths, *, trials):
        return iter([SimpleNamespace(length=length, trials=trials, kv=llm.config.kv_dtype) for length in lengths])

    def run_tasks(llm, tasks, limit):
        seen.append((llm.config.kv_dtype, tasks, limit))
        return {"tasks": {"t": {"metrics": {"acc": {"value": 0.5, "stderr": 0.1}}}}}

    needle = SimpleNamespace(
        ANSWER_TOKENS=12,
        run_needle=run_needle,
        needle_report=lambda cells: {"accuracy": 1.0, "stderr": 0.1, "kv": [cell.kv for cell in cells]},
    )
    monkeypatch.setitem(sys.modules, "lean.eval.score.needle", needle)
    monkeypatch.setitem(sys.modules, "lean.eval.tasks", SimpleNamespace(run_tasks=run_tasks))
    grid = Grid(("int4",), (None,), (0,), 60, 64, needle_lengths=(40, 50), tasks=("t",), task_limit=3)
    sweep = run(model, tmp_path, grid)
    assert [cell.needle["kv"] for cell in sweep.measured] == [["auto", "auto"], ["int4", "int4"]]
    assert seen == [("auto", ("t",), 3), ("int4", ("t",), 3)]


# --- the command ---


@pytest.fixture
def lean(monkeypatch, capsys):
    """``lean(*arguments)`` -> (stdout, stderr)."""
    pytest.importorskip("matplotlib")
    app = typer.Typer(add_completion=False)
    app.command()(command)

    def call(*arguments):
        app([str(argument) for argument in arguments], standalone_mode=False)
        return capsys.readouterr()

    return call


SMALL = (
    "--formats",
    "int8",
    "--windows",
    "none",
    "--residuals",
    "0",
    "--max-tokens",
    "60",
    "--context-of-report",
    "64",
)


def test_the_command_prints_a_table_and_writes_the_files(lean, model, tmp_path, monkeypatch):
    (tmp_path / "text").write_text(TEXT.text)
    out = tmp_path / "out"
    printed = lean(model, *SMALL, "--text", tmp_path / "text", "--out", out)
    assert "| int8   | -        | -" in printed.out
    assert "Recommended: " in printed.out
    assert {file.name for file in out.iterdir()} == {
        "config.yaml", "results.jsonl", "frontier.csv", "frontier.png", "report.html"
    }  # fmt: skip
    monkeypatch.setattr("lean.eval.sweep.page.write_report", lambda judged, folder: [])
    report = json.loads(lean(model, *SMALL, "--text", tmp_path / "text", "--out", out, "--json").out)
    assert [cell["name"] for cell in report["cells"]] == ["exact", "int8"]
    assert report["config"] == yaml.safe_load((out / "config.yaml").read_text())


def test_without_matplotlib_nothing_runs(lean, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(LeanError) as caught:
        lean("no-such-model", "--out", tmp_path / "out")
    assert "lean-inference[eval]" in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--out DIR is missing"),
        (("--out", "o", "--kv-dtype", "int4"), "use --formats"),
        (("--out", "o", "--window", "64"), "use --windows"),
        (("--out", "o", "--windows", "many"), "'many' is no whole number"),
        (("--out", "o", "--formats", "int8,,int4"), "commas between"),
        (("--out", "o", "--formats", "int9"), "int9"),
        (("--out", "o", "--text", "t", "--corpus", "python-docs"), "two texts"),
        (("--out", "o", "--bos", "twice"), "bos 'twice'"),
        (("--out", "o", "--limit", "3"), "of the --tasks"),
    ],
)
def test_what_makes_no_sense_is_one_line(lean, arguments, message):
    with pytest.raises(UserError) as caught:
        lean("no-such-model", *arguments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_format_of_two_parts_is_one_item():
    assert _formats("int8,k=int8,v=fp8,int4") == ("int8", "k=int8,v=fp8", "int4")
    assert _formats("k=fp8,v=int4") == ("k=fp8,v=int4",)


@pytest.mark.slow
def test_a_killed_process_loses_only_its_running_cell(model, done, tmp_path):
    """SIGKILL at whatever point it is, several times; the rest is run by the last one."""
    script = f"""
import torch
from test_sweep import run, GRID
torch.set_num_threads(1)  # as in this process: the number of threads is part of a sweep's configuration
run({str(model)!r}, {str(tmp_path)!r})
"""
    for _ in range(3):
        path = [str(Path(__file__).parent), *sys.path]
        child = subprocess.Popen([sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}\n{script}"])
        lines = tmp_path / "results.jsonl"
        before = len(lines.read_bytes().splitlines()) if lines.exists() else 0
        while child.poll() is None and (not lines.exists() or len(lines.read_bytes().splitlines()) <= before + 1):
            time.sleep(0.01)
        child.kill()
        child.wait()
        assert len(lines.read_bytes().splitlines()) > before
    assert figures(run(model, tmp_path)) == figures(done.sweep)
