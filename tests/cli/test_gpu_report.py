"""``lean doctor --gpu-report`` on this CPU with its own kernels: what the file holds, and what it must not tell."""

import getpass
import json
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lean.cli import gpu_report
from lean.eval.bench.gpu import run as runs
from lean.eval.bench.gpu.plan import FORMATS, REPORT
from lean.eval.bench.shape import Shape

CPU = torch.device("cpu")
TINY = replace(REPORT, shapes=(Shape(2, 1, 32),), context=100, decodes=((64, 2),), prefills=((4, 40),), rounds=1)


@pytest.fixture
def on_gpu(monkeypatch):
    """The command takes this CPU for its GPU, at a tiny size."""
    monkeypatch.setattr("lean.eval.bench.memory.COLD_BYTES", 2**16)
    monkeypatch.setattr(gpu_report, "_gpu", lambda: CPU)
    monkeypatch.setattr("lean.eval.bench.gpu.plan.REPORT", TINY)
    monkeypatch.setattr("lean.eval.bench.gpu.run.fitting_jobs", lambda device: 1)


def test_the_report_names_versions_the_gpu_and_every_kind_of_result(lean, on_gpu, tmp_path):
    file = tmp_path / "report.json"
    code, out, err = lean("doctor", "--gpu-report", str(file))
    assert (code, err) == (0, "")
    found = json.loads(file.read_text())
    assert {"lean", "python", "torch", "triton", "driver", "cuda", "rocm", "gpu", "platform", "device"} <= found.keys()
    assert found["parts"]["not_done"] == found["left_out"] == found["failed"] == []
    assert found["copy_gb_s"] > 0
    by_part = {part: [f for f in found["figures"] if f["part"] == part] for part in TINY.seconds}
    assert {f["variant"] for f in by_part["correctness"]} == {
        f"{fmt} {'plain' if fmt == 'bf16' else 'residual'} {step}" for fmt in FORMATS for step in ("chunk", "decode")
    }
    assert {f["variant"] for f in by_part["decode"]} == {
        "bf16", "torch SDPA", *(f"{fmt}+R" for fmt in FORMATS if fmt != "bf16")
    }  # fmt: skip
    assert all(by_part.values())
    assert out.splitlines()[-1].startswith(f"{file} holds versions, the GPU and these figures")
    assert len(out.splitlines()) == len(found["figures"]) + 1


def test_the_report_tells_no_path_and_no_name(lean, on_gpu, tmp_path, monkeypatch):
    """Errors of libraries name files; their texts are in the report."""
    monkeypatch.setattr(getpass, "getuser", lambda: "ada.lovelace")
    monkeypatch.setattr(socket, "gethostname", lambda: "engine-7.example.org")
    secret = [str(Path.home()), os.getcwd(), str(tmp_path), "ada.lovelace", "engine-7", "example.org", "/opt/own"]

    def errors(*case):
        raise RuntimeError(f"no '{tmp_path}/x', ~/.triton; of ada.lovelace@engine-7.example.org (engine-7): "
                           f"{Path.home()}/y in {os.getcwd()}, see /opt/own/z:3")  # fmt: skip

    monkeypatch.setattr(runs, "step_errors", errors)
    file = tmp_path / "report.json"
    code, _, err = lean("doctor", "--gpu-report", str(file))
    assert code == 1
    text = file.read_text()
    assert "<path>" in text
    assert [word for word in secret if word in text] == []
    assert "failed: correctness bf16 2/1x32 plain: RuntimeError" in err


@pytest.mark.parametrize("error", [torch.cuda.OutOfMemoryError, RuntimeError])
def test_a_bandwidth_that_does_not_fit_the_memory_is_a_line_and_the_report_goes_on(
    error, lean, on_gpu, tmp_path, monkeypatch
):
    def fails(device):
        raise error("CUDA out of memory. Tried to allocate 1.00 GiB.\nMore")

    monkeypatch.setattr(runs, "copy_bandwidth", fails)
    file = tmp_path / "report.json"
    code, _, err = lean("doctor", "--gpu-report", str(file))
    assert (code, err) == (0, "left out: bandwidth copy: out of memory\n")
    found = json.loads(file.read_text())
    assert found["left_out"] == ["bandwidth copy: out of memory"]
    assert found["parts"] == {"done": list(TINY.seconds), "not_done": []}
    assert (found["copy_gb_s"], found["failed"], found["missed"]) == (None, [], [])
    assert {f["part"] for f in found["figures"]} == {"correctness", "decode", "prefill"}
    decode = [f for f in found["figures"] if f["part"] == "decode"]
    assert {f["unit"] for f in decode} == {"GB/s"}
    assert all(f["value"] > 0 and f["speedup"] > 0 for f in decode)


def test_without_a_gpu_or_its_kernels_the_command_ends_with_one_line(lean, monkeypatch, tmp_path):
    file = tmp_path / "report.json"

    def refused(word, *more):
        code, out, err = lean("doctor", "--gpu-report", str(file), *more)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert word in err
        assert not file.exists()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused("needs a GPU")
    refused("goes alone", "--json")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("LEAN_KERNELS", "reference")
    refused("unset LEAN_KERNELS")
