"""Output of the command: answers and JSON go to stdout, everything else to stderr."""

import json
import sys
from typing import Any

from rich.console import Console

stderr = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)


def print_json(value: dict[str, Any]) -> None:
    """Print one object on one line; in ASCII unless stdout is UTF-8."""
    unicode = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    print(json.dumps(value, ensure_ascii=not unicode, allow_nan=False))
