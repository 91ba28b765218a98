"""Models on disk: what is there, and how to be rid of it."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from lean.errors import ModelError, one_line
from lean.store.checkpoint import CONFIG, INDEX, SINGLE
from lean.store.pull import ARTEFACTS, MANIFEST, _exclusive, _is_complete, cache_dir
from lean.store.source import HUB_ID

log = logging.getLogger("lean")

LEFTOVER = re.compile(r"\.(.+)\.[^.]+\.tmp", re.DOTALL)  # how a pull, and a removal, call their work folders


@dataclass(frozen=True)
class StoredModel:
    """A model, or what is left of one, in lean's own folder or in the hub's cache.

    Attributes:
        name: what `lean rm` takes, and `lean run` where the model is complete.
        nbytes: of the files that are really in that place. Files that revisions share count once; what a link in
            lean's own folder points to does not count, and is not removed either.
        architecture, model_type, dtype: as config.json says; None where it does not, or cannot be read.
        complete: False for what a killed pull or download left behind. Of a pulled model the manifest decides, of one
            of the hub whether all its weight files are there.
    """

    name: str
    origin: Literal["pulled", "hub"]
    folder: Path
    nbytes: int
    architecture: str | None
    model_type: str | None
    dtype: str | None
    complete: bool


def list_models() -> list[StoredModel]:
    """Everything on disk that `remove_model` can remove, pulled ones first, by name. Needs no network."""
    found = [*_pulled(), *(model for model, _, _ in _hub())]
    return sorted(found, key=lambda model: (model.origin == "hub", model.name))


def remove_model(name: str) -> int:
    """Delete one entry of `list_models` by its name; returns the bytes freed.

    The name is compared with those listed and never made into a path, and links are removed, not followed: nothing
    outside the two places can be deleted.

    Raises:
        ModelError: no such entry, or it cannot be deleted.
    """
    models = list_models()
    model = next((model for model in models if model.name == name), None)
    if model is None:
        there = ", ".join(printable(model.name) for model in models)
        raise ModelError(
            f"no model {one_line(name)!r} is on disk; {'there is: ' + there if there else 'there is none'}"
        )
    try:
        return _remove_pulled(model) if model.origin == "pulled" else _remove_hub(model)
    except OSError as error:
        where = f" ({one_line(error.filename)})" if error.filename else ""
        raise ModelError(f"cannot remove {printable(name)}: {error.strerror or one_line(error)}{where}") from error


def printable(text: str) -> str:
    """Text of files and folders for a terminal, which must not take orders from it."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def _describe(folder: Path) -> dict[str, str | None]:
    """What config.json says, as keywords of `StoredModel`."""
    try:
        config = json.loads((folder / CONFIG).read_bytes())
    except (OSError, ValueError, RecursionError):
        config = None
    config = config if isinstance(config, dict) else {}
    text = config.get("text_config")  # of models that also see or hear
    inner = text if isinstance(text, dict) else {}
    architectures = config.get("architectures")
    said = {
        "architecture": architectures[0] if isinstance(architectures, list) and architectures else None,
        "model_type": config.get("model_type"),
        "dtype": config.get("dtype") or config.get("torch_dtype") or inner.get("dtype") or inner.get("torch_dtype"),
    }
    return {key: value if isinstance(value, str) else None for key, value in said.items()}


def _real_files(folder: Path, inside: Path) -> dict[tuple[int, int], tuple[Path, int]]:
    """The files under a folder by inode: path and size. Links count where they lead to a file in ``inside``."""
    files = {}
    for place, _, names in os.walk(folder):
        for name in names:
            file = Path(place, name)
            try:
                if file.is_symlink():
                    file = file.resolve()
                    if inside not in file.parents:
                        continue
                stat = file.lstat()
            except (OSError, RuntimeError):  # gone meanwhile, or links in a circle
                continue
            files[stat.st_dev, stat.st_ino] = (file, stat.st_size)
    return files


def _real_bytes(folder: Path, inside: Path) -> int:
    return sum(size for _, size in _real_files(folder, inside).values())


def _require_writable(folder: Path) -> None:
    """Refuse before anything is touched, rather than leave half of it."""
    for place in (str(folder.parent), *(place for place, _, _ in os.walk(folder))):
        if not os.access(place, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), place)


# --- lean's own folder ---


