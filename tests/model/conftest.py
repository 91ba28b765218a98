"""Checkpoints that were quantized by others, as tests of models use them."""

import pytest
from quantized_checkpoints import SHAPE, Shelf


@pytest.fixture(scope="module")
def made(tiny, tmp_path_factory):
    """``made(form)``: see `quantized_checkpoints.Shelf`."""
    return Shelf(tiny("llama", **SHAPE), tmp_path_factory.mktemp("quantized"))


@pytest.fixture
def copy(made, tmp_path):
    """``copy(form)``: the folder of a checkpoint that the test may change."""
    return lambda form: made.copy(tmp_path / "model", form)
