"""Whether packed weights are too slow is decided once for a CPU and a torch, so later starts have the same weights."""

import json

import pytest
import torch

from lean.model import verdicts
from lean.model.verdicts import FILE, is_slow
from lean.quant import trial


@pytest.fixture
def measured(monkeypatch):
    """The shapes that were measured; every other measurement says slow."""
    seen = []

    def measure(kind, outputs, inputs):
        seen.append((kind, outputs, inputs))
        return len(seen) % 2 == 1

    monkeypatch.setattr(trial, "is_slow", measure)
    return seen


def test_the_first_measurement_counts_for_later_starts(home, measured):
    assert [is_slow("int4", 64, 32) for _ in range(3)] == [True] * 3
    assert [is_slow("int4", 64, 64) for _ in range(2)] == [False] * 2
    assert is_slow("int8", 64, 32)
    assert measured == [("int4", 64, 32), ("int4", 64, 64), ("int8", 64, 32)]


@pytest.mark.parametrize("change", ["name", "features", "capability", "torch"])
def test_another_cpu_or_torch_measures_anew(home, measured, monkeypatch, change):
    assert is_slow("int4", 64, 32)
    if change == "torch":
        monkeypatch.setattr(torch, "__version__", "9.9")
    elif change == "capability":
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "other")
    else:
        monkeypatch.setattr(verdicts, f"cpu_{change}", lambda: "other")
    assert not is_slow("int4", 64, 32)
    monkeypatch.undo()


def test_a_process_that_measured_meanwhile_is_believed(home, monkeypatch):
    def measure(*_):
        verdicts._keep(home, "int4 64x32", True)
        return False

    monkeypatch.setattr(trial, "is_slow", measure)
    assert is_slow("int4", 64, 32)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"x": 1}', b'{"x": {"y": "yes"}}', b"\xff"])
def test_a_damaged_file_is_replaced(home, measured, content):
    home.mkdir()
    (home / FILE).write_bytes(content)
    assert is_slow("int4", 64, 32)
    assert is_slow("int4", 64, 32)
    assert len(json.loads((home / FILE).read_bytes())) == 1


def test_without_a_place_for_files_it_is_measured_every_time(monkeypatch, measured, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LEAN_HOME", str(tmp_path / "file" / "folder"))
    assert [is_slow("int4", 64, 32), is_slow("int4", 64, 32)] == [True, False]

    def no_home():
        raise verdicts.NoHome("none")

    monkeypatch.setattr(verdicts, "cache_dir", no_home)
    assert is_slow("int4", 64, 32)
