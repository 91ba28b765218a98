"""Reports of the needle test: JSON, table and picture, with errors that are never zero."""

import json
import re
import sys

import pytest

from lean.errors import LeanError
from lean.eval.score.needle import NeedleCell, draw_map, needle_report, print_map

CELLS = [NeedleCell(512, 0, 4, 4), NeedleCell(512, 50, 3, 4), NeedleCell(2048, 0, 0, 4)]


def test_the_error_is_wilsons_and_never_zero():
    assert NeedleCell(1, 0, 4, 4).stderr == pytest.approx(0.1)  # his interval is 0.8 .. 1
    assert NeedleCell(1, 0, 0, 4).stderr == pytest.approx(0.1)
    assert NeedleCell(1, 0, 5000, 10_000).stderr == pytest.approx(0.005, rel=1e-3)  # as the plain one


def test_a_report_has_every_cell_and_their_sum_for_json():
    report = json.loads(json.dumps(needle_report(iter(CELLS)), allow_nan=False))
    assert report.keys() == {"accuracy", "stderr", "correct", "trials", "cells"}
    assert (report["correct"], report["trials"], report["accuracy"]) == (7, 12, pytest.approx(7 / 12))
    assert len(report["cells"]) == 3
    assert report["cells"][1] == {
        "length": 512,
        "depth": 50,
        "correct": 3,
        "trials": 4,
        "accuracy": 0.75,
        "stderr": CELLS[1].stderr,
    }


def test_the_table_has_a_row_for_every_depth_and_a_column_for_every_length(capsys):
    print_map(CELLS, "int8")
    lines = [re.findall(r"[\w,/%]+", line) for line in capsys.readouterr().out.splitlines()]
    assert ["int8"] in lines
    assert ["depth", "512", "2,048"] in lines
    assert ["0%", "4/4", "0/4"] in lines
    assert ["50%", "3/4"] in lines


def test_the_map_is_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "needle.png"
    draw_map(CELLS, str(file), "int8")
    assert file.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(LeanError, match=r"lean-inference\[eval\]"):
        draw_map(CELLS, str(tmp_path / "needle.png"), "int8")
