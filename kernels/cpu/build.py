"""Builds the C++ kernels: ``python -m lean.kernels.cpu.build``. The same code runs at install (setup.py).

The library's name carries a hash of its sources and of this file, so a library built from other sources is never
loaded. It lies beside the sources, or in the user's cache where that folder cannot be written. Needs g++ or clang++
(``CXX``). Imports only the standard library, because setup.py runs it where lean's dependencies are missing.
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

SOURCE_DIR = Path(__file__).resolve().parent
HOW = "python -m lean.kernels.cpu.build"
_FLAGS = [
    "-std=c++20", "-O2", "-ftree-vectorize", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-Wno-psabi",
    "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
]  # fmt: skip
_X86 = {
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": ["-march=x86-64-v4", "-mavx512vnni", "-mprefer-vector-width=512"],
}
_PER_ISA = ("attention.cpp", "kv_write.cpp")


class BuildError(Exception):
    """Why there is no library; one line."""


def _isas() -> dict[str, list[str]]:
    """Compiler flags by instruction set."""
    return {"portable": []} | (_X86 if platform.machine() in ("x86_64", "AMD64") else {})


def source_hash() -> str:
    digest = hashlib.sha256(platform.machine().encode())
    for path in sorted([*SOURCE_DIR.glob("*.cpp"), *SOURCE_DIR.glob("*.h"), SOURCE_DIR / "build.py"]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def library_name() -> str:
    return f"lean_cpu_{source_hash()}.so"


def cache_dir() -> Path:
    """The user's folder for libraries whose sources lie where nothing can be written. Raises OSError without a home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lean" / "kernels"
    except RuntimeError:
        raise FileNotFoundError("this user has no home folder: set XDG_CACHE_HOME") from None


def find_library() -> Path | None:
    """The library built from the present sources."""
    name = library_name()
    if (SOURCE_DIR / name).is_file():
        return SOURCE_DIR / name
    with suppress(OSError):  # no home folder, or one that cannot be read
        if (cache_dir() / name).is_file():
            return cache_dir() / name
    return None


def compiler() -> list[str] | None:
    """The command of the C++ compiler."""
    named = os.environ.get("CXX")
    if named:
        return shlex.split(named) if shutil.which(shlex.split(named)[0]) else None
    return next(([found] for name in ("g++", "clang++") if (found := shutil.which(name))), None)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise BuildError(f"{command[0]} failed: {errors[0] if errors else f'status {done.returncode}'}")


def build(folder: Path | None = None, processes: int | None = None) -> Path:
    """Compile the library into ``folder`` (default: beside the sources, else the cache). Returns its path.

    Args:
        processes: compilers at the same time; default: the CPUs of this process's affinity.

    Raises:
        BuildError: no compiler, a compiler that fails, or no folder that can be written.
    """
    cxx = compiler()
    if cxx is None:
        raise BuildError("no C++ compiler found (g++ or clang++, or set CXX)")
    if sys.platform != "linux":
        raise BuildError(f"the C++ kernels are built on Linux only, this is {sys.platform}")
    try:
        if folder is None:
            folder = SOURCE_DIR if os.access(SOURCE_DIR, os.W_OK) else cache_dir()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            jobs = [(isa, flags, source) for isa, flags in _isas().items() for source in _PER_ISA]
            jobs.append(("dispatch", [], "dispatch.cpp"))

            def compile_one(job: tuple[str, list[str], str]) -> str:
                isa, flags, source = job
                target = f"{scratch}/{isa}_{source}.o"
                _run([*cxx, *_FLAGS, *flags, "-c", str(SOURCE_DIR / source), "-o", target])
                return target

            with ThreadPoolExecutor(processes or len(os.sched_getaffinity(0))) as pool:
                objects = list(pool.map(compile_one, jobs))
            made = Path(scratch) / library_name()
            _run([*cxx, "-shared", "-fopenmp", *objects, "-o", str(made)])
            for old in folder.glob("lean_cpu_*.so"):
                old.unlink(missing_ok=True)
            return made.replace(folder / made.name)
    except OSError as error:
        raise BuildError(f"{folder or 'no folder'}: {error.strerror or error}") from None


if __name__ == "__main__":
    from lean.machine.cpus import find_cpus

    try:
        print(f"built {build(processes=find_cpus().usable)}")
    except BuildError as error:
        sys.exit(f"lean's C++ kernels were not built: {error}")
