"""The number of CPU threads: torch's own, lowered to what the process may use, unless the user chose it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lean.machine.cpus import Cpus
from lean.threads import chosen_threads

ROOT = Path(__file__).parents[1]

EACH_CORE = "one for each core that the process may use"
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@pytest.fixture(autouse=True)
def machine_with_eight_cpus(monkeypatch):
    """Eight CPUs on four cores."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("lean.threads.physical_cores", lambda cpus: (len(cpus) + 1) // 2)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)), raising=False)


@pytest.mark.parametrize("present", [4, 8])
def test_without_limits_torch_keeps_its_number(present):
    assert chosen_threads(present, Cpus(8, 8, None)) == (present, EACH_CORE)


@pytest.mark.parametrize("present", [4, 8])
def test_a_quota_lowers_the_number_and_never_raises_it(present):
    assert chosen_threads(present, Cpus(8, 8, 2.0)) == (2, "the CPU quota is 2")
    assert chosen_threads(present, Cpus(8, 8, 0.25))[0] == 1
    assert chosen_threads(4, Cpus(8, 8, 6.0)) == (4, EACH_CORE)


def test_an_affinity_that_shrank_after_torch_was_loaded_lowers_the_number():
    assert chosen_threads(8, Cpus(8, 3, None)) == (3, "the process may run on 3 of 8 CPUs")
    assert chosen_threads(8, Cpus(8, 3, 2.0)) == (2, "the CPU quota is 2")


@pytest.mark.parametrize("name", VARIABLES)
@pytest.mark.parametrize("value", ["8", " 8", "8,2", "08"])
def test_a_number_in_the_environment_stays(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert chosen_threads(8, Cpus(8, 8, 1.0)) == (8, f"{name}={value} in the environment")


@pytest.mark.parametrize("value", ["", " ", "0", "-1", "many"])
def test_what_is_no_number_of_threads_is_not_the_users_choice(monkeypatch, value):
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert chosen_threads(8, Cpus(8, 8, 1.0))[0] == 1


def test_a_number_that_torch_would_not_choose_stays():
    assert chosen_threads(3, Cpus(8, 8, 1.0)) == (3, "set by torch.set_num_threads")


QUOTA_OF_ONE = """
from lean.machine import cpus
found = cpus.find_cpus()
cpus.find_cpus = lambda: cpus.Cpus(found.online, found.affinity, 1.0)
"""


def threads_after(code):
    """torch's threads in a new process that ran ``code``."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    code += "\nimport torch\nprint(torch.get_num_threads())"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.parametrize("first", ["", "import torch\n"])
def test_importing_the_engine_fits_the_threads_whether_torch_came_first_or_not(first):
    assert threads_after(first + QUOTA_OF_ONE + "from lean import LLM") == 1


def test_a_number_that_the_program_sets_later_stays():
    code = "import torch; torch.set_num_threads(2)\nfrom lean.threads import fit_threads; fit_threads()"
    assert threads_after(f"{QUOTA_OF_ONE}from lean import LLM\n{code}") == 2


FORK = """
import os, signal, torch
from lean.errors import ConfigError
from lean.threads import use_threads
def forked():
    if pid := os.fork():
        return os.waitpid(pid, 0)[1]
    signal.alarm(60)
    torch.ones(1000, 1000) @ torch.ones(1000, 1000)
    try:
        use_threads(2)
    except ConfigError as error:
        assert "spawn" in str(error)
        os._exit(torch.get_num_threads())
    os._exit(9)
torch.set_num_threads(2)
assert forked() == 9 << 8
use_threads(None)
torch.ones(1000, 1000) @ torch.ones(1000, 1000)
assert forked() == 1 << 8
"""


def test_a_fork_of_a_process_that_computed_uses_one_thread_and_does_not_hang():
    assert threads_after(FORK) == 2
