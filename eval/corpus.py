"""Texts to evaluate on. ``python-docs`` comes with every Python and needs no download."""

import hashlib


def python_docs() -> str:
    """Python's own help topics, joined with blank lines in sorted order (about 465,000 characters of English).

    The text differs between Python versions; report `text_hash` with every figure.
    """
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def text_hash(text: str) -> str:
    """sha256 of the UTF-8 text, hexadecimal."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
