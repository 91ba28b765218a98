"""Clients that nobody here wrote, unchanged, on a server. See tests/support/client_process.py."""

import threading

import pytest
from client_process import CLIENT_S, assert_done, interpreter, started
from http_server import loader, served

from lean.server.service import Phase

CLIENTS = {
    "langchain_client": "langchain_openai",
    "openai_client": "openai",
    "pydantic_ai_client": "pydantic_ai",
}
KEY = "secret"


@pytest.fixture(scope="module")
def with_key(folder):
    with served(loader(folder), api_key=(KEY,)) as server:
        yield server


@pytest.fixture
def server(with_key):
    yield with_key
    with_key.assert_idle()


@pytest.mark.parametrize("name", sorted(CLIENTS))
def test_a_client_finds_what_it_expects(name, server):
    with started(name, interpreter(CLIENTS[name]), server.url, KEY) as process:
        assert_done(process)


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
        with started("openai_retries", python, server.url, KEY) as process:
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
