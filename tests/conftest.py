"""Fixtures that several test files share."""

from pathlib import Path

import pytest
import torch
from tiny import tiny_checkpoint


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """``tiny(kind, **config)``: the folder of a tiny checkpoint, made once per session."""
    made: dict[str, Path] = {}

    def make(kind: str, **config: object) -> Path:
        key = f"{kind} {sorted(config.items())}"
        if key not in made:
            made[key] = tiny_checkpoint(tmp_path_factory.mktemp(kind), kind, **config)
        return made[key]

    return make


@pytest.fixture(autouse=True)
def _one_thread():
    """Tiny tensors gain nothing from threads. A test may ask for more; the next one starts with one again."""
    torch.set_num_threads(1)
