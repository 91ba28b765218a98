"""Small things that several tests need."""

import pytest

from lean.errors import UserError


def refusal(function, *args, **kwargs):
    """The message with which something is refused; always one line."""
    with pytest.raises(UserError) as caught:
        function(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    return message
