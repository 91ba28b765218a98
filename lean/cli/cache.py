"""``lean cache``: list, remove and check what the prefix cache keeps on disk."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lean.cli.flags import Json
from lean.cli.terminal import print_json, stderr
from lean.errors import LeanError, UserError, one_line
from lean.units import mib

if TYPE_CHECKING:
    from lean.cache.disk_folder import DiskFolder, EngineKind

ID_LENGTH = 12  # characters of a fingerprint that are shown
_SHOWN_FILES = 20  # damaged files that are named

app = typer.Typer(no_args_is_help=True, help="List, remove and check the files of --prefix-cache-dir.")
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of --prefix-cache-dir.", show_default=False)]


@app.command("ls")
def show(folder: Folder, json: Json = False) -> None:
    """List what the folder holds: one line for each model and set of options that decides the bytes of a block."""
    from lean.cache.disk_folder import DiskFolder

    kinds = DiskFolder.existing(folder).kinds()
    if json:
        print_json({"folder": str(folder), "bytes": sum(kind.nbytes for kind in kinds), "entries": _report(kinds)})
        return
    if not kinds:
        print("the prefix cache is empty")
        return
    _print(kinds)
    total = sum(kind.nbytes for kind in kinds)
    print(f"{sum(kind.num_files for kind in kinds):,} files, {mib(total)} in {one_line(folder)}")


@app.command("rm")
def remove(
    folder: Folder,
    ids: Annotated[
        list[str] | None, typer.Argument(metavar="[ID]...", help="What to remove: ids that `lean cache ls` shows.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove everything that the folder holds.")] = False,
) -> None:
    """Remove files from the folder. Engines that use the folder compute anew what they do not find."""
    from lean.cache.disk_folder import DiskFolder

    if bool(ids) == everything:
        raise UserError("say what to remove: give the ID of an entry of `lean cache ls`, or --all")
    cache, freed = DiskFolder.existing(folder), 0
    for kind in cache.kinds() if everything else [_find(cache, given) for given in ids or []]:
        try:
            freed += cache.remove(kind.fingerprint)
        except OSError as error:
            raise LeanError(f"{one_line(folder)} cannot be changed: {error.strerror or one_line(error)}") from None
    stderr.print(f"{mib(freed)} freed")


@app.command()
def check(folder: Folder) -> None:
    """Read every file and compare it with its checksum. Exit code 1 if one is damaged; no file is changed.

    An engine does the same before it uses a file, and removes a damaged one.
    """
    from lean.cache.disk_folder import DiskFolder

    cache, good, bad = DiskFolder.existing(folder), 0, 0
    for kind in cache.kinds():
        for path, fault in cache.check(kind.fingerprint):
            good += fault is None
            bad += fault is not None
            if fault is not None and bad <= _SHOWN_FILES:
                print(f"{one_line(path)}: {fault}")
    if bad > _SHOWN_FILES:
        print(f"... and {bad - _SHOWN_FILES} more")
    print(f"{good + bad:,} files read, {bad:,} damaged")
    if bad:
        raise typer.Exit(1)


def _find(cache: "DiskFolder", given: str) -> "EngineKind":
    """The one entry whose id begins like this. Raises UserError."""
    found = [kind for kind in cache.kinds() if given and kind.fingerprint.startswith(given)]
    if len(found) != 1:
        why = "several entries have" if found else "no entry has"
        raise UserError(f"{why} an id that begins with {one_line(given)!r}: see `lean cache ls`")
    return found[0]


def _report(kinds: "list[EngineKind]") -> list[dict[str, Any]]:
    return [
        {
            "id": kind.fingerprint,
            "files": kind.num_files,
            "bytes": kind.nbytes,
            "last_used": round(kind.used),
            "about": kind.about,
        }
        for kind in kinds
    ]


def _print(kinds: "list[EngineKind]") -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 10_000
    table = Table("id", "model", "KV cache", "files", "size", "last used", box=None, pad_edge=False)
    for kind in kinds:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(kind.used)) if kind.used else "never"
        row = (kind.fingerprint[:ID_LENGTH], _model(kind.about), _formats(kind.about))
        table.add_row(*row, f"{kind.num_files:,}", mib(kind.nbytes), used)
    console.print(table)


def _model(about: dict[str, Any]) -> str:
    dtype = about.get("dtype", "?")
    return one_line(f"{about.get('model', '?')}, {about.get('quantization') or dtype}", 60)


def _formats(about: dict[str, Any]) -> str:
    pools = about.get("pools")
    kept = [pool for pool in pools if isinstance(pool, dict)] if isinstance(pools, list) else []
    names = dict.fromkeys(
        f"{pool.get('format', '?')}{' unquantized' if pool.get('exact') else ''}"
        + (f" (window {pool['window']})" if pool.get("window") else "")
        for pool in kept
    )
    return one_line(" + ".join(names), 80) + (", deterministic" if about.get("deterministic") else "")
