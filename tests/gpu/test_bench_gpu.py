"""The benchmark for GPUs runs end to end on a CPU, so that its faults are found before it runs on a GPU."""

import json
import os
import subprocess
import sys
from dataclasses import replace

from lean.eval.bench.gpu.plan import FORMATS, TOLERANCE, TOY, Figure, missed


def test_every_part_runs_with_the_interpreter_and_every_variant_is_right(tmp_path) -> None:
    file = tmp_path / "figures.json"
    command = [sys.executable, "-W", "ignore", "-P", "-m", "lean.eval.bench_gpu", "--toy", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(file.read_text())
    assert found["left_out"] == found["failed"] == []
    assert found["copy_gb_s"] > 0
    figures = [Figure(**figure) for figure in found["figures"]]
    correct = [f for f in figures if f.part == "correctness"]
    assert {f.variant.split()[0] for f in correct} == set(FORMATS)
    assert {f.variant.split()[1] for f in correct} == {"plain", "residual", "everything"}
    assert {f.variant.split()[2] for f in correct} == {"chunk", "decode"}
    assert all(0 <= f.value <= TOLERANCE for f in correct)
    decode = {f.variant for f in figures if f.part == "decode"}
    assert decode == {*FORMATS, *(f"{fmt}+R" for fmt in FORMATS if fmt != "bf16"), "torch SDPA"}
    assert found["parts"] == {"done": list(TOY.seconds), "not_done": []}
    assert {f.part for f in figures} == set(TOY.seconds)
    assert all(f.ms and f.ms > 0 and f.value > 0 for f in figures if f.part not in ("correctness", "bandwidth"))


def decoded(variant: str, ms: float, share: float, speedup: float) -> Figure:
    return Figure("decode", variant, "32/8x128", 8, 32768, ms, share, "of copy", speedup)


def test_what_falls_short_of_the_targets_is_named() -> None:
    good = [decoded("bf16", 2.0, 0.85, 1.0), decoded("int8", 1.1, 0.8, 1.82), decoded("int8+R", 1.15, 0.8, 1.74)]
    assert missed(good) == []
    slow = [decoded("bf16", 2.0, 0.7, 1.0), decoded("int4", 1.0, 0.5, 2.0), decoded("int4+R", 1.2, 0.5, 1.67)]
    assert len(missed(slow)) == 3
    unknown = [replace(slow[0], value=480.0, unit="GB/s"), *slow[1:]]  # no copy bandwidth to compare bf16 with
    assert missed(unknown) == missed(slow)[1:]
    assert len(missed([Figure("correctness", "fp8 plain", "6/2x64", 3, 500, None, float("inf"), "error")])) == 1
