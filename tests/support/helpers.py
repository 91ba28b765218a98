"""Small things that several tests need."""

import pytest

from lean.errors import UserError
from lean.eval.corpus import Corpus
from lean.eval.score.perplexity import Part, ScoredText


def one_sequence(token_ids):
    """Token ids as a text that is scored in one go, without a BOS."""
    ids = list(token_ids)
    return ScoredText(Corpus("ids", "", "given"), "", ids, [Part(ids, 1, 1)], len(ids), len(ids), "none")


def refusal(function, *args, **kwargs):
    """The message with which something is refused; always one line."""
    with pytest.raises(UserError) as caught:
        function(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    return message
