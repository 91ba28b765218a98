"""Fixtures that several files on sweeps share."""

from types import SimpleNamespace

import pytest
import torch
from sweep_runs import run


@pytest.fixture(scope="session")
def model(tiny):
    return tiny("llama")


@pytest.fixture(scope="session")
def done(model, tmp_path_factory):
    """A finished sweep: its folder, ``out``, and what it returned, ``sweep``."""
    torch.set_num_threads(1)  # the threads are part of a sweep's configuration, and the tests run with one
    out = tmp_path_factory.mktemp("sweep")
    return SimpleNamespace(out=out, sweep=run(model, out))
