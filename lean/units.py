"""Sizes in bytes as people write and read them, and the longest sequence length."""

import re

from lean.errors import ConfigError, one_line

MOST_BYTES = 2**62  # no memory is larger
ENDLESS = 2**31  # tokens: the length limit of a sequence that has no other limit

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_size(text: str) -> int:
    """``512MiB``, ``1.5GB``, ``4096`` -> bytes. Raises ConfigError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgKMG]?i?[bB]?)\s*", text)
    unit = match[2].upper() if match else ""
    unit = unit + "IB" if unit in ("K", "M", "G") else unit + "B" if unit.endswith("I") else unit
    if not match or unit not in _UNITS:
        raise ConfigError(f"cannot read size {text!r}: write a number with KiB, MiB, GiB, KB, MB or GB, e.g. 512MiB")
    size = float(match[1]) * _UNITS[unit]
    if size > MOST_BYTES:
        raise ConfigError(f"size {one_line(text, 30)!r} is larger than any memory: write e.g. 512MiB")
    return int(size)


def megabytes(nbytes: int) -> str:
    """Bytes in millions, as downloads are measured, e.g. ``92.9 MB``."""
    return f"{nbytes / 10**6:,.1f} MB"


def mib(nbytes: int) -> str:
    """Bytes in MiB, e.g. ``1,024.5 MiB``."""
    return f"{nbytes / 2**20:,.1f} MiB"