def _pulled() -> Iterator[StoredModel]:
    try:
        entries = list((cache_dir() / "models").iterdir())
    except FileNotFoundError:
        return
    except OSError as error:
        log.warning("cannot read %s: %s", cache_dir() / "models", error.strerror)
        return
    for entry in entries:
        leftover = LEFTOVER.fullmatch(entry.name) is not None
        link = entry.is_symlink()
        if not (link or entry.is_dir()) or (entry.name.startswith(".") and not leftover):
            continue
        yield StoredModel(
            entry.name,
            "pulled",
            entry,
            0 if link else _real_bytes(entry, entry.resolve()),
            **_describe(entry),
            complete=not leftover and _fits_manifest(entry),
        )


def _fits_manifest(folder: Path) -> bool:
    """Whether a pull ended here, and left what is here. Models that only other versions of lean know count too."""
    artefact = ARTEFACTS.get(folder.name)
    if artefact is None:
        try:
            sha256 = str(json.loads((folder / MANIFEST).read_bytes())["sha256"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return False
        artefact = replace(next(iter(ARTEFACTS.values())), member_sha256=sha256)
    return _is_complete(folder, artefact)


def _remove_pulled(model: StoredModel) -> int:
    """Rename away, then delete: what a kill in between leaves is hidden, listed, and swept by the next pull."""
    folder, models = model.folder, model.folder.parent
    leftover = LEFTOVER.fullmatch(model.name)
    base = leftover[1] if leftover else model.name
    lock = models / f".{base}.lock"
    if lock.is_symlink():  # opening it would empty what it points to
        raise OSError(errno.ELOOP, "its lock is a link", str(lock))
    with _exclusive(lock, progress=True):
        if folder.is_symlink():
            folder.unlink()
            return 0
        if not folder.exists():  # a pull that was running has ended, or another removal was first
            return 0
        _require_writable(folder)
        nbytes = _real_bytes(folder, folder.resolve())
        if not leftover:
            hidden = Path(tempfile.mkdtemp(prefix=f".{base}.", suffix=".tmp", dir=models))
            try:
                os.replace(folder, hidden)
            except BaseException:
                hidden.rmdir()
                raise
            folder = hidden
        shutil.rmtree(folder)
    return nbytes


# --- the hub's cache ---


def _hub() -> Iterator[tuple[StoredModel, Any, Any]]:
    """Checkpoints whose name `lean run` takes, each with its CachedRepoInfo and the HFCacheInfo of it alone."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        return
    except (OSError, ValueError) as error:
        log.warning("cannot read the hub's cache: %s", one_line(error))
        return
    for repo in cache.repos:
        if repo.repo_type != "model" or not HUB_ID.fullmatch(repo.repo_id) or ".." in repo.repo_id:
            continue
        usable = [revision for revision in repo.revisions if _is_checkpoint(revision.snapshot_path)]
        if not usable:
            continue
        revision = max(usable, key=lambda revision: ("main" in revision.refs, revision.last_modified))
        folder = revision.snapshot_path
        link = repo.repo_path.is_symlink()
        model = StoredModel(
            repo.repo_id,
            "hub",
            folder,
            0 if link else _real_bytes(repo.repo_path, repo.repo_path.parent),
            **_describe(folder),
            complete=_has_all_weights(folder),
        )
        # A copied cache may hold one revision twice, and delete_revisions takes the first repository that has it.
        yield model, repo, replace(cache, repos=frozenset({repo}))


def _is_checkpoint(folder: Path) -> bool:
    return (folder / CONFIG).is_file() and any(folder.glob("*.safetensors"))


def _has_all_weights(folder: Path) -> bool:
    """Whether the weights are there by name; whether they are whole is checked when they are loaded."""
    if (folder / SINGLE).is_file():
        return True
    try:
        return all(
            (folder / name).is_file() for name in json.loads((folder / INDEX).read_bytes())["weight_map"].values()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False


def _remove_hub(model: StoredModel) -> int:
    from huggingface_hub.utils import logging as hub_logging

    found = [(repo, cache) for listed, repo, cache in _hub() if listed.name == model.name]
    if not found:  # another removal was first
        return 0
    repo, cache = found[0]
    if repo.repo_path.is_symlink():
        repo.repo_path.unlink()
        return 0
    _require_writable(repo.repo_path)
    before = _real_files(repo.repo_path, repo.repo_path.parent)
    verbosity = hub_logging.get_verbosity()
    hub_logging.set_verbosity(hub_logging.CRITICAL)  # what it cannot delete it logs, with a traceback, and goes on
    try:
        cache.delete_revisions(*(revision.commit_hash for revision in repo.revisions)).execute()
    finally:
        hub_logging.set_verbosity(verbosity)
    if repo.repo_path.exists():
        raise OSError(errno.EACCES, "not all of it could be deleted", str(repo.repo_path))
    return sum(size for file, size in before.values() if not file.exists())
