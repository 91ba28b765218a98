"""Models on disk: the list of them, and their removal."""

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
from lean.store.home import cache_dir, exclusive
from lean.store.pull import ARTEFACTS, MANIFEST, WAITING, is_complete
from lean.store.source import HUB_ID

log = logging.getLogger("lean")

LEFTOVER = re.compile(r"\.(.+)\.[^.]+\.tmp", re.DOTALL)  # names of the work folders of pulls and removals


@dataclass(frozen=True)
class StoredModel:
    """A model, or what is left of one, in lean's own folder or in the hub's cache.

    Attributes:
        name: what `lean rm` takes, and `lean run` where the model is complete.
        nbytes: size of the files in that place. Files that revisions share count once. The target of a link in lean's
            own folder does not count, and is not removed.
        architecture, model_type, dtype: from config.json; None where it does not say, or cannot be read.
        complete: False for the remains of a killed pull or download. A pulled model must fit its manifest; a model of
            the hub must have all its weight files.
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
        raise ModelError(f"no model {one_line(name)!r} is on disk; models on disk: {there or 'none'}")
    try:
        return _remove_pulled(model) if model.origin == "pulled" else _remove_hub(model)
    except OSError as error:
        where = f" ({one_line(error.filename)})" if error.filename else ""
        raise ModelError(f"cannot remove {printable(name)}: {error.strerror or one_line(error)}{where}") from error


def printable(text: str) -> str:
    """Text with control characters escaped, so that names of files cannot control the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def _describe(folder: Path) -> dict[str, str | None]:
    """What config.json says, as keywords of `StoredModel`."""
    try:
        config = json.loads((folder / CONFIG).read_bytes())
    except (OSError, ValueError, RecursionError):
        config = None
    config = config if isinstance(config, dict) else {}
    text = config.get("text_config")  # of multimodal models
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
                    file = file.resolve(strict=True)
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
    """Raise before anything is deleted, so that no half of a model stays."""
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
    """Whether the folder is as a finished pull left it. Models that only other versions of lean know count too."""
    artefact = ARTEFACTS.get(folder.name)
    if artefact is None:
        try:
            sha256 = str(json.loads((folder / MANIFEST).read_bytes())["sha256"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return False
        artefact = replace(next(iter(ARTEFACTS.values())), member_sha256=sha256)
    return is_complete(folder, artefact)


def _remove_pulled(model: StoredModel) -> int:
    """Rename to a hidden name, then delete. After a kill in between, the next pull deletes the rest."""
    folder, models = model.folder, model.folder.parent
    leftover = LEFTOVER.fullmatch(model.name)
    base = leftover[1] if leftover else model.name
    lock = models / f".{base}.lock"
    if lock.is_symlink():  # opening it would empty what it points to
        raise OSError(errno.ELOOP, "its lock file is a link", str(lock))
    with lock.open("w") as held:
        exclusive(held, waiting=WAITING)
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
    """Whether all weight files exist. Their contents are checked when they are loaded."""
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
    hub_logging.set_verbosity(hub_logging.CRITICAL)  # it would log each failed deletion with a traceback, and go on
    try:
        cache.delete_revisions(*(revision.commit_hash for revision in repo.revisions)).execute()
    finally:
        hub_logging.set_verbosity(verbosity)
    if repo.repo_path.exists():
        raise OSError(errno.EACCES, "some of its files could not be deleted", str(repo.repo_path))
    return sum(size for file, size in before.values() if not file.exists())
