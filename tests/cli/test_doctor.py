"""``lean doctor`` reports problems and what to do, and finds kernels that compute wrong results."""

import json

import pytest
import torch
from typer.testing import CliRunner

from lean.cli import doctor
from lean.cli.main import app
from lean.kernels import check

CPU = torch.device("cpu")


def findings(topic):
    return [finding for finding in doctor.examine() if finding.topic == topic]


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8", "fp8", "int4", "k8v4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_that_serve_agree_with_the_reference(kv_dtype, dtype):
    assert check.worst_error(CPU, kv_dtype, dtype) <= doctor._TOLERANCE[dtype]


def test_wrong_outputs_and_wrong_bytes_are_found(monkeypatch):
    attention, write = check.paged_attention, check.kv_write
    monkeypatch.setattr(check, "paged_attention", lambda *args, **kwargs: attention(*args, **kwargs) * 1.01)
    assert check.worst_error(CPU, "int8", torch.float32) > 1e-3
    monkeypatch.setattr(check, "paged_attention", lambda *args, **kwargs: attention(*args, **kwargs) * torch.nan)
    assert check.worst_error(CPU, "int8", torch.float32) == float("inf")
    monkeypatch.undo()
    monkeypatch.setattr(check, "kv_write", lambda pool, key, value, slots: write(pool, key * 1.01, value, slots))
    assert check.worst_error(CPU, "int8", torch.float32) == float("inf")


def test_a_broken_kernel_is_a_problem_and_the_report_says_what_to_do(monkeypatch):
    monkeypatch.setattr("lean.kernels.check.worst_error", lambda *_: 0.5)
    found = doctor._check_kernels(CPU, "fast kernels")
    assert (found.level, "LEAN_KERNELS=reference" in found.mend) == ("problem", True)
    assert "off by 0.5 for bf16" in found.text

    def fail(*_):
        raise RuntimeError("no\nluck")

    monkeypatch.setattr("lean.kernels.check.worst_error", fail)
    assert "fails for bf16: no luck" in doctor._check_kernels(CPU, "fast kernels").text


def test_versions_that_are_missing_too_old_or_untested_are_reported(monkeypatch):
    monkeypatch.setattr(doctor, "version", lambda name: {"torch": "2.9.1", "transformers": "9.0"}.get(name, "0.50.2"))
    found = {finding.topic: finding for finding in doctor.packages()}
    assert (found["torch"].level, found["transformers"].level) == ("problem", "note")
    assert "pip install -U torch" in found["torch"].mend

    def missing(name):
        raise doctor.PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "version", missing)
    found = {finding.topic: finding for finding in doctor.packages()}
    assert found["torch"].level == "problem"
    assert (found["bitsandbytes"].level, "lean-inference[bnb]" in found["bitsandbytes"].mend) == ("note", True)


def test_a_variable_that_names_no_kernels_is_a_problem(monkeypatch):
    monkeypatch.setenv("LEAN_KERNELS", "fastest")
    [found] = findings("kernels")
    assert (found.level, "fastest" in found.text) == ("problem", True)


def test_the_command_prints_a_line_each_and_exits_by_health(monkeypatch, tmp_path):
    monkeypatch.setenv("LEAN_HOME", str(tmp_path))
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0
    assert f"storage: {tmp_path}" in result.stdout
    assert all(line.split()[0] in ("ok", "note", "problem") for line in result.stdout.splitlines())
    report = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)
    assert report["healthy"]
    assert {finding["topic"] for finding in report["findings"]} >= {"python", "torch", "cpu", "gpu", "kernels"}
    monkeypatch.setenv("LEAN_KERNELS", "fastest")
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 1
