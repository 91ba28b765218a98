"""Where models come from: a path, a model that lean can pull, or a repository of the Hugging Face hub."""

from __future__ import annotations

import io
import re
import sys
from contextlib import nullcontext, redirect_stderr
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from lean.errors import ModelError, one_line
from lean.store.gguf.file import is_gguf, part_files, read_gguf
from lean.store.pull import ARTEFACTS, ORIGINAL, pull
from lean.units import megabytes

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.tiktoken", "vocab.txt", "merges.txt")
_NOT_WANTED = ("*/*", "consolidated*")
HUB_TIMEOUT_S = 4.0
WHAT_TO_DO = "pass a local folder, or run `lean pull smollm2-135m`"


@dataclass(frozen=True)
class ModelSource:
    """A model on disk: a checkpoint folder, or a GGUF file in a folder; of a split one, the first part.

    ``original``: the GGUF file in the folder from which its checkpoint was made.
    """

    folder: Path
    gguf_file: str | None
    name: str
    origin: Literal["path", "pulled", "hub"]
    original: str | None = None

    def weight_files(self) -> list[tuple[Path, int, int]]:
        """(path, size in bytes, time of the last change in ns) of every file of the weights, by name.

        These change when the weights do; the contents are not read.
        """
        files = (
            part_files(self.folder / self.gguf_file) if self.gguf_file else sorted(self.folder.glob("*.safetensors"))
        )
        return [(file, stat.st_size, stat.st_mtime_ns) for file in files for stat in [file.stat()]]


def resolve(model: str, *, progress: bool = True, trust_remote_code: bool = False) -> ModelSource:
    """Find MODEL: an existing path, else a name that lean can pull (and does, on first use), else a hub id.

    The contents of a folder are checked later, by `lean.store.checkpoint.check_checkpoint`.

    Raises:
        ModelError: nothing of that name exists, it cannot be fetched, or it is of a kind lean refuses.
    """
    shown = repr(one_line(model))
    try:
        path = Path(model).expanduser()
        exists = bool(model) and path.exists()
    except (OSError, ValueError, RuntimeError):  # a prompt may be too long for a file name, or hold a NUL
        exists = False
    if exists:
        return _from_path(path)
    if model in ARTEFACTS:
        folder = pull(model, progress=progress)
        kept = ORIGINAL if (folder / ORIGINAL).is_file() else None  # earlier versions of lean deleted it
        return ModelSource(folder, None, model, "pulled", kept)
    if model.startswith(("./", "../", "/", "~/")) or model.lower().endswith((".gguf", ".safetensors")):
        raise ModelError(f"no such file or folder: {shown}")
    if re.search(r"\s|\?", model):
        raise ModelError(f'{shown} looks like a prompt; the model comes first: lean run smollm2-135m "your prompt"')
    if HUB_ID.fullmatch(model) and ".." not in model:
        return ModelSource(_download(model, progress, trust_remote_code), None, model, "hub")
    known = ", ".join(ARTEFACTS)
    raise ModelError(f"unknown model {shown}: pass a folder, a .gguf file, a hub id owner/name, or one of: {known}")


def _from_path(path: Path) -> ModelSource:
    if path.is_dir():
        return ModelSource(path, None, path.resolve().name, "path")
    if not is_gguf(path):
        if path.suffix.lower() != ".gguf":
            raise ModelError(
                f"{path} is not a model: pass a folder with config.json and *.safetensors, or a .gguf file"
            )
        read_gguf(path)  # says what it is instead
    return ModelSource(path.parent, path.name, path.stem if path.suffix.lower() == ".gguf" else path.name, "path")


def _download(repo_id: str, progress: bool, trust_remote_code: bool) -> Path:
    """Fetch the files of a repository that lean can use, or find them in the hub's cache; return their folder."""
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    # model_info has a timeout and says what the repository holds; snapshot_download does neither. Errors of the HTTP
    # library come through as they are, and versions of the hub differ in which one they use: `except Exception`.
    if str(constants.HF_HUB_CACHE).startswith("~"):  # the hub would make a folder of that name where it is called
        raise ModelError("this user has no home folder for the hub's cache: set HF_HOME to a folder")
    reason = ""
    wanted = [*HUB_FILES, "*.py"] if trust_remote_code else list(HUB_FILES)
    try:
        info = HfApi().model_info(repo_id, timeout=HUB_TIMEOUT_S, files_metadata=True)
    except RepositoryNotFoundError as error:
        raise ModelError(f"no model {repo_id} on the hub, or it needs `hf auth login`: {WHAT_TO_DO}") from error
    except Exception as error:
        reason = f"the hub cannot be reached: {one_line(error)}"
    else:
        names = [file.rfilename for file in info.siblings or []]
        _require_safetensors(repo_id, {PurePosixPath(name).suffix for name in names if "/" not in name})
        if progress:
            _announce(repo_id, info, wanted)
    try:
        with nullcontext() if progress else redirect_stderr(io.StringIO()):
            folder = snapshot_download(
                repo_id,
                local_files_only=bool(reason),
                allow_patterns=wanted,
                ignore_patterns=list(_NOT_WANTED),
            )
    except GatedRepoError as error:
        raise ModelError(
            f"{repo_id} is gated: accept its terms on the hub and run `hf auth login`, or {WHAT_TO_DO}"
        ) from error
    except Exception as error:
        raise ModelError(f"cannot get {repo_id} ({reason or one_line(error)}): {WHAT_TO_DO}") from error
    return Path(folder)


def _announce(repo_id: str, info: Any, wanted: list[str]) -> None:
    """Say on stderr what will be downloaded, how large it is, and under which licence; nothing if all is there."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.utils import filter_repo_objects
    from rich.console import Console

    def cached(file: Any) -> bool:
        return isinstance(try_to_load_from_cache(repo_id, file.rfilename, revision=getattr(info, "sha", None)), str)

    files = info.siblings or []
    names = set(
        filter_repo_objects(
            [file.rfilename for file in files], allow_patterns=wanted, ignore_patterns=list(_NOT_WANTED)
        )
    )
    missing = [file for file in files if file.rfilename in names and not cached(file)]
    if not missing:
        return
    sizes = [size for file in missing if isinstance(size := getattr(file, "size", None), int)]
    size = megabytes(sum(sizes)) if len(sizes) == len(missing) else "an unknown number of bytes"
    licence = next((tag[8:] for tag in getattr(info, "tags", None) or [] if tag.startswith("license:")), "not stated")
    plural = "s" * (len(missing) > 1)
    Console(file=sys.stderr).print(
        f"{repo_id}: downloading {size} in {len(missing)} file{plural} from the Hugging Face hub; licence {licence}; "
        "the same size on disk, in the hub's cache",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def _require_safetensors(repo_id: str, suffixes: set[str]) -> None:
    if ".safetensors" in suffixes:
        return
    if ".gguf" in suffixes:
        raise ModelError(f"{repo_id} holds GGUF files: download the one you want and pass its path")
    raise ModelError(
        f"{repo_id} has no *.safetensors, and lean loads no pickled weights, because unpickling runs code: "
        "look for a converted copy of the model"
    )
