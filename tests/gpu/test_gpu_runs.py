"""The runs that measure a GPU, on this CPU with its own kernels: what they check, keep, leave out and do not tell."""

import importlib.metadata
import json
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.pool import ThreadPool
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import triton
from fake_gpus import Card, install
from triton_interpreter import plan_attention, plan_kv_write

from lean.device import architecture, lacks_code
from lean.errors import CompilerError, KernelError, UserError
from lean.eval.bench.gpu import facts, layers, report
from lean.eval.bench.gpu import run as runs
from lean.eval.bench.gpu.plan import FORMATS, FULL, REPORT, TOLERANCE, TOY, Plan
from lean.eval.bench.gpu.run import Run, fitting_jobs
from lean.eval.bench.shape import Shape
from lean.kernels.call import AttentionCall, WriteCall
from lean.kernels.triton.backend import target_of
from lean.kernels.triton.common import OF_STEP
from lean.kernels.triton.parameters import Target

CPU = torch.device("cpu")
TINY = replace(REPORT, shapes=(Shape(2, 1, 32),), context=100, decodes=((64, 2),), prefills=((4, 40),), rounds=1)
SHAPE = Shape(2, 1, 32)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr("lean.eval.bench.memory.COLD_BYTES", 2**16)


def a_run(plan: Plan = TINY, **parts: Any) -> Run:
    """A run on the CPU; ``parts`` replace methods."""
    run = Run(plan, CPU, 1, lambda figure: None)
    for name, part in parts.items():
        setattr(run, name, part)
    return run


def exact(step):
    step()
    return step


# --- what is checked ---


@pytest.mark.parametrize("rule", ["plain", "residual", "everything"])
@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_chunks_single_rows_and_replayed_steps_are_checked(kv_dtype, rule):
    errors = layers.step_errors(kv_dtype, SHAPE, rule, 100, CPU, exact)
    assert errors.keys() == {"chunk", "decode", "replayed"}
    assert all(0 <= error <= TOLERANCE for error in errors.values())


def test_a_fault_of_one_kind_of_step_is_found_in_that_kind(monkeypatch):
    attention = layers.paged_attention

    def wrong(query, pool, tables, starts, lengths, **rule):
        out = attention(query, pool, tables, starts, lengths, **rule)
        return out * 1.05 if len(query) == len(lengths) and query.dtype is torch.bfloat16 else out

    def stale(step):
        out = step()
        return lambda: (step(), out)[1]

    def writes_nothing(step):
        step()
        return lambda: torch.zeros(3, 2, 32)

    errors = layers.step_errors("int8", SHAPE, "plain", 100, CPU, stale)
    assert errors["decode"] <= TOLERANCE < errors["replayed"] < 10
    assert layers.step_errors("int8", SHAPE, "plain", 100, CPU, writes_nothing)["replayed"] == float("inf")
    monkeypatch.setattr(layers, "paged_attention", wrong)
    errors = layers.step_errors("int8", SHAPE, "plain", 100, CPU)
    assert errors["chunk"] <= TOLERANCE < errors["decode"]


# --- what is compiled ---


def keys_of(launches, compiled):
    """Add what Triton compiles a kernel by: constants, dtypes, and whether integers and addresses divide by 16."""

    def kind(name, value):
        if isinstance(value, torch.Tensor):
            return value.dtype, value.data_ptr() % 16 == 0
        if name.isupper() or isinstance(value, bool):
            return value
        return type(value), value == 1, isinstance(value, int) and value % 16 == 0

    for launch in launches:
        key = [(name, kind(name, x)) for name, x in sorted(launch.arguments.items()) if name not in OF_STEP]
        compiled.add((launch.kernel.__name__, *key, *sorted(launch.options.items())))


@pytest.mark.parametrize("plan", [TOY, replace(TINY, decodes=((128, 2),))], ids=["bench_gpu", "report"])
def test_no_later_part_compiles_a_kernel(plan):
    """Parts that measure have no time for that; the first part compiles in several processes."""
    target, compiled, before = Target("cuda", 86), dict.fromkeys(plan.seconds, frozenset()), set()
    write, attention = torch.ops.lean.kv_write, torch.ops.lean.paged_attention
    seen: set[tuple] = set()

    def writing(*args):
        keys_of(plan_kv_write.plan_kv_write(WriteCall(*args), target), seen)
        return write(*args)

    def attending(*args):
        if args[0].dtype is not torch.float64:  # the reference's
            keys_of(plan_attention.plan_paged_attention(AttentionCall(*args), target)[1], seen)
        return attention(*args)

    run = a_run(plan)
    with patch.multiple(torch.ops.lean, kv_write=writing, paged_attention=attending):
        for part in plan.seconds:
            seen.clear()
            run.run(part)
            compiled[part] = frozenset(seen)
    assert run.left_out == run.failed == []
    before = compiled.pop("correctness")
    for part, kernels in compiled.items():
        assert kernels or part == "bandwidth"
        assert not {key[0] for key in kernels - before}, part


