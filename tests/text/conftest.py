"""Tokenizers with chat templates."""

import pytest
from chat_templates import TEMPLATES, tokenizer_of


@pytest.fixture(scope="module", params=TEMPLATES)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def tokenizers():
    return {name: tokenizer_of(*arguments) for name, arguments in TEMPLATES.items()}


@pytest.fixture(scope="module")
def chatml(tokenizers):
    return tokenizers["chatml"]
