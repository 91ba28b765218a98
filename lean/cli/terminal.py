"""Where the command writes: answers and JSON on stdout, everything else on stderr."""

import json
import sys
from typing import Any

from rich.console import Console

stderr = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)


def print_json(value: dict[str, Any]) -> None:
    """One object on one line, in ASCII where the terminal knows no more."""
    unicode = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    print(json.dumps(value, ensure_ascii=not unicode, allow_nan=False))
