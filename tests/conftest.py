"""Fixtures that several test files share."""

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from tiny import tiny_checkpoint

# A failed assertion in these modules shows its values, as one in a test does.
pytest.register_assert_rewrite("commands", "desk", "draws", "engine_state", "helpers")

# Machines differ in speed, so no example has a deadline. Every run tries the same examples: a failure can be repeated.
# `--hypothesis-profile search` tries new ones.
settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("search"), derandomize=True)
settings.load_profile("same")


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


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty LEAN_HOME and an empty, unreachable hub."""
    monkeypatch.setenv("LEAN_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "home"
