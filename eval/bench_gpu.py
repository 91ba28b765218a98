"""``python -m lean.eval.bench_gpu``: correctness and speed of every kernel on one GPU, in six minutes.

Parts, the most important first: correctness of every variant against float64; decode as a share of the measured copy
bandwidth, compared with torch's attention; prefill; a whole model with random weights. A part that runs out of time
lists the cases it left out. ``--toy`` runs all parts at a small size on a CPU, with interpreted kernels.
"""

import argparse
import json
import os
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from lean.eval.bench.gpu.plan import FULL, TOLERANCE, TOY, line, missed
from lean.eval.bench.gpu.run import Run, interpret


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m lean.eval.bench_gpu", description=__doc__.split("\n")[0])
    parser.add_argument("--toy", action="store_true", help="run all parts at a small size on a CPU")
    parser.add_argument(
        "--part", nargs="+", default=list(FULL.seconds), choices=list(FULL.seconds), help="parts to run; default: all"
    )
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1), help="number of compiling processes")
    parser.add_argument("--json", metavar="FILE", help="also write all figures to FILE")
    options = parser.parse_args()
    if not (options.toy or torch.cuda.is_available()):
        parser.error("no GPU found: use --toy to run all parts at a small size on the CPU")
    return options


def _facts(run: Run, toy: bool, seconds: float) -> dict[str, Any]:
    return {
        "device": "cpu, interpreted" if toy else torch.cuda.get_device_name(run.device),
        "versions": {name: version(name) for name in ("torch", "triton", "transformers")},
        "copy_gb_s": run.copy_bytes_per_s / 1e9,
        "seconds": seconds,
        "missed": [] if toy else missed(run.figures),
        "left_out": run.left_out,
        "failed": run.failed,
    }


def main() -> None:
    """Run the parts, print every figure and a summary; exit code 1 for a wrong or failed variant."""
    options = _options()
    library = interpret() if options.toy else None  # keep: the kernels are registered as long as it lives
    device = torch.device("cpu" if options.toy else "cuda:0")
    started = time.perf_counter()
    jobs = 1 if options.toy else options.jobs
    run = Run(TOY if options.toy else FULL, device, jobs, lambda figure: print(line(figure), flush=True))
    for part in options.part:
        getattr(run, part)()
    facts = _facts(run, library is not None, time.perf_counter() - started)
    print(json.dumps(facts, indent=1))
    if options.json:
        figures = [asdict(figure) for figure in run.figures]
        Path(options.json).write_text(json.dumps(facts | {"figures": figures}, indent=1) + "\n")
    wrong = [f for f in run.figures if f.part == "correctness" and not f.value <= TOLERANCE]
    raise SystemExit(1 if wrong or run.failed else 0)


if __name__ == "__main__":
    main()
