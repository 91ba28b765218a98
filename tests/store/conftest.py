"""The two places that hold models, empty."""

import pytest


@pytest.fixture
def models(home):
    (home / "models").mkdir(parents=True)
    return home / "models"


@pytest.fixture
def hub(tmp_path):
    return tmp_path / "hub"
