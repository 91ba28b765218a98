"""``lean doctor``: checks packages, devices, storage and compute kernels of this machine."""

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import torch

from lean.device import choose_device, lacks_code
from lean.errors import KernelError, one_line
from lean.kernels.compiling import triton_version
from lean.machine.cpus import find_cpus
from lean.machine.memory import memory_bounds
from lean.machine.processor import cpu_features, cpu_name
from lean.machine.spin import SPIN, spin_settings
from lean.store.home import NoHome, cache_dir
from lean.threads import fit_threads
from lean.units import mib

Level = Literal["ok", "note", "problem"]

# (package, oldest release that works, first release that is not tested yet, purpose; "": lean needs it)
_PACKAGES = (
    ("torch", "2.11", "2.16", ""),
    ("transformers", "5.17", "5.25", ""),
    ("triton", "3.6", "3.10", "kernels on GPUs"),
    ("bitsandbytes", "0.49", "1", "--quantization: pip install 'lean-inference[bnb]'"),
    ("lm-eval", "0.4.13", "0.5", "lean eval tasks: pip install 'lean-inference[eval]'"),
    ("matplotlib", "3.9", "4", "plots: pip install 'lean-inference[eval]'"),
)
_ISAS = ("avx2", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "asimd", "sve")
# Largest error of a kernel against the reference, relative to the largest output. Kernels add in another order.
_TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@dataclass(frozen=True)
class Finding:
    """One line of the report. ``mend``: what to do about it, empty if nothing needs to be done."""

    topic: str
    level: Level
    text: str
    mend: str = ""


def _release(text: str) -> tuple[int, ...]:
    digits = ("".join(c for c in part if c.isdigit()) for part in text.split("+")[0].split(".")[:3])
    return tuple(int(part or 0) for part in digits)


def packages() -> Iterator[Finding]:
    """Installed versions, compared with those that lean is tested with."""
    python = platform.python_version()
    tried = (3, 11) <= sys.version_info[:2] <= (3, 13)
    yield Finding(
        "python", "ok" if tried else "note", python, "" if tried else "lean is tested with Python 3.11 to 3.13"
    )
    for name, oldest, untried, purpose in _PACKAGES:
        try:
            found = triton_version() if name == "triton" else version(name)
        except PackageNotFoundError:
            found = None
        except ImportError as error:
            yield Finding(name, "problem", f"cannot be imported: {one_line(error)}", f"install {name} again")
            continue
        if found is None:
            if name != "triton" or torch.cuda.is_available():
                yield Finding(name, "note" if purpose else "problem", "not installed", purpose or f"pip install {name}")
            continue
        if _release(found) < _release(oldest):
            yield Finding(name, "problem", found, f"lean needs {oldest} or newer: pip install -U {name}")
        elif _release(found) >= _release(untried):
            yield Finding(name, "note", f"{found}, newer than the versions that lean is tested with")
        else:
            yield Finding(name, "ok", found)


def _cpu_facts() -> str:
    """Model name and relevant instruction sets, as far as the system reports them."""
    name, flags = cpu_name(), cpu_features()
    found = [isa for isa in _ISAS if isa in flags.split()]
    cpus = find_cpus()
    limits = [f"{cpus.affinity} of them allowed by the affinity"] if cpus.affinity < cpus.online else []
    limits += [f"CPU quota {cpus.quota:g}"] if cpus.quota is not None else []
    return f"{', '.join([name, f'{cpus.online} CPUs', *limits])}; {', '.join(found) or flags}"


def machine_facts() -> dict[str, Any]:
    """CPUs, threads, memory and the spin of waiting threads, ready for JSON. Sizes are in bytes."""
    bounds = memory_bounds()
    tightest = min(bounds, key=lambda bound: bound.free_bytes)
    return {
        "cpus": asdict(find_cpus()),
        "threads": {"reason": fit_threads(), "number": torch.get_num_threads()},
        "memory": asdict(tightest) | {"bounds": [asdict(bound) for bound in bounds]},
        "spin": spin_settings(),
    }


def machine() -> Iterator[Finding]:
    """How much of the machine this process may use, and what decides it."""
    usable, reason, number = find_cpus().usable, fit_threads(), torch.get_num_threads()
    mend = f"more than the {usable} that can compute at the same time: lower the number" if number > usable else ""
    yield Finding("threads", "note" if mend else "ok", f"{number} ({reason})", mend)

    host, *limits = memory_bounds()
    tightest = min([host, *limits], key=lambda bound: bound.free_bytes)
    text = f"{mib(tightest.free_bytes)} free of {mib(tightest.limit_bytes)}"
    if tightest is not host:
        text += f", the limit of {tightest.name}; the machine has {mib(host.limit_bytes)}"
    yield Finding("memory", "ok", text)

    spin = ", ".join(f"{name}={value}" for name, value in spin_settings().items())
    if spin:
        yield Finding("spin", "ok", f"{spin}: how long waiting threads compute nothing before they sleep")
    else:
        mend = f"set GOMP_SPINCOUNT={SPIN['GOMP_SPINCOUNT']} in the environment, or import lean before torch"
        yield Finding("spin", "note", "waiting threads spin long before they sleep: torch was loaded first", mend)


