"""``make test-matrix``: the fast tests with the Pythons that this machine has, and with the oldest, the default and the
newest release of torch and of transformers.

Every Python gets three rows: the oldest torch with the oldest transformers, the default torch with the newest, and the
newest torch with the newest. Beside each torch stands the Triton that it pins. An environment per Python and torch is
kept in ``build/matrix``; a default (CUDA) build of torch takes 3 to 6 GB there. One table is printed at the end.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from glob import glob
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "matrix"

PYTHONS = ("3.11", "3.12", "3.13")
# torch, and the Triton that its default build pins; builds for CPUs pin none.
TRITON_OF = {"2.11.0": "3.6.0", "2.13.0": "3.7.1", "2.15.0": "3.9.0"}
OLDEST_TRANSFORMERS, NEWEST_TRANSFORMERS = "5.17", "5.24"
ROWS = tuple(zip(TRITON_OF, (OLDEST_TRANSFORMERS, NEWEST_TRANSFORMERS, NEWEST_TRANSFORMERS)))

# Where Pythons are found that are not on the path: of pyenv, uv, the manylinux images, and python.org on macOS.
PLACES = ("$PYENV_ROOT/versions/*/bin", "~/.pyenv/versions/*/bin", "~/.local/share/uv/python/*/bin")
PLACES += ("/opt/python/*/bin", "/Library/Frameworks/Python.framework/Versions/*/bin")

COLUMNS = ("Python", "torch", "transformers", "Triton", "passed", "failed", "skipped")


class Row(NamedTuple):
    """One environment; ``python`` is the path of an interpreter."""

    version: str
    python: str
    torch: str
    transformers: str

    @property
    def venv(self) -> Path:
        return FOLDER / f"python{self.version}-torch{self.torch}"

    @property
    def label(self) -> str:
        return f"Python {self.version}, torch {self.torch}, transformers {self.transformers}"


class Outcome(NamedTuple):
    """What a row gave. ``cells``: the columns of the table; ``failed``: names of tests; ``problem``: why none ran."""

    cells: tuple[str, ...]
    failed: list[str]
    problem: str = ""


def candidates(version: str) -> Iterator[str]:
    """Paths that may be a Python of this version, those on the path first."""
    named = shutil.which(f"python{version}")
    if named:
        yield named
    for place in PLACES:
        folder = os.path.expanduser(os.path.expandvars(place))
        yield from sorted(glob(f"{folder}/python{version}"), reverse=True)


def serves(python: str, version: str) -> bool:
    """Whether ``python`` runs, has this version and can make environments. A shim of pyenv may do none of that."""
    code = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and done.stdout.strip() == version


def interpreters(given: list[str]) -> dict[str, str]:
    """version -> path of the Pythons of the promised range: of those given, else of those that are found."""
    found = {}
    for version in PYTHONS:
        for python in given or candidates(version):
            if serves(python, version):
                found[version] = python
                break
    return found


def prepare(row: Row) -> str:
    """Make or refresh the row's environment; why that is impossible, else nothing."""
    python = row.venv / "bin" / "python"
    if not python.exists():
        subprocess.run([row.python, "-m", "venv", "--clear", str(row.venv)], check=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    # The default build of torch brings its own Triton; the second command then asks for what is there.
    packages = [f"torch=={row.torch}", f"transformers=={row.transformers}.*"]
    if sys.platform == "linux":
        packages.append(f"triton=={TRITON_OF[row.torch]}")
    for command in ([*pip, *packages], [*pip, *packages, "-e", ".[dev]"]):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            lines = done.stderr.splitlines()
            return next((line for line in lines if line.startswith("ERROR")), (lines or ["pip failed"])[-1])
    return ""


def installed(row: Row) -> tuple[str, ...]:
    """Versions of Python, torch, transformers and Triton as the environment has them."""
    code = """
import platform
from importlib.metadata import PackageNotFoundError, version
print(platform.python_version())
for name in ("torch", "transformers", "triton"):
    try:
        print(version(name))
    except PackageNotFoundError:
        print("-")
"""
    command = [str(row.venv / "bin" / "python"), "-c", code]
    return tuple(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def run(row: Row, pytest: list[str]) -> Outcome:
    """Run the tests of a row. Its output goes to a file beside its environment."""
    problem = prepare(row)
    if problem:
        return Outcome((row.version, row.torch, row.transformers, "", "", "", ""), [], problem)
    name = f"{row.venv.name}-transformers{row.transformers}"
    log, results = FOLDER / f"{name}.log", FOLDER / f"{name}.xml"
    results.unlink(missing_ok=True)
    command = [str(row.venv / "bin" / "python"), "-P", "-m", "pytest", "-n", "auto", "--maxprocesses", "8"]
    command += ["--dist", "loadfile", f"--junitxml={results}", *pytest]
    with open(log, "w", encoding="utf-8") as out:
        subprocess.run(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
    if not results.exists():
        return Outcome((*installed(row), "", "", ""), [], f"pytest did not finish: {log}")
    cases = list(ElementTree.parse(results).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    names = [f"{case.get('classname')}::{case.get('name')}" for case in failed]
    counts = (str(len(cases) - len(failed) - skipped), str(len(failed)), str(skipped))
    return Outcome((*installed(row), *counts), names)


def table(outcomes: list[Outcome]) -> str:
    lines = [COLUMNS, *(outcome.cells for outcome in outcomes)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make test-matrix", description=__doc__.split("\n\n")[0])
    pythons = "interpreters to use; default: the variable PYTHONS, else those on the path and those of pyenv and uv"
    parser.add_argument("--pythons", nargs="+", metavar="PATH", help=pythons)
    only = "run only the rows whose description has one of these texts, e.g. 'Python 3.13, torch 2.13'"
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help=only)
    parser.add_argument("--list", action="store_true", help="print the rows and stop")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest, e.g. tests/cli; default: all fast tests")
    options = parser.parse_args()
    found = interpreters(options.pythons or os.environ.get("PYTHONS", "").split())
    rows = [Row(version, python, *releases) for version, python in found.items() for releases in ROWS]
    chosen = [row for row in rows if not options.only or any(text in row.label for text in options.only)]
    for version in PYTHONS:
        print(f"Python {version}: {found.get(version, 'not on this machine, not tried')}")
    if options.list or not chosen:
        print("\n".join(row.label for row in chosen) or "no row is left to run")
        return 0 if chosen else 2
    outcomes = []
    for row in chosen:
        print(f"running {row.label}", flush=True)
        outcomes.append(run(row, options.pytest))
    print("\n" + table(outcomes))
    for row, outcome in zip(chosen, outcomes):
        for name in outcome.failed:
            print(f"failed with {row.label}: {name}")
        if outcome.problem:
            print(f"not run: {row.label}: {outcome.problem}")
    for row in rows:
        if row not in chosen:
            print(f"not tried: {row.label}")
    return int(any(outcome.failed or outcome.problem for outcome in outcomes))


if __name__ == "__main__":
    raise SystemExit(main())
