"""The ``lean`` command. Answers go to stdout, everything else to stderr."""

import logging
import os
import sys
from contextlib import suppress
from itertools import chain
from typing import Annotated, NoReturn

import typer

from lean.cli import bench, evaluate
from lean.cli import evaluate_tasks as _evaluate_tasks  # noqa: F401  adds its commands to `evaluate.app`
from lean.cli import evaluate_text as _evaluate_text  # noqa: F401
from lean.cli.flags import Json
from lean.cli.models import info, models, pull, rm
from lean.cli.run import run
from lean.cli.signals import INTERRUPTED, interruptible, leave
from lean.cli.sweep import sweep
from lean.cli.terminal import print_json
from lean.errors import LeanError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(run)
app.add_typer(evaluate.app, name="eval")
app.command()(sweep)
app.add_typer(bench.app, name="bench")
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
    json: Json = False,
) -> None:
    """Check this machine: package versions, devices, storage, and whether the compute kernels give correct results."""
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


def main() -> None:
    """Entry point: run the command. Print errors for the user as one line on stderr, and exit with their code."""
    _quiet_libraries()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # for terminals that cannot show a character
    try:
        with interruptible():
            code = app(prog_name="lean", standalone_mode=False)
    except LeanError as error:
        _exit(str(error), error.exit_code)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Exception as error:
        if isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__ or "t allocate memory" in str(error):
            _exit("out of memory: lower --kv-memory, --max-model-len or --prefill-chunk, or use a smaller model", 1)
        if not hasattr(error, "format_message"):  # not an error of the command line parser
            raise
        context = getattr(error, "ctx", None)
        _exit(f"{error.format_message()} (see {context.command_path if context else 'lean'} --help)", 2)
    if code == INTERRUPTED:
        # Do not wait for the interpreter to exit: freeing torch's modules takes time, and the exit code becomes that of
        # a signal if the interrupt passed through Python code that a C library called.
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        leave()
    sys.exit(code if isinstance(code, int) else 0)


def _exit(message: str, code: int) -> NoReturn:
    print(f"lean: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)
