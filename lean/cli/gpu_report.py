"""``lean doctor --gpu-report``: checks and measures a GPU in three minutes, and writes what it found into a file."""

from pathlib import Path

import torch

from lean.cli.terminal import stderr
from lean.errors import UserError, one_line
from lean.kernels.serving import backend


def gpu_report(file: Path) -> bool:
    """Print the figures as they are measured, and write them with the versions into ``file``, after every part anew.

    What could not be measured is in the file, and on stderr in a line for each case.

    Returns:
        Whether every kernel gave right results.

    Raises:
        UserError: there is no GPU, or no kernel of it can be measured, or the file cannot be written.
    """
    device = _gpu()
    from lean.eval.bench.gpu.plan import REPORT, line
    from lean.eval.bench.gpu.report import measure
    from lean.eval.bench.gpu.run import Run, fitting_jobs

    run = Run(REPORT, device, fitting_jobs(device), lambda figure: print(line(figure), flush=True))
    results = measure(run, list(REPORT.seconds), file)
    for word in ("left_out", "failed"):
        for text in results[word]:
            stderr.print(f"{word.replace('_', ' ')}: {text}")
    for text in results["missed"]:
        print(f"missed: {text}")
    print(f"{one_line(file)} holds versions, the GPU and these figures, but no paths and no names: you can send it")
    return run.is_right


def _gpu() -> torch.device:
    if not torch.cuda.is_available():
        raise UserError("--gpu-report needs a GPU that torch can use: run `lean doctor` to see what is missing")
    try:
        serving = backend(torch.device("cuda:0"))
    except ValueError as error:
        raise UserError(str(error)) from None
    if serving != "Triton":
        raise UserError(f"--gpu-report measures the Triton kernels, but {serving} serves: install triton, unset "
                        "LEAN_KERNELS")  # fmt: skip
    return torch.device("cuda:0")
