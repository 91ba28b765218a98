"""Clients that nobody here wrote, unchanged, on a server.

A client runs under this interpreter if it has the package (extra `serve-test`), else under the one that the variable
LEAN_CLIENTS_PYTHON names (`make clients` makes one), else its test is skipped. So a client is a script in
tests/support/clients, which imports nothing of lean.
"""

import os
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

import pytest
from http_server import WAIT_S, loader, served

from lean.server.service import Phase

SCRIPTS = Path(__file__).parents[1] / "support" / "clients"
CLIENTS = {
    "langchain_client": "langchain_openai",
    "openai_client": "openai",
    "pydantic_ai_client": "pydantic_ai",
}
KEY = "secret"
CLIENT_S = 4 * WAIT_S  # importing a client takes long on a busy machine


@pytest.fixture(scope="module")
def with_key(folder):
    with served(loader(folder), api_key=(KEY,)) as server:
        yield server


@pytest.fixture
def server(with_key):
    yield with_key
    with_key.assert_idle()


def interpreter(package):
    """An interpreter that has the client. Skips the test where there is none."""
    python = sys.executable if find_spec(package) is not None else os.environ.get("LEAN_CLIENTS_PYTHON")
    if not python:
        pytest.skip(f"{package} is not installed: `make clients`, and set LEAN_CLIENTS_PYTHON")
    return python


def started(name, python, server):
    """The process of a script."""
    environment = {key: value for key, value in os.environ.items() if "proxy" not in key.lower()}
    environment.pop("PYTHONPATH", None)
    command = [python, str(SCRIPTS / f"{name}.py"), f"{server.url}/v1", KEY]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, **pipes, text=True, env=environment)


@pytest.mark.parametrize("name", sorted(CLIENTS))
def test_a_client_finds_what_it_expects(name, server):
    with started(name, interpreter(CLIENTS[name]), server) as process:
        out, err = process.communicate(timeout=CLIENT_S)
        assert (out.strip(), process.returncode) == ("done", 0), err


def test_openai_python_comes_again_after_429_and_503(server):
    """The server is full, then loading, then ready."""
    python, service = interpreter("openai"), server.service
    most = service.preparer.max_in_flight

    def begin_loading():
        service.release(service.in_flight)
        service.phase = Phase.LOADING

    def be_ready():
        service.phase = Phase.READY

    then = {"429": begin_loading, "503": be_ready}
    server.call(lambda: service.admit(most))
    seen = []
    try:
        with started("openai_retries", python, server) as process:
            watchdog = threading.Timer(CLIENT_S, process.kill)
            watchdog.start()
            for line in map(str.strip, process.stdout):
                if line in then and line not in seen:
                    server.call(then[line])
                seen.append(line)
            watchdog.cancel()
            assert list(dict.fromkeys(seen)) == ["429", "503", "200", "done"], process.stderr.read()
        assert process.returncode == 0
    finally:
        server.call(begin_loading)
        server.call(be_ready)
