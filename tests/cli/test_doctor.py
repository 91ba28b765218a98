"""``lean doctor`` reports problems and what to do, and finds kernels that compute wrong results."""

import json

import pytest
import torch
from fake_gpus import Card, install
from typer.testing import CliRunner

from lean.cli import doctor
from lean.cli.doctor import Finding
from lean.cli.main import app
from lean.kernels import check
from lean.machine.cpus import Cpus
from lean.machine.memory import MemoryBound

CPU = torch.device("cpu")


def findings(topic):
    return [finding for finding in doctor.examine() if finding.topic == topic]


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8", "fp8", "int4", "k8v4", "k6v4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_that_serve_agree_with_the_reference(kv_dtype, dtype):
    assert check.worst_error(CPU, kv_dtype, dtype) <= doctor._TOLERANCE[dtype]


def test_wrong_outputs_and_wrong_bytes_are_found(monkeypatch):
    attention, write = check.paged_attention, check.write_tokens
    monkeypatch.setattr(check, "paged_attention", lambda *args, **kwargs: attention(*args, **kwargs) * 1.01)
    assert check.worst_error(CPU, "int8", torch.float32) > 1e-3
    monkeypatch.setattr(check, "paged_attention", lambda *args, **kwargs: attention(*args, **kwargs) * torch.nan)
    assert check.worst_error(CPU, "int8", torch.float32) == float("inf")
    monkeypatch.undo()
    monkeypatch.setattr(check, "write_tokens", lambda pool, key, *more: write(pool, key * 1.01, *more))
    assert check.worst_error(CPU, "int8", torch.float32) == float("inf")


def test_a_fault_of_decode_steps_alone_is_found(monkeypatch):
    """Steps of single rows are served by a kernel of their own."""
    attention = check.paged_attention

    def wrong(query, pool, tables, starts, lengths, **rule):
        out = attention(query, pool, tables, starts, lengths, **rule)
        return out * 1.01 if len(query) == len(lengths) else out

    monkeypatch.setattr(check, "paged_attention", wrong)
    assert check.worst_error(CPU, "int8", torch.float32) > 1e-3


def test_a_recorded_step_must_read_and_write_what_is_new():
    def exact(step):
        step()
        return step

    def stale(step):
        out = step()
        return lambda: (step(), out)[1]

    def writes_nothing(step):
        step()
        return lambda: torch.zeros(3, 6, 64)

    assert check.worst_error(CPU, "int8", torch.float32, exact) <= doctor._TOLERANCE[torch.float32]
    assert check.worst_error(CPU, "int8", torch.float32, stale) > 1e-3
    assert check.worst_error(CPU, "int8", torch.float32, writes_nothing) == float("inf")


def test_on_a_gpu_steps_are_recorded_and_every_format_and_dtype_is_checked(monkeypatch):
    checked = []
    monkeypatch.setattr("lean.engine.cuda_graphs.CudaGraphs", lambda device: "recorder")
    monkeypatch.setattr("lean.kernels.check.worst_error", lambda *case: checked.append(case) or 0.0)
    cuda = torch.device("cuda")
    found = doctor._check_kernels(cuda, "Triton")
    assert (found.level, "recorded steps included" in found.text) == ("ok", True)
    assert {case[0] for case in checked} == {cuda}
    assert {case[3] for case in checked} == {"recorder"}
    assert {case[1] for case in checked} == {"bf16", "int8", "fp8", "int4", "k8v4", "k6v4", "k=int5,v=int3"}
    assert {case[2] for case in checked} == {torch.float32, torch.bfloat16, torch.float16}


def test_a_broken_kernel_is_a_problem_and_the_report_says_what_to_do(monkeypatch):
    monkeypatch.setattr("lean.kernels.check.worst_error", lambda *_: 0.5)
    found = doctor._check_kernels(CPU, "fast kernels")
    assert (found.level, "LEAN_KERNELS=reference" in found.mend) == ("problem", True)
    assert "off by 0.5 for bf16" in found.text

    def fail(*_):
        raise RuntimeError("no\nluck")

    monkeypatch.setattr("lean.kernels.check.worst_error", fail)
    assert "fails for bf16: no luck" in doctor._check_kernels(CPU, "fast kernels").text


def test_a_gpu_that_torch_has_no_code_for_is_a_problem(monkeypatch):
    cards = (Card("NVIDIA TITAN V", 7, 0), Card())
    install(monkeypatch, *cards)
    old, new = [finding for finding in doctor.devices() if finding.topic == "gpu"]
    assert (old.level, new.level) == ("problem", "ok")
    assert "NVIDIA TITAN V is sm_70, and torch" in old.mend
    monkeypatch.setattr(doctor, "_check_kernels", lambda device, serving: Finding("kernels", "ok", str(device)))
    assert [finding.text for finding in doctor.kernels()][-1] == "cuda:1"


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
    assert set(report["machine"]) == {"cpus", "threads", "memory", "spin"}
    assert {finding["topic"] for finding in report["findings"]} >= {
        "python",
        "torch",
        "cpu",
        "threads",
        "memory",
        "spin",
        "gpu",
    }
    monkeypatch.setenv("LEAN_KERNELS", "fastest")
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 1


def test_the_limits_of_a_container_are_shown(monkeypatch):
    gib = 2**30
    bounds = [MemoryBound("the machine", 16 * gib, 8 * gib), MemoryBound("control group /x", 2 * gib, gib)]
    monkeypatch.setattr(doctor, "memory_bounds", lambda: bounds)
    monkeypatch.setattr(doctor, "find_cpus", lambda: Cpus(8, 4, 1.5))
    monkeypatch.setattr(doctor, "fit_threads", lambda: "OMP_NUM_THREADS=4 in the environment")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    found = {finding.topic: finding for finding in doctor.devices()}
    assert "8 CPUs, 4 of them allowed by the affinity, CPU quota 1.5" in found["cpu"].text
    assert (found["threads"].level, found["threads"].text) == ("note", "4 (OMP_NUM_THREADS=4 in the environment)")
    assert "more than the 2 that" in found["threads"].mend
    limit = "1,024.0 MiB free of 2,048.0 MiB, the limit of control group /x; the machine has 16,384.0 MiB"
    assert found["memory"].text == limit
    facts = doctor.machine_facts()
    assert facts["cpus"] == {"online": 8, "affinity": 4, "quota": 1.5}
    assert facts["memory"]["name"] == "control group /x"
    assert [bound["limit_bytes"] for bound in facts["memory"]["bounds"]] == [16 * gib, 2 * gib]


def test_a_spin_that_nothing_bounds_is_noted(monkeypatch):
    monkeypatch.setattr(doctor, "spin_settings", dict)
    [found] = [finding for finding in doctor.machine() if finding.topic == "spin"]
    assert (found.level, "GOMP_SPINCOUNT=" in found.mend) == ("note", True)
    monkeypatch.setattr(doctor, "spin_settings", lambda: {"OMP_WAIT_POLICY": "passive (environment)"})
    [found] = [finding for finding in doctor.machine() if finding.topic == "spin"]
    assert (found.level, found.text[:39]) == ("ok", "OMP_WAIT_POLICY=passive (environment): ")
