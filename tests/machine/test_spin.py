"""The spin of waiting threads is bounded before torch is loaded; what the user set stays."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lean.machine.spin import SPIN

ROOT = Path(__file__).parents[2]

NAMES = ("OMP_WAIT_POLICY", *SPIN)


def after(code, **variables):
    """The variables of the spin in a new process that ran ``code``, and the settings that lean reports."""
    environment = {name: value for name, value in os.environ.items() if name not in NAMES} | variables
    code += (
        f"\nimport os\nfrom lean.machine.spin import spin_settings\nprint([os.environ.get(name) for name in {NAMES}])"
    )
    code += "\nprint(spin_settings())"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True, check=True
    )
    return tuple(ast.literal_eval(line) for line in done.stdout.splitlines())


def test_importing_lean_bounds_the_spin():
    values, settings = after("import lean")
    assert values == [None, *SPIN.values()]
    assert settings == {name: f"{value} (lean)" for name, value in SPIN.items()}


def test_a_count_of_the_user_stays():
    values, settings = after("import lean", GOMP_SPINCOUNT="7")
    assert values == [None, "7", SPIN["KMP_BLOCKTIME"]]
    assert settings["GOMP_SPINCOUNT"] == "7 (environment)"


def test_a_policy_of_the_user_stays_alone():
    values, settings = after("import lean", OMP_WAIT_POLICY="active")
    assert values == ["active", None, None]
    assert settings == {"OMP_WAIT_POLICY": "active (environment)"}


def test_an_empty_variable_is_not_set():
    assert after("import lean", GOMP_SPINCOUNT="", OMP_WAIT_POLICY="")[0][1:] == [*SPIN.values()]


@pytest.mark.parametrize("variables", [{}, {"GOMP_SPINCOUNT": "5"}])
def test_once_torch_is_loaded_nothing_is_set(variables):
    values, settings = after("import sys; sys.modules['torch'] = sys; import lean", **variables)
    assert values == [None, variables.get("GOMP_SPINCOUNT"), None]
    assert settings == {name: f"{value} (environment)" for name, value in variables.items()}
