"""The ``lean`` command. Answers go to stdout, everything else to stderr."""

import logging
import os
import sys
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from lean.cli import bench, cache, evaluate
from lean.cli import bench_serve as _bench_serve  # noqa: F401  adds its command to `bench.app`
from lean.cli import evaluate_tasks as _evaluate_tasks  # noqa: F401  adds its commands to `evaluate.app`
from lean.cli import evaluate_text as _evaluate_text  # noqa: F401
from lean.cli.flags import Json
from lean.cli.models import info, models, pull, rm
from lean.cli.run import run
from lean.cli.serve import serve
from lean.cli.sweep import sweep
from lean.cli.terminal import print_json
from lean.errors import UserError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(run)
app.command()(serve)
app.add_typer(evaluate.app, name="eval")
app.command()(sweep)
app.add_typer(bench.app, name="bench")
app.add_typer(cache.app, name="cache")
for _command in (pull, models, rm, info):
    app.command()(_command)


@app.callback(invoke_without_command=True)
def _root(context: typer.Context) -> None:
    """Run large language models with a quantized, paged KV cache."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def doctor(
    build: Annotated[bool, typer.Option("--build", help="Compile the C++ kernels before the checks.")] = False,
    gpu_report: Annotated[
        Path | None,
        typer.Option(
            "--gpu-report",
            help="In place of the checks, test and measure the first GPU for up to three minutes. FILE gets the "
            "results and the versions, without paths or names.",
            metavar="FILE",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Check this machine: package versions, devices, storage, and whether the compute kernels give correct results."""
    if gpu_report is not None:
        from lean.cli.gpu_report import gpu_report as report_gpu

        if build or json:
            raise UserError("--gpu-report goes alone: leave out --build and --json")
        if not report_gpu(gpu_report):
            raise typer.Exit(1)
        return
    from lean.cli.doctor import build_kernels, doctor_report, examine

    findings = []
    for finding in chain([build_kernels()] if build else [], examine()):
        findings.append(finding)
        mend = f" -> {finding.mend}" if finding.mend else ""
        if not json:
            print(f"{finding.level:8}{finding.topic}: {finding.text}{mend}", flush=True)
    report = doctor_report(findings)
    if json:
        print_json(report)
    if not report["healthy"]:
        raise typer.Exit(1)


def _quiet_libraries() -> None:
    """Hide hints of libraries. Their warnings go to stderr."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    logging.basicConfig(level=logging.WARNING, format="lean: %(message)s", stream=sys.stderr)


def run_command() -> object:
    """Run the command that the arguments name. Returns its exit code, if it gives one; raises its error.

    `lean.cli.ending.run_to_end` turns the error into a line and an exit code.
    """
    _quiet_libraries()
    return app(prog_name="lean", standalone_mode=False)
