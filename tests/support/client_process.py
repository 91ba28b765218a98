"""Clients that nobody here wrote, in processes of their own.

A client runs under this interpreter if it has the package (extra `serve-test`), else under the one that the variable
LEAN_CLIENTS_PYTHON names (`make clients` makes one), else its test is skipped. So a client is a script in
tests/support/clients, which imports nothing of lean.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from http_server import WAIT_S

SCRIPTS = Path(__file__).parent / "clients"
CLIENT_S = 4 * WAIT_S  # importing a client takes long on a busy machine


def interpreter(package):
    """An interpreter that has the client. Skips the test where there is none."""
    python = sys.executable if find_spec(package) is not None else os.environ.get("LEAN_CLIENTS_PYTHON")
    if not python:
        pytest.skip(f"{package} is not installed: `make clients`, and set LEAN_CLIENTS_PYTHON")
    return python


def started(name, python, url, key, **variables):
    """The process of a script."""
    environment = {key: value for key, value in os.environ.items() if "proxy" not in key.lower()}
    environment.pop("PYTHONPATH", None)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [python, str(SCRIPTS / f"{name}.py"), f"{url}/v1", key]
    return subprocess.Popen(command, **pipes, text=True, env={**environment, **variables})


def assert_done(process):
    """A script found what it expects."""
    out, err = process.communicate(timeout=CLIENT_S)
    assert (out.strip(), process.returncode) == ("done", 0), err
