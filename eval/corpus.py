"""Texts to evaluate on. ``python-docs`` is part of every Python and needs no download."""

import hashlib
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lean.errors import UserError, one_line

CORPORA = ("python-docs", "wikitext2")
_WIKITEXT = ("Salesforce/wikitext", "wikitext-2-raw-v1", "test")
_HUB = ("huggingface.co", 443)


@dataclass(frozen=True)
class Corpus:
    """A text, its name in reports, and how it was prepared."""

    name: str
    text: str
    preprocessing: str

    @property
    def sha256(self) -> str:
        return text_hash(self.text)

    def report(self) -> dict[str, Any]:
        """Facts that identify the text, ready for JSON."""
        return {"name": self.name, "sha256": self.sha256, "characters": len(self.text), "made": self.preprocessing}


def text_hash(text: str) -> str:
    """sha256 of the UTF-8 text, hexadecimal."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def python_docs() -> str:
    """Python's own help topics, joined with blank lines in sorted order (about 465,000 characters of English).

    The text differs between Python versions; report `text_hash` with every figure.
    """
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def _wikitext2() -> str:
    """The test split of WikiText-2 (https://arxiv.org/abs/1609.07843), raw, lines joined as they are.

    Raises UserError within seconds where it is neither cached nor reachable.
    """
    instead = "give your own text with --text FILE, or use --corpus python-docs, which needs no download"
    try:
        import datasets
    except ImportError:
        raise UserError(f"corpus wikitext2 needs the package datasets (pip install datasets); or {instead}") from None
    name, subset, split = _WIKITEXT
    offline = False
    try:
        socket.create_connection(_HUB, timeout=3).close()
    except OSError:
        offline = True  # a cached copy can still be read
    was = datasets.config.HF_HUB_OFFLINE, datasets.config.HF_DATASETS_OFFLINE
    try:
        if offline:
            datasets.config.HF_HUB_OFFLINE = datasets.config.HF_DATASETS_OFFLINE = True
        rows = datasets.load_dataset(
            name, subset, split=split, download_config=datasets.DownloadConfig(local_files_only=offline, max_retries=0)
        )
    except Exception as error:
        why = "the hub cannot be reached and there is no cached copy" if offline else one_line(error)
        raise UserError(f"corpus wikitext2 ({name} {subset} {split}) cannot be loaded: {why}; {instead}") from None
    finally:
        datasets.config.HF_HUB_OFFLINE, datasets.config.HF_DATASETS_OFFLINE = was
    return "".join(rows["text"])


def load_corpus(name: str) -> Corpus:
    """A corpus by its name. Raises UserError for a name that is unknown or a corpus that cannot be loaded."""
    if name == "python-docs":
        return Corpus(name, python_docs(), "pydoc_data.topics of the running Python, sorted, joined with blank lines")
    if name == "wikitext2":
        return Corpus(name, _wikitext2(), "lines of the raw test split, joined as they are")
    raise UserError(f"unknown corpus {name!r}: choose from {', '.join(CORPORA)}, or give a file with --text")


def load_text(path: str | Path) -> Corpus:
    """A UTF-8 file as a corpus. Raises UserError where it cannot be read or holds only white space."""
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")  # a byte-order mark is not text
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {one_line(getattr(error, 'strerror', None) or error)}") from None
    if not text.strip():
        raise UserError(f"{path} contains no text: give a file with text")
    return Corpus(Path(path).name, text, "the file as it is")
