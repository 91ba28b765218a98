"""Building the C++ kernels, and lean where they cannot be built."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lean.cli import doctor
from lean.kernels import serving
from lean.kernels.cpu import binding, build

CPU = torch.device("cpu")


@pytest.fixture
def nothing_built(monkeypatch, tmp_path):
    """A process that has found no library."""
    monkeypatch.delenv("LEAN_KERNELS", raising=False)
    monkeypatch.delenv("LEAN_CPU_ISA", raising=False)
    monkeypatch.setattr(build, "find_library", lambda: None)
    monkeypatch.setattr(binding, "_chosen", False)
    binding._load.cache_clear()
    yield
    monkeypatch.undo()
    binding._load.cache_clear()
    binding.choose()


def compiler(tmp_path: Path, script: str) -> str:
    path = tmp_path / "c++"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_without_a_compiler_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.compiler() is None
    with pytest.raises(build.BuildError, match=r"no C\+\+ compiler found \(g\+\+ or clang\+\+, or set CXX\)"):
        build.build(tmp_path)


def test_a_named_compiler_that_does_not_exist_is_not_used(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -O3")
    assert build.compiler() is None


def test_a_compiler_that_fails_is_quoted_in_one_line_and_leaves_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", compiler(tmp_path, "echo noise >&2; echo 'x.h:1: error: unknown flag' >&2; exit 1"))
    with pytest.raises(build.BuildError, match=r"failed: x\.h:1: error: unknown flag$"):
        build.build(tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_folder_that_cannot_be_made_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", compiler(tmp_path, "exit 0"))
    (tmp_path / "file").touch()
    with pytest.raises(build.BuildError, match="file/out: Not a directory"):
        build.build(tmp_path / "file" / "out")


def test_the_name_changes_with_every_source(monkeypatch, tmp_path):
    for path in [*build.SOURCE_DIR.glob("*.cpp"), *build.SOURCE_DIR.glob("*.h"), build.SOURCE_DIR / "build.py"]:
        (tmp_path / path.name).write_bytes(path.read_bytes())
    own = build.library_name()
    monkeypatch.setattr(build, "SOURCE_DIR", tmp_path)
    assert build.library_name() == own
    names = {own}
    for path in list(tmp_path.iterdir()):
        path.write_bytes(path.read_bytes() + b"\n")
        names.add(build.library_name())
    assert len(names) == 1 + len(list(tmp_path.iterdir()))


def test_the_start_up_line_says_what_is_missing_and_how_to_build_it(monkeypatch, nothing_built, tmp_path):
    monkeypatch.setenv("CXX", compiler(tmp_path, "exit 0"))
    lost = "torch reference (cpu), many times slower than the C++ kernels, which are not built: "
    assert serving.backend(CPU) == lost + build.HOW
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert serving.backend(CPU) == f"{lost}install g++, then {build.HOW}"


def test_the_doctor_notes_missing_kernels_and_says_why_a_build_fails(monkeypatch, nothing_built):
    monkeypatch.setenv("CXX", "no-such-compiler")
    found = [finding for finding in doctor.kernels() if finding.text.startswith("cpu")]
    assert [finding.level for finding in found] == ["note"]
    assert "install g++" in found[0].text
    failed = doctor.build_kernels()
    assert (failed.level, failed.mend) == ("problem", "install g++ or clang++, then run lean doctor --build")


def test_without_a_library_the_reference_serves(nothing_built):
    from lean.kernels.check import worst_error

    assert worst_error(CPU, "int8", torch.float32) == 0


@pytest.mark.slow
def test_an_install_without_a_compiler_succeeds_and_says_what_is_lost(tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    root = build.SOURCE_DIR.parents[1]
    environment = os.environ | {"CXX": "no-such-compiler"}
    command = [sys.executable, "setup.py", "build_ext", "--build-lib", str(tmp_path), "--build-temp", str(tmp_path)]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "lean will run on its torch reference" in done.stdout + done.stderr
    assert not list(tmp_path.rglob("*.so"))
