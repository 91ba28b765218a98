"""The versions that pyproject, the README and ``lean doctor`` promise are those that ``make test-matrix`` runs."""

import re
import tomllib
from pathlib import Path

import matrix
import pytest

from lean.cli import doctor

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OLDEST = {
    "torch": min(matrix.TRITON_OF, key=doctor._release),
    "triton": min(matrix.TRITON_OF.values(), key=doctor._release),
    "transformers": matrix.OLDEST_TRANSFORMERS,
}
NEWEST = {
    "torch": max(matrix.TRITON_OF, key=doctor._release),
    "triton": max(matrix.TRITON_OF.values(), key=doctor._release),
    "transformers": matrix.NEWEST_TRANSFORMERS,
}
PACKAGES = sorted(OLDEST)


def minor(release: str) -> tuple[int, ...]:
    return doctor._release(release)[:2]


def of_doctor(package: str) -> tuple[str, str]:
    """The oldest release of ``package`` that the doctor takes, and the first that it calls untested."""
    return next((oldest, untried) for name, oldest, untried, _ in doctor._PACKAGES if name == package)


def sentence_of_the_readme() -> str:
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    found = re.search(r"`make test-matrix` runs the tests with ([^;]*);", text)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("package", PACKAGES)
def test_the_oldest_release_that_may_be_installed_is_run(package: str) -> None:
    wanted = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]
    [bound] = [found[1] for found in (re.match(rf"{package}>=([\d.]+)", one) for one in wanted) if found]
    assert minor(bound) == minor(OLDEST[package]) == minor(of_doctor(package)[0])


@pytest.mark.parametrize("package", PACKAGES)
def test_the_newest_release_that_the_doctor_calls_tested_is_run(package: str) -> None:
    major, last = minor(NEWEST[package])
    assert minor(of_doctor(package)[1]) == (major, last + 1)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_readme_names_the_releases_that_are_run(package: str) -> None:
    first, last = (".".join(map(str, minor(end[package]))) for end in (OLDEST, NEWEST))
    assert f"{package} {first} to {last}" in sentence_of_the_readme().replace("Triton", "triton")


def test_the_pythons_that_are_promised_are_run() -> None:
    first, last = matrix.PYTHONS[0], matrix.PYTHONS[-1]
    named = [one.rpartition(" ")[2] for one in PROJECT["classifiers"] if "Python :: 3." in one]
    assert tuple(named) == matrix.PYTHONS
    assert PROJECT["requires-python"] == f">={first}"
    assert f"Python {first} to {last}" in sentence_of_the_readme()
    [finding] = [one for one in doctor.packages() if one.topic == "python"]
    assert finding.level == "ok" or f"{first} to {last}" in finding.mend


def test_make_installs_a_torch_that_is_run_and_its_triton() -> None:
    settings = dict(re.findall(r"^(TORCH|TRITON) \?= (\S+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    assert matrix.TRITON_OF[settings["TORCH"]] == settings["TRITON"]


def test_a_python_that_does_not_run_is_not_taken(tmp_path: Path) -> None:
    shim = tmp_path / "python3.12"
    shim.write_text("#!/bin/sh\necho 'pyenv: python3.12: command not found' >&2\nexit 127\n")
    shim.chmod(0o755)
    assert not matrix.serves(str(shim), "3.12")
    assert not matrix.serves(str(tmp_path / "python3.13"), "3.13")
    assert matrix.interpreters([str(shim)]) == {}
