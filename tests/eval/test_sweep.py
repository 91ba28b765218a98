"""A sweep measures every cell of its grid on one model, with the memory, accuracy and speed of that cell."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from helpers import refusal
from sweep_runs import BASE, GRID, run

from lean import EngineConfig
from lean.cache.plan import plan_cache
from lean.errors import ConfigError
from lean.eval.sweep.cells import EXACT, Cell, Impossible
from lean.eval.sweep.grid import Grid
from lean.model.info import inspect_model
from lean.quant import BF16
from lean.store.source import resolve


def test_the_grid_begins_with_the_exact_cache_and_has_no_cell_twice():
    cells = Grid(("int8",), (64, None, 64), (0, 64, 0)).cells()
    assert cells[:2] == [Cell(EXACT), Cell(EXACT, window=64)]
    assert cells[2:] == [Cell("int8", 0, 64), Cell("int8", 64, 64), Cell("int8"), Cell("int8", 64)]


def test_every_cell_is_measured_as_its_name_says(done):
    assert [cell.cell for cell in done.sweep.measured] == GRID.cells()
    for cell in done.sweep.measured:
        assert cell.fidelity.tokens_scored == 120
        assert cell.speed.tokens_per_s > 0
        assert cell.speed.ratio_low <= cell.speed.ratio <= cell.speed.ratio_high


def test_the_first_cell_is_the_floor_and_formats_lie_above_it(done):
    floor, *others = [cell.fidelity.kld_mean for cell in done.sweep.measured]
    assert abs(floor) < 1e-9
    assert all(kld > 10 * abs(floor) for kld in others)


def test_windows_are_compared_with_the_exact_cache_without_a_window(done):
    found = {cell.cell: cell for cell in done.sweep.measured}
    assert found[Cell(EXACT, window=64)].fidelity.kld_mean > 100 * found[Cell("int8")].fidelity.kld_mean
    assert len({cell.fidelity.ppl_exact for cell in done.sweep.measured}) == 1


def test_sizes_are_those_of_a_bf16_model_with_blocks_and_residual(done, model):
    info = inspect_model(resolve(str(model)), EngineConfig())
    found = {cell.cell: cell.nbytes for cell in done.sweep.measured}
    config = EngineConfig("int4", kv_residual_length=32, max_num_seqs=1)
    plan = plan_cache(info.layers, config, BF16)
    assert str(info.dtype) == "torch.float32"
    assert found[Cell("int4", 32)].held == plan.bytes_at(256) > found[Cell("int4")].held
    assert found[Cell("int4", 32)].per_token == plan.bytes_per_token
    assert found[Cell(EXACT)].token_ratio == 1
    assert found[Cell("int4", 0, 64)].held_bf16 == found[Cell(EXACT)].held_bf16


def test_cells_that_cannot_run_are_kept_with_their_reason(tiny, tmp_path):
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


def test_a_window_within_the_residual_is_reported_as_the_exact_cache(model, tmp_path):
    sweep = run(model, tmp_path, Grid(("int8",), (32,), (32,), max_tokens=60, context=64))
    (cell,) = sweep.impossible
    assert cell == Impossible(Cell("int8", 32, 32), cell.reason)
    assert "the residual of 32 tokens covers the window" in cell.reason


def test_a_window_longer_than_the_text_is_marked(model, tmp_path):
    sweep = run(model, tmp_path, Grid(("int8",), (100,), (0,), max_tokens=60, context=64))
    assert {cell.cell.window: cell.window_reached for cell in sweep.measured} == {None: True, 100: False}


def test_options_that_no_engine_can_run_are_an_error_and_not_a_cell(model, tmp_path):
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
