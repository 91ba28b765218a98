"""What Triton raises where it cannot compile or load a kernel, as errors that say what to install or to set.

Triton compiles a kernel at its first launch, and before the first of all a small C library with the system's compiler.
It keeps both in its cache folder. Source: triton/runtime/build.py, triton/runtime/errors.py, triton/compiler/errors.py,
triton/backends/nvidia/driver.py and compiler.py of https://github.com/triton-lang/triton, release 3.7.
"""

import errno
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from triton import knobs

from lean.errors import CompilerError, KernelError, one_line

_SLOW = "set LEAN_KERNELS=reference, which is slow"
_COMPILER = f"install gcc or clang, or name one in the variable CC; or {_SLOW}"
_CACHE = f"set TRITON_CACHE_DIR to a folder that can be written; or {_SLOW}"
_LIBCUDA = f"set TRITON_LIBCUDA_PATH to the folder of libcuda.so.1; or {_SLOW}"
_NO_WRITING = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR)


def explain(error: Exception, kernel: str) -> KernelError | None:
    """The error to raise in place of one that a launch of ``kernel`` raised; None: it has another reason.

    A CompilerError concerns every kernel, a KernelError this one.
    """
    kinds = {kind.__name__ for kind in type(error).__mro__}  # by name: Triton moves its classes between releases
    text = str(error)
    if "OutOfResources" in kinds:
        found = vars(error)
        needed, limit = f"{found['required']:,}", f"{found['limit']:,}"
        reason = f"the kernel {kernel} needs more {found['name']} than this GPU has ({needed}, not {limit})"
        return KernelError(reason, f"use another --kv-dtype, or {_SLOW}")
    if "PTXASError" in kinds:
        reason = f"NVIDIA's assembler fails for the kernel {kernel} ({_assembler_line(text)})"
        return KernelError(reason, f"install the newest torch with its Triton, or {_SLOW}")
    if "CompilationError" in kinds or "PassManager::run failed" in text:
        message = getattr(error, "error_message", None) or text
        reason = f"Triton cannot compile the kernel {kernel} ({one_line(message)})"
        return KernelError(reason, f"see whether `lean doctor` knows this Triton, or {_SLOW}")
    return _of_machine(error, text)


def _assembler_line(text: str) -> str:
    """The line of the assembler's output that names the fault; Triton adds its whole command."""
    lines = [line for line in text.splitlines() if line.strip()]
    return one_line(next((line for line in lines if "fatal" in line or ": error" in line), lines[0] if lines else ""))


def _of_machine(error: Exception, text: str) -> CompilerError | None:
    """Faults of the machine, which no kernel survives."""
    if "Failed to find C compiler" in text:
        return CompilerError("Triton finds no C compiler, with which it compiles a part of itself", _COMPILER)
    if isinstance(error, subprocess.CalledProcessError):
        return _of_compiler(error)
    if isinstance(error, AssertionError) and "libcuda" in text:
        return CompilerError("Triton does not find libcuda.so.1, NVIDIA's driver", _LIBCUDA)
    folder = knobs.cache.dir
    if isinstance(error, ImportError) and "failed to map segment from shared object" in text:
        mend = f"set TRITON_CACHE_DIR to a folder that is not mounted with noexec; or {_SLOW}"
        return CompilerError(f"nothing may be executed in Triton's cache folder {folder}, mounted with noexec", mend)
    return _of_file(error, Path(folder)) if isinstance(error, OSError) else None


def _of_compiler(error: subprocess.CalledProcessError) -> CompilerError:
    """A C compiler that failed. What it printed is on standard error already."""
    program = error.cmd[0] if isinstance(error.cmd, list | tuple) else error.cmd
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        reason = "Triton compiles a part of itself, and Python.h is missing"
        packages = f"python{version}-dev on Debian and Ubuntu, python3-devel on Fedora"
        return CompilerError(reason, f"install Python's headers ({packages}); or {_SLOW}")
    reason = f"the C compiler {one_line(program)} fails with exit code {error.returncode}, see its output above"
    return CompilerError(reason, _COMPILER)


def _of_file(error: OSError, cache: Path) -> CompilerError | None:
    """A file that Triton cannot write or run. None for a file of somebody else."""
    file = error.filename if isinstance(error.filename, str) else None
    why = error.strerror or one_line(error)
    if file == "/sbin/ldconfig":
        return CompilerError(f"Triton calls /sbin/ldconfig ({why})", _LIBCUDA)
    if error.errno == errno.ENOENT and file is not None and "/" not in file:  # a program that is sought in PATH
        return CompilerError(f"Triton cannot run the C compiler {one_line(file)} ({why})", _COMPILER)
    if error.errno not in _NO_WRITING:
        return None
    places = cache, Path(tempfile.gettempdir())
    if file is None or any(Path(file).is_relative_to(place) or place.is_relative_to(file) for place in places):
        return CompilerError(f"Triton cannot write {one_line(file or cache)} ({why})", _CACHE)
    return CompilerError(f"Triton cannot use {one_line(file)} ({why})", f"install Triton again; or {_SLOW}")
