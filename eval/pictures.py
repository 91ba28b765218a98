"""Pictures need matplotlib, which the extra ``eval`` installs."""

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lean.errors import UserError, one_line
from lean.store.home import write_result

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def require_matplotlib(what: str) -> None:
    """Raise UserError where matplotlib is missing; ``what`` names the picture that needs it."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise UserError(f"{what} needs matplotlib: pip install 'lean-inference[eval]'") from None


def save_picture(figure: "Figure", file: str, **options: Any) -> None:
    """Write a figure whole, or not at all, in the format that the file's suffix names: PNG without a suffix.

    Raises:
        UserError: a format that matplotlib does not write, or a place that cannot be written. LeanError: a full disk.
    """
    drawn = io.BytesIO()
    try:
        figure.savefig(drawn, format=Path(file).suffix[1:].lower() or "png", **options)
    except ValueError as error:
        raise UserError(f"cannot draw {one_line(file)}: {one_line(error)}") from None
    write_result(Path(file), drawn.getvalue())