def test_every_shape_and_rule_that_is_measured_is_checked():
    for plan in (FULL, REPORT):
        checks = plan.checks()
        assert {(fmt, shape, "residual") for fmt in FORMATS[1:] for shape in plan.shapes} <= set(checks)
        assert {("bf16", shape, "plain") for shape in plan.shapes} <= set(checks)
    assert ("int8", Shape(32, 8, 64), "residual") in FULL.checks()  # the model's


# --- what is kept ---


def test_what_was_measured_is_in_the_file_after_every_part(tmp_path):
    file, found = tmp_path / "report.json", []

    def decode():
        found.append(json.loads(file.read_text()))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        report.measure(a_run(decode=decode), list(TINY.seconds), file)
    [at_decode], last = found, json.loads(file.read_text())
    assert at_decode["parts"] == {"done": ["correctness", "bandwidth"], "not_done": ["decode", "prefill"]}
    assert {figure["part"] for figure in at_decode["figures"]} == {"correctness", "bandwidth"}
    assert last["figures"] == at_decode["figures"]
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path):
    def correctness():
        raise AssertionError("measured")

    with pytest.raises(UserError, match="cannot write"):
        report.measure(a_run(correctness=correctness), list(TINY.seconds), tmp_path / "no" / "such")


def test_parts_end_in_time_and_say_what_they_left_out(tmp_path, monkeypatch):
    """A clock that goes on by ten seconds with every case."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(runs, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    judge = Run._judge

    def slow(self, case, errors):
        clock.now += 10
        judge(self, case, errors)

    monkeypatch.setattr(Run, "_judge", slow)
    plan = replace(TINY, seconds={**TINY.seconds, "correctness": 15}, total_seconds=18)
    found = report.measure(a_run(plan), list(plan.seconds), tmp_path / "report.json")
    checked = {figure["variant"].split()[0] for figure in found["figures"] if figure["part"] == "correctness"}
    assert checked == {"bf16", "int8"}
    assert [line for line in found["left_out"] if line.startswith("correctness")] == [
        f"correctness {fmt} 2/1x32 residual: out of time" for fmt in ("fp8", "int4", "k8v4")
    ]
    # The total is over: nothing else is measured, and all of it is listed.
    assert {figure["part"] for figure in found["figures"]} == {"correctness", "bandwidth"}
    assert sum(line.startswith("decode") for line in found["left_out"]) == len(FORMATS)
    assert sum(line.startswith("prefill") for line in found["left_out"]) == len(FORMATS)


def test_the_report_ends_within_three_minutes():
    assert REPORT.total_seconds <= 150
    assert sum(REPORT.seconds.values()) - 30 <= REPORT.total_seconds


def test_one_bad_kernel_is_recorded_and_a_missing_compiler_ends_the_run(tmp_path, monkeypatch):
    def errors(failure, kv_dtype, *case):
        if kv_dtype == "int8":
            raise failure
        return {"chunk": 0.0}

    file = tmp_path / "report.json"
    monkeypatch.setattr(runs, "step_errors", partial(errors, KernelError("too little", "use another")))
    run = a_run()
    assert report.measure(run, ["correctness"], file)["failed"] == [
        "correctness int8 2/1x32 residual: KernelError: too little: use another"
    ]
    assert not run.is_right
    monkeypatch.setattr(runs, "step_errors", partial(errors, CompilerError("no compiler", "install gcc")))
    with pytest.raises(CompilerError):
        report.measure(a_run(), ["correctness"], file)
    assert "no compiler" in json.loads(file.read_text())["failed"][0]


def test_wrong_bytes_are_named_in_a_file_that_every_reader_of_json_takes(tmp_path, monkeypatch):
    def refused(constant):
        raise AssertionError(f"{constant} is no JSON")

    monkeypatch.setattr(runs, "step_errors", lambda *case: {"decode": float("inf")})
    run, file = a_run(replace(TINY, shapes=(SHAPE,))), tmp_path / "report.json"
    report.measure(run, ["correctness"], file)
    found = json.loads(file.read_text(), parse_constant=refused)
    assert not run.is_right
    assert [figure["value"] for figure in found["figures"]] == [None] * len(FORMATS)
    assert found["missed"][1].startswith("correctness int8 residual decode 2/1x32")
    assert len(found["missed"]) == len(FORMATS)


def test_compiling_processes_fit_a_small_card(monkeypatch):
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(runs, "find_cpus", lambda: SimpleNamespace(usable=16))
    for gib, jobs in ((0.5, 1), (4, 4), (7.5, 8), (24, 8)):
        monkeypatch.setattr(runs, "free_bytes", lambda device, gib=gib: int(gib * 2**30))
        assert fitting_jobs(cuda) == jobs
        assert jobs == 1 or jobs * runs._JOB_BYTES <= 0.8 * gib * 2**30


@pytest.mark.parametrize(
    "processes", [SimpleNamespace(Pool=lambda jobs, start: ThreadPool(jobs)),
                  pytest.param(get_context("spawn"), marks=pytest.mark.slow)], ids=["threads", "processes"],
)  # fmt: skip
def test_checks_run_side_by_side_and_end_with_their_part(processes, monkeypatch):
    monkeypatch.setattr(runs, "get_context", lambda kind: processes)
    run = Run(TINY, CPU, 2, lambda figure: None)
    run.run("correctness")
    assert run.failed == run.left_out == []
    assert {figure.variant for figure in run.figures} >= {"bf16 plain decode", "int4 residual chunk"}
    short = Run(replace(TINY, total_seconds=0), CPU, 2, lambda figure: None)
    short.run("correctness")
    assert short.left_out == [f"correctness {fmt} {shape} {rule}: out of time" for fmt, shape, rule in TINY.checks()]


# --- the lines that are printed ---


def test_the_figures_keep_their_slashes():
    assert facts.without_names("decode 8192 8 32/8x128 int8: out of time") == "decode 8192 8 32/8x128 int8: out of time"
    assert facts.without_names("at /a/b.py:3 and ~/c") == "at <path>:3 and <path>"


def test_the_facts_need_no_distribution_called_triton(monkeypatch):
    """On ROCm it is triton-rocm or pytorch-triton-rocm; the module is called triton everywhere."""
    version = importlib.metadata.version

    def of(name):
        if name == "triton":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", of)
    assert facts.machine_facts(CPU)["triton"] == triton.__version__


def test_the_facts_of_a_gpu(monkeypatch):
    properties = SimpleNamespace(
        name="GPU X", major=8, minor=6, multi_processor_count=28, gcnArchName="gfx1100:sramecc"
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7 * 2**30, 8 * 2**30))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    found = facts._gpu_facts(torch.device("cuda", 0))
    assert found == {
        "name": "GPU X", "arch": "sm_86", "memory": 8 * 2**30, "free_memory": 7 * 2**30, "multiprocessors": 28,
        "gpus": 2,
    }  # fmt: skip
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert facts._gpu_facts(torch.device("cuda", 0))["arch"] == "gfx1100"


@pytest.mark.parametrize(
    ("card", "hip", "name", "target"),
    [
        (Card(major=8, minor=6), None, "sm_86", Target("cuda", 86)),
        (Card(major=12, minor=0), None, "sm_120", Target("cuda", 120)),
        (Card(gcnArchName="gfx90a:sramecc+:xnack-"), "7.1", "gfx90a", Target("hip", "gfx90a")),
    ],
)
def test_every_place_names_an_architecture_alike(monkeypatch, card, hip, name, target):
    """The check of torch's code, the kernels' target and the GPU report."""
    install(monkeypatch, card, codes=("compute_130",), hip=hip)
    device = torch.device("cuda", 0)
    assert architecture(device) == facts._gpu_facts(device)["arch"] == name
    assert f"is {name}, and torch" in lacks_code(device)
    assert target_of.__wrapped__(device) == Target.named(name) == target


def test_the_driver_version_is_a_number_or_unknown(monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path))
    for said, version in (("570.86.15\n570.86.15", "570.86.15"), ("NVIDIA-SMI has failed on host-7", None)):
        tool.write_text(f"#!/bin/sh\necho '{said}'\n")
        tool.chmod(0o755)
        assert facts.driver_version() == version
