"""openai-python, unchanged, on a server.

The client runs under this interpreter if it has the package (extra `serve-test`), else under the one that the variable
LEAN_CLIENTS_PYTHON names, else the test is skipped.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from http_server import WAIT_S, loader, served

SCRIPT = Path(__file__).parents[1] / "support" / "openai_client.py"


def interpreter():
    """An interpreter that has openai."""
    if find_spec("openai") is not None:
        return sys.executable
    if other := os.environ.get("LEAN_CLIENTS_PYTHON"):
        return other
    pytest.skip("openai is not installed: pip install '.[serve-test]', or set LEAN_CLIENTS_PYTHON")


def test_openai_python_finds_what_it_expects(folder):
    python = interpreter()
    with served(loader(folder), api_key=("secret",)) as server:
        command = [python, str(SCRIPT), f"{server.url}/v1", "secret"]
        environment = {key: value for key, value in os.environ.items() if "proxy" not in key.lower()}
        environment.pop("PYTHONPATH", None)
        done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, env=environment, check=False)
        assert (done.stdout.strip(), done.returncode) == ("done", 0), done.stderr
        server.assert_idle()
