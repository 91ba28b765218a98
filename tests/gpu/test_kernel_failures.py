"""What Triton raises where it cannot compile or load a kernel ends as one line that says what to install or to set."""

import errno
import multiprocessing.reduction
import pickle
import subprocess
import sysconfig

import pytest
import torch
from failing_kernels import Kernel, gpu_back_end, raising
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from lean import LLM, EngineConfig
from lean.cli import doctor
from lean.cli.ending import run_to_end
from lean.cli.main import run_command
from lean.errors import CompilerError, KernelError
from lean.quant import FP32

CPU = torch.device("cpu")
GCC = subprocess.CalledProcessError(1, ["/usr/bin/gcc", "driver.c", "-O3"])
PTXAS = "`ptxas` failed with error code 255\n`ptxas` stderr:\nptxas fatal   : Value 'sm_999' is not defined\nRepro: ..."
NO_COMPILER = "Failed to find C compiler. Please specify via CC environment variable or set triton.knobs.build.impl."

# The error, and what its line must say: what happened, and the way out.
FAILURES = {
    "shared memory": (OutOfResources(106496, 101376, "shared memory"), ("shared memory", "101,376", "--kv-dtype")),
    "assembler": (PTXASError(PTXAS), ("ptxas fatal : Value 'sm_999' is not defined", "torch")),
    "compilation": (
        CompilationError("x = y\n", None, "y is not\ndefined"),  # type: ignore[arg-type]
        ("cannot compile", "y is not", "lean doctor"),
    ),
    "a pass": (RuntimeError("PassManager::run failed"), ("cannot compile", "PassManager", "lean doctor")),
    "C compiler fails": (GCC, ("/usr/bin/gcc", "exit code 1", "gcc")),
    "no C compiler": (RuntimeError(NO_COMPILER), ("no C compiler", "install gcc")),
    "CC names nothing": (FileNotFoundError(errno.ENOENT, "No such file", "icc"), ("icc", "install gcc")),
    "cache folder": (PermissionError(errno.EACCES, "Permission denied", "FOLDER/x"), ("FOLDER", "TRITON_CACHE_DIR")),
    "full disk": (OSError(errno.ENOSPC, "No space left on device"), ("No space left", "TRITON_CACHE_DIR")),
    "noexec": (
        ImportError("cuda_utils.so: failed to map segment from shared object: Operation not permitted"),
        ("noexec", "TRITON_CACHE_DIR"),
    ),
    "no libcuda": (AssertionError("libcuda.so cannot found!\nPossible files"), ("libcuda", "TRITON_LIBCUDA_PATH")),
    "no ldconfig": (
        FileNotFoundError(errno.ENOENT, "No such file", "/sbin/ldconfig"),
        ("/sbin/ldconfig", "TRITON_LIBCUDA_PATH"),
    ),
}  # fmt: skip


@pytest.fixture
def error(request, monkeypatch, tmp_path):
    """The error of a case, with Triton's cache folder in its place."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = FAILURES[request.param][0]
    if getattr(found, "filename", None) == "FOLDER/x":
        found = PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "x"))
    return found, [word.replace("FOLDER", str(tmp_path)) for word in FAILURES[request.param][1]]


@pytest.mark.parametrize("error", FAILURES, indirect=True)
def test_the_command_ends_with_one_line_that_says_what_to_do(error, tiny, home, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["lean", "run", str(tiny("llama", num_hidden_layers=1)), "hi", "--no-probe"])
    capsys.readouterr()
    with gpu_back_end(raising(error[0])):
        code = run_to_end(run_command)
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert "internal" not in err
    for word in (*error[1], "LEAN_KERNELS=reference"):
        assert word in err
    assert not (home / "last-error.txt").exists()


def test_missing_headers_of_python_are_named_with_their_package(monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, "get_paths", lambda *_, **__: {"include": str(tmp_path)})
    with gpu_back_end(raising(GCC)), pytest.raises(CompilerError, match=r"Python\.h.*python3\.\d+-dev"):
        torch.ops.lean.kv_write(*write_arguments())
    (tmp_path / "Python.h").touch()
    with gpu_back_end(raising(GCC)), pytest.raises(CompilerError, match="exit code 1"):
        torch.ops.lean.kv_write(*write_arguments())


def write_arguments():
    x = torch.zeros(1, 1, 16)
    return torch.zeros(2, 4096, dtype=torch.uint8), x, x, torch.zeros(1, dtype=torch.int64), 0, 16, FP32.code, FP32.code


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("Triton Error [CUDA]: an illegal memory access"),
     KeyError("x"), FileNotFoundError(errno.ENOENT, "No such file", "/model/config.json"), ImportError("x")],
    ids=repr,
)  # fmt: skip
def test_other_errors_stay_what_they_are(error):
    with gpu_back_end(raising(error)), pytest.raises(type(error)) as caught:
        torch.ops.lean.kv_write(*write_arguments())
    assert caught.value is error


def test_an_error_of_a_later_step_is_told_too_and_the_step_can_run_again(tiny):
    """Prompts of another kind may compile a kernel long after the start."""
    errors = iter([])

    def run():
        for error in errors:
            raise error

    with gpu_back_end(Kernel(run)):
        llm = LLM(str(tiny("llama", num_hidden_layers=1)), EngineConfig(max_num_seqs=1, max_model_len=64))
        errors = iter([OutOfResources(9, 8, "shared memory")])
        with pytest.raises(KernelError, match="shared memory"):
            llm.generate("hi")
        assert llm.generate("hi")[0].finish_reason is not None
    llm.check_integrity()


def test_these_errors_cross_from_one_process_to_another():
    error = CompilerError("no compiler", "install one")
    copy = pickle.loads(bytes(multiprocessing.reduction.ForkingPickler.dumps(error)))
    assert (type(copy), str(copy), copy.reason, copy.mend) == (CompilerError, str(error), error.reason, error.mend)


def test_the_doctor_reports_the_failure_with_its_own_way_out(monkeypatch):
    def fail(*_, **__):
        raise KernelError("too little shared memory", "use another format")

    monkeypatch.setattr("lean.kernels.check.worst_error", fail)
    found = doctor._check_kernels(CPU, "Triton")
    assert (found.level, found.mend) == ("problem", "use another format")
    assert found.text == "Triton fails for bf16: too little shared memory"


def test_the_benchmark_of_attention_ends_with_one_line(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["lean", "bench", "attention", "--shape", "2/1x16", "--context", "32"])
    monkeypatch.setattr("lean.eval.bench.attention.COLD_BYTES", 2**12)
    monkeypatch.setattr("lean.eval.bench.memory.COLD_BYTES", 2**12)
    with gpu_back_end(raising(RuntimeError(NO_COMPILER))):
        assert run_to_end(run_command) == 2
    assert "install gcc" in capsys.readouterr().err.splitlines()[-1]