def devices() -> Iterator[Finding]:
    """The CPU, how much of the machine this process may use, and the GPUs."""
    yield Finding("cpu", "ok", _cpu_facts())
    yield from machine()
    if not torch.cuda.is_available():
        if torch.version.cuda or torch.version.hip:
            yield Finding(
                "gpu", "note", f"no GPU that torch {torch.__version__} can use", "check the driver: nvidia-smi"
            )
        else:
            yield Finding("gpu", "note", "torch is built for CPUs only", "to use a GPU, install torch for CUDA or ROCm")
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        facts = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        why = lacks_code(torch.device("cuda", index))
        stack = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"HIP {torch.version.hip}"
        yield Finding(
            "gpu",
            "problem" if why else "ok",
            f"cuda:{index} {facts.name}, compute capability {facts.major}.{facts.minor}, {facts.multi_processor_count} "
            f"SMs, {mib(free)} of {mib(total)} free; {stack}",
            why or "",
        )


def storage() -> Iterator[Finding]:
    """The folder where lean keeps models and results of checks."""
    try:
        folder = cache_dir()
    except NoHome as error:
        yield Finding("storage", "problem", str(error))
        return
    there = folder
    while not os.path.exists(there) and there != there.parent:  # False also where it cannot be seen
        there = there.parent
    free = shutil.disk_usage(there).free
    if os.access(there, os.W_OK):
        yield Finding("storage", "ok", f"{folder}, {mib(free)} free")
    else:
        yield Finding("storage", "problem", f"{folder} cannot be written", "set LEAN_HOME to another folder")


def kernels() -> Iterator[Finding]:
    """The kernels of each device, and whether their results agree with the torch reference."""
    from lean.kernels.serving import backend

    cpu, gpu = torch.device("cpu"), choose_device("auto")
    for device in dict.fromkeys((cpu, gpu)):
        try:
            serving = backend(device)
        except ValueError as error:
            yield Finding("kernels", "problem", str(error), "unset the variable LEAN_KERNELS")
            continue
        reference = serving.startswith("torch reference")
        yield Finding("kernels", "note" if reference else "ok", f"{device.type}: {serving}")
        if not reference:
            yield _check_kernels(device, serving)


def _check_kernels(device: torch.device, serving: str) -> Finding:
    from lean.engine.cuda_graphs import CudaGraphs
    from lean.kernels.check import worst_error
    from lean.kernels.serving import is_recordable

    mend = "set LEAN_KERNELS=reference, and report this"
    record = CudaGraphs(device) if is_recordable(device, ()) else None
    worst = 0.0
    for kv_dtype, dtype in _cases(device):
        try:
            error = worst_error(device, kv_dtype, dtype, record)
        except KernelError as failure:
            return Finding("kernels", "problem", f"{serving} fails for {kv_dtype}: {failure.reason}", failure.mend)
        except Exception as failure:
            return Finding("kernels", "problem", f"{serving} fails for {kv_dtype}: {one_line(failure)}", mend)
        if not error <= _TOLERANCE[dtype]:
            what = f"{serving} is off by {error:.2g} for {kv_dtype} with {dtype} queries"
            return Finding("kernels", "problem", what, mend)
        worst = max(worst, error)
    steps = "" if record is None else ", recorded steps included"
    return Finding(
        "kernels", "ok", f"{serving}: the formats agree with the torch reference (largest error {worst:.1g}){steps}"
    )


def _cases(device: torch.device) -> Iterator[tuple[str, torch.dtype]]:
    """The formats and query dtypes to check. On a GPU, where each pair is compiled first, int8 alone has all dtypes."""
    formats = ["bf16", "int8", "fp8", "int4", "k8v4", "k6v4", "k=int5,v=int3"]
    if device.type == "cpu":  # on a GPU the torch reference serves keys by channel
        formats += ["pc4v3", "k=pc3,v=int4", "k=pc5,v=int4"]
    for kv_dtype in formats:
        for dtype in _TOLERANCE:
            if device.type == "cpu" and dtype is torch.float16:
                continue
            if device.type == "cpu" or dtype is torch.bfloat16 or kv_dtype == "int8":
                yield kv_dtype, dtype


def build_kernels() -> Finding:
    """Compile the C++ kernels for this machine."""
    from lean.kernels.cpu.build import BuildError, build

    try:
        return Finding("build", "ok", f"compiled {build(processes=find_cpus().usable)}")
    except BuildError as error:
        mend = "install g++ or clang++, then run lean doctor --build" if sys.platform == "linux" else ""
        return Finding("build", "problem", str(error), mend)


def examine() -> Iterator[Finding]:
    """All findings, in the order of the report."""
    for part in (packages, devices, storage, kernels):
        yield from part()


def doctor_report(findings: list[Finding]) -> dict[str, Any]:
    """The object of ``doctor --json``."""
    return {
        "healthy": not any(finding.level == "problem" for finding in findings),
        "machine": machine_facts(),
        "findings": [asdict(finding) for finding in findings],
    }
