"""The CPU threads that torch and lean's kernels compute with."""

import os
import re
from functools import cache

import torch

from lean.errors import ConfigError
from lean.machine.cpus import Cpus, find_cpus, physical_cores

_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")

_SET, _ENVIRONMENT = "set by torch.set_num_threads", " in the environment"  # reasons that are others' choices

_fitted = 0  # threads after `fit_threads`
_computing = _single = False  # an engine of this process computes; this process is a fork of one that did


@cache
def fit_threads() -> str:
    """Lower torch's threads to the CPUs that this process may use. Returns why torch has its number of threads.

    Only the first call in a process does anything: what the program sets later stays. A number that the environment
    asks for stays too, and so does one that torch would not have chosen by itself.
    """
    number, reason = chosen_threads(torch.get_num_threads(), find_cpus())
    global _fitted
    if number < torch.get_num_threads():
        torch.set_num_threads(number)
    _fitted = torch.get_num_threads()
    return reason


def chosen_threads(present: int, cpus: Cpus) -> tuple[int, str]:
    """The number of threads to compute with where torch has ``present`` of them, and why."""
    for name in _VARIABLES:
        if re.match(r"\s*0*[1-9]", os.environ.get(name, "")):
            return present, f"{name}={os.environ[name]}{_ENVIRONMENT}"
    if present not in _torch_defaults(cpus):
        return present, _SET
    if cpus.usable >= present:
        return present, "one for each core that the process may use"
    if cpus.usable < cpus.affinity:
        return cpus.usable, f"the CPU quota is {cpus.quota:g}"
    return cpus.usable, f"the process may run on {cpus.affinity} of {cpus.online} CPUs"


def are_ours() -> bool:
    """Whether lean chose the number of threads: neither the environment nor the program has set it since or before."""
    reason = fit_threads()
    asked = reason == _SET or reason.endswith(_ENVIRONMENT)
    return not asked and torch.get_num_threads() == _fitted


def lend_threads(number: int) -> None:
    """Compute with fewer threads, or again with all of them, by lean's own choice."""
    global _fitted
    torch.set_num_threads(number)
    _fitted = number


def use_threads(number: int | None) -> None:
    """Set torch's threads before an engine computes; None leaves them as they are.

    Raises ConfigError for more than one thread in a fork of a process whose engine computed.
    """
    global _computing
    if number is not None and number > 1 and _single:
        raise ConfigError(
            f"threads {number}: this process was forked from one that had an engine, and can compute with 1 thread "
            "only; start it with multiprocessing.get_context('spawn')"
        )
    if number is not None:
        torch.set_num_threads(number)
    _computing = True


def _fit_fork() -> None:
    """A fork has none of its parent's threads, and GNU's OpenMP would wait for them for ever: compute with one."""
    global _single
    if _computing:
        _single = True
        torch.set_num_threads(1)


os.register_at_fork(after_in_child=_fit_fork)


def _torch_defaults(cpus: Cpus) -> set[int]:
    """The numbers of threads that torch takes by itself: CPUs or cores, of the machine or of the affinity."""
    everything = set(range(cpus.online))
    mine = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else everything
    return {cpus.online, cpus.affinity, physical_cores(everything), physical_cores(mine)}
