"""A server that many tests share."""

import pytest
from http_server import chat_checkpoint, loader, served


@pytest.fixture(scope="session")
def folder(tiny, tmp_path_factory):
    return chat_checkpoint(tiny("llama", num_hidden_layers=1), tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="session")
def shared(folder):
    """A server without keys, which every test leaves idle."""
    with served(loader(folder), names=("tiny", "other")) as server:
        yield server


@pytest.fixture
def server(shared):
    yield shared
    shared.assert_idle()
