"""``python -m lean.eval.bench_gpu``: correctness and speed of every kernel on one GPU, in six minutes.

Parts, the most important first: correctness of every variant against float64; the copy bandwidth; decode as a share of
it, compared with torch's attention; prefill; a whole model with random weights. A part that runs out of time lists the
cases it left out. ``--toy`` runs all parts at a small size on a CPU, with interpreted kernels.
"""

import argparse
import json
from pathlib import Path

import torch

from lean.errors import run_main
from lean.eval.bench.gpu.plan import FULL, TOY, line
from lean.eval.bench.gpu.report import measure
from lean.eval.bench.gpu.run import Run, fitting_jobs, interpret


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m lean.eval.bench_gpu", description=__doc__.split("\n")[0])
    parser.add_argument("--toy", action="store_true", help="run all parts at a small size on a CPU")
    parser.add_argument(
        "--part", nargs="+", default=list(FULL.seconds), choices=list(FULL.seconds), help="parts to run; default: all"
    )
    parser.add_argument(
        "--jobs", type=int, help="number of compiling processes; default: what CPUs and GPU memory allow, at most 8"
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write all figures to FILE, after every part")
    options = parser.parse_args()
    if not (options.toy or torch.cuda.is_available()):
        parser.error("no GPU found: use --toy to run all parts at a small size on the CPU")
    return options


def _main() -> None:
    options = _options()
    library = interpret() if options.toy else None  # keep: the kernels are registered as long as it lives
    device = torch.device("cpu" if library is not None else "cuda:0")
    jobs = 1 if library is not None else options.jobs or fitting_jobs(device)
    run = Run(TOY if options.toy else FULL, device, jobs, lambda figure: print(line(figure), flush=True))
    results = measure(run, options.part, options.json)
    print(json.dumps({name: value for name, value in results.items() if name != "figures"}, indent=1))
    raise SystemExit(0 if run.is_right else 1)


def main() -> None:
    """Run the parts, print every figure and a summary; exit code 1 for a wrong or failed variant."""
    run_main(_main)


if __name__ == "__main__":
    main()
