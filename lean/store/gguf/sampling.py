"""How a GGUF file wants its tokens chosen.

Keys: `general.sampling.*` of `gguf-py/gguf/constants.py`, https://github.com/ggml-org/llama.cpp
"""

from __future__ import annotations

import logging
import math
from typing import Any

from lean.errors import ModelError, one_line, shown
from lean.store.gguf.file import GgufFile

log = logging.getLogger("lean")

PREFIX = "general.sampling."
_SERVED = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
# Keys that switch something on that lean does not have, with the values that leave it off.
_OFF: dict[str, tuple[object, ...]] = {"xtc_probability": (0,), "mirostat": (0,), "penalty_repeat": (0, 1)}
_DETAILS = ("xtc_threshold", "mirostat_tau", "mirostat_eta", "penalty_last_n")  # of the keys above


def sampling_defaults(file: GgufFile) -> dict[str, Any]:
    """Fields of `SamplingParams` that the file recommends; empty where it recommends none.

    As in a checkpoint that samples, the temperature is 1 where only other fields are given. Keys that lean cannot
    follow are named in a warning.

    Raises:
        ModelError: a value that is no number.
    """
    found: dict[str, Any] = {}
    others = []
    for key, value in file.metadata.items():
        word = key.removeprefix(PREFIX)
        if word == key or word in _DETAILS:
            continue
        if word in _SERVED:
            found[_SERVED[word]] = _number(file, key, value)
        elif value not in _OFF.get(word, ()):
            others.append(f"{one_line(key, 60)} {shown(value, 40)}")
    if others:
        log.warning("%s: lean does not follow %s", file.path.name, one_line(", ".join(sorted(others)), 200))
    if found:
        found = {"temperature": 1.0} | found
        found["temperature"] = max(0.0, found["temperature"])  # llama.cpp takes all from 0 down as greedy
    if "top_k" in found:
        found["top_k"] = max(0, int(found["top_k"]))  # and these as off
    return found


def _number(file: GgufFile, key: str, value: Any) -> float | int:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ModelError(f"{file.path.name}: {key} is {shown(value, 40)}, not a number")
    return float(f"{value:.7g}") if type(value) is float else value  # stored with 32 bits: 0.7, not 0.699999988
