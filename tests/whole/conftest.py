"""Fixtures for engines on a folder of the prefix cache."""

import functools
import math

import census_models
import pytest
from desk import KINDS
from disk_cache import engine

from lean import LLM
from lean.cache import disk_tier
from lean.cache.disk_tier import DiskTier


@pytest.fixture
def reading_pays(monkeypatch):
    """Tiny models compute as fast as files are read; what is read here must not depend on the machine."""
    monkeypatch.setattr(DiskTier, "computed", lambda *_: None)
    monkeypatch.setattr(disk_tier, "UNKNOWN_S", math.inf)


@pytest.fixture(scope="session")
def model_path(tiny, tmp_path_factory):
    """``model_path(kind)``: the folder of a model, of the desk's kinds or of the census."""

    @functools.cache
    def find(kind: str) -> str:
        if kind in KINDS:
            return str(tiny(kind, **KINDS[kind]))
        folder = tmp_path_factory.mktemp("census") / "model"
        census_models.build(kind, folder)
        return str(folder)

    return find


@pytest.fixture
def begin(model_path, tmp_path, reading_pays):
    """``begin(kind, form, **config)``: a new engine on the folder of this test."""

    def start(kind: str = "llama", form: str = "int8 with residual", **config) -> LLM:
        return engine(model_path(kind), tmp_path / "cache", form, **config)

    return start
