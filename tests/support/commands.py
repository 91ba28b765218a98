"""The command `lean` in this process."""

import json

import pytest
from typer.testing import CliRunner

from lean.cli.main import app
from lean.errors import UserError


def lean(*args):
    """stdout of a command; an error of the command is raised."""
    result = CliRunner().invoke(app, list(args))
    if result.exception is not None:
        raise result.exception
    return result.stdout


def json_of(*args):
    return json.loads(lean(*args, "--json"))


def refused(*args):
    with pytest.raises(UserError) as caught:
        lean(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def assert_refused(result, word, lines=1):
    """``result``: (exit code, stdout, stderr) of a command that ended with one line about a mistake of the user."""
    code, out, err = result
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == lines
    assert err.splitlines()[-1].startswith("lean: ")
    assert word in err
