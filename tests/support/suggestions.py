"""The suggestions in a refusal, as options."""

import re
from dataclasses import fields

from lean.config import EngineConfig
from lean.units import parse_size

_KINDS = {item.name: str(item.type) for item in fields(EngineConfig)}


def suggestions(message):
    """The changes of the options that a message names after "what fits:"."""
    _, found, listed = message.partition("what fits: ")
    assert found, message
    changes = []
    for part in listed.split("; or "):
        change = {}
        for flag, value in re.findall(r"--([a-z-]+) (\S+)", part):
            name = flag.replace("-", "_")
            change[name] = parse_size(value) if name == "kv_memory" else int(value) if "int" in _KINDS[name] else value
        assert change, part
        changes.append(change)
    return changes
