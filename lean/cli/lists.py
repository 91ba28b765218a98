"""Values with commas between them, as flags take them."""

from lean.errors import UserError
from lean.units import ENDLESS


def read_items(flag: str, text: str) -> list[str]:
    """``a, b`` to ``["a", "b"]``. Raises UserError, naming the flag, for an empty item."""
    items = [item.strip() for item in text.split(",")]
    if not all(items):
        raise UserError(f"{flag} {text!r} has an empty item: write values with commas between them")
    return items


def read_numbers(flag: str, text: str, at_least: int = 0) -> list[int]:
    """``512,2048`` to whole numbers. Raises UserError, naming the flag."""
    return [_read_number(flag, item, at_least) for item in read_items(flag, text)]


def _read_number(flag: str, item: str, at_least: int) -> int:
    try:
        number = int(item)
    except ValueError:
        raise UserError(f"{flag}: {item!r} is not a whole number; write e.g. 512,2048") from None
    if not at_least <= number <= ENDLESS:
        raise UserError(f"{flag} {number}: must be from {at_least} to {ENDLESS}")
    return number
