"""Pictures need matplotlib, which the extra ``eval`` installs."""

from lean.errors import UserError


def require_matplotlib(what: str) -> None:
    """Raise UserError where matplotlib is missing; ``what`` names the picture that needs it."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise UserError(f"{what} needs matplotlib: pip install 'lean-inference[eval]'") from None
