"""The folder of a sweep: results are kept as cells end, and an interrupted sweep continues to the same results."""

import json
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from helpers import refusal
from sweep_runs import BASE, GRID, TEXT, KilledAfter, Silent, copy_results, figures, run

import lean.eval.sweep.run as sweep_module
from lean.eval.corpus import Corpus
from lean.eval.sweep.cells import from_json


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
    copy_results(done.out, tmp_path)
    written = (tmp_path / "results.jsonl").read_bytes()
    (tmp_path / "results.jsonl").write_bytes(written[:-20])
    assert figures(run(model, tmp_path)) == figures(done.sweep)
    assert len((tmp_path / "results.jsonl").read_bytes().splitlines()) == len(GRID.cells())


def test_a_finished_sweep_loads_no_weights(model, done, tmp_path, monkeypatch):
    copy_results(done.out, tmp_path)
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
    copy_results(done.out, tmp_path)
    before = (tmp_path / "results.jsonl").read_bytes()
    assert named in refusal(run, model, tmp_path, **change)
    assert (tmp_path / "results.jsonl").read_bytes() == before


def test_results_that_lean_did_not_write_are_refused(model, done, tmp_path):
    (tmp_path / "results.jsonl").write_text("mine\n")
    assert "without its config.yaml" in refusal(run, model, tmp_path)
    copy_results(done.out, tmp_path)
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


@pytest.mark.slow
def test_a_killed_process_loses_only_its_running_cell(model, done, tmp_path):
    """SIGKILL at several random points; the last run finishes the sweep."""
    script = f"""
import torch
from sweep_runs import GRID, run
torch.set_num_threads(1)  # as in this process: the number of threads is part of a sweep's configuration
run({str(model)!r}, {str(tmp_path)!r})
"""
    for _ in range(3):
        child = subprocess.Popen([sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{script}"])
        lines = tmp_path / "results.jsonl"
        before = len(lines.read_bytes().splitlines()) if lines.exists() else 0
        while child.poll() is None and (not lines.exists() or len(lines.read_bytes().splitlines()) <= before + 1):
            time.sleep(0.01)
        child.kill()
        child.wait()
        assert len(lines.read_bytes().splitlines()) > before
    assert figures(run(model, tmp_path)) == figures(done.sweep)
