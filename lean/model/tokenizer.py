"""The tokenizer of a checkpoint folder: what its tokenizer.json says, or that of its other vocabulary files."""

import logging
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import transformers

from lean.errors import ModelError, shown
from lean.model.packages import require_for_tokenizer
from lean.store.library import ABOUT_TOKENIZER, attempt, quiet
from lean.store.source import ModelSource

log = logging.getLogger("lean")

TOKENIZER = "tokenizer.json"
_VOCABULARIES = (TOKENIZER, "*.model", "*.tiktoken", "vocab.json", "vocab.txt", "tekken.json")
_USUAL = {"tokenizer_file": TOKENIZER, "vocab_file": "vocab.json", "merges_file": "merges.txt"}
# Letters, digits, punctuation, several spaces and lines: classes of tokenizers differ in how they cut such text.
_PROBE = "Hello  world, don't 1234567!\n\n\tdef f(x):\n    return é + 日本 🙂 "


def read_tokenizer(source: ModelSource, trust_remote_code: bool) -> Any:
    """transformers' tokenizer of a checkpoint folder.

    Raises:
        ModelError: files are missing or damaged, or need a package that is not installed.
    """
    what = f"cannot read the tokenizer of {source.name}"
    attempt(what, require_for_tokenizer, source)
    try:
        with quiet(f"the tokenizer of {source.name}", ABOUT_TOKENIZER):
            call = transformers.AutoTokenizer.from_pretrained
            tokenizer = attempt(what, call, source.folder, trust_remote_code=trust_remote_code)
    except ModelError:
        _require_vocabulary(source, _USUAL)
        raise
    _require_vocabulary(source, getattr(tokenizer, "vocab_files_names", {}))
    return _as_in_file(source, tokenizer)


def _require_vocabulary(source: ModelSource, names: Mapping[str, Any]) -> None:
    """Raise ModelError where files are missing without which transformers makes a tokenizer of an empty vocabulary.

    Args:
        names: the files that the tokenizer's class reads, by their role; a class may need none.
    """
    listed = {entry.name for entry in source.folder.iterdir()}
    named = [name for name in names.values() if isinstance(name, str)]
    if named and not any(name in named or any(fnmatch(name, kind) for kind in _VOCABULARIES) for name in listed):
        raise ModelError(
            f"cannot read the tokenizer of {source.name}: {TOKENIZER} is missing; incomplete download? "
            "Copy it from where the checkpoint comes from"
        )
    merges = names.get("merges_file")
    if merges and names.get("vocab_file") in listed and not {merges, TOKENIZER} & listed:
        raise ModelError(
            f"cannot read the tokenizer of {source.name}: {names['vocab_file']} needs {merges}, which is missing; "
            "incomplete download?"
        )


def _as_in_file(source: ModelSource, tokenizer: Any) -> Any:
    """The tokenizer, or that of tokenizer.json where the two cut text differently.

    Some classes of transformers build the tokenizer anew from the vocabulary: what tokenizer.json says about splitting
    and normalizing is then lost, if tokenizer_config.json names a class of another kind.
    """
    generic = transformers.PreTrainedTokenizerFast
    path: Path = source.folder / TOKENIZER
    if not path.is_file() or type(tokenizer) is generic or "__init__" not in vars(type(tokenizer)):
        return tokenizer
    if not type(tokenizer).__module__.startswith("transformers.") or not getattr(tokenizer, "is_fast", False):
        return tokenizer
    found = attempt(f"cannot read {path}", generic.from_pretrained, source.folder)
    if _probe_ids(tokenizer) == (wanted := _probe_ids(found)) or wanted is None:
        return tokenizer
    log.warning(
        "%s: %s, the class that tokenizer_config.json or transformers names, cuts text otherwise than %s: the file is "
        "followed",
        source.name,
        shown(type(tokenizer).__name__, 60),
        TOKENIZER,
    )
    return found


def _probe_ids(tokenizer: Any) -> list[int] | None:
    """Ids of the probe; None where the tokenizer cannot encode it."""
    try:
        return list(tokenizer(_PROBE, add_special_tokens=False)["input_ids"])
    except Exception:
        return None
