"""``lean pull``, ``models``, ``rm`` and ``info``: fetch, list, delete and describe models."""

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lean.cli.flags import Json, ModelArgument, choose_model
from lean.cli.terminal import print_json, stderr
from lean.store.pull import ARTEFACTS
from lean.units import mib

if TYPE_CHECKING:
    from lean.store.installed import StoredModel


def pull(name: Annotated[str, typer.Argument(metavar="NAME", help=f"Known names: {', '.join(ARTEFACTS)}.")]) -> None:
    """Download a known model, verify it and print its folder. Other models are downloaded at first use."""
    from lean.store.pull import pull as fetch

    print(fetch(name, progress=True))


def models(json: Json = False) -> None:
    """List the models on this machine: pulled models, and models in the Hugging Face cache."""
    from lean.store.installed import list_models

    found = list_models()
    if json:
        print_json({"models": models_report(found)})
    else:
        print_models(found)


def rm(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the model, as listed by `lean models`.")],
) -> None:
    """Delete a model from this machine."""
    from lean.store.installed import remove_model

    stderr.print(f"{name} removed, {mib(remove_model(name))} freed")


def info(
    model: ModelArgument = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Allow Python code that comes with the model to run.")
    ] = False,
    json: Json = False,
) -> None:
    """Show a model's architecture and the size of its KV cache in each format. Downloads the model if needed."""
    name = choose_model(model)
    from lean.report import model_report

    report = model_report(name, trust_remote_code)
    if json:
        print_json(report)
    else:
        print_model_report(report)


def models_report(models: list["StoredModel"]) -> list[dict[str, Any]]:
    """The objects of ``models --json``."""
    return [
        {
            "name": model.name,
            "origin": model.origin,
            "folder": str(model.folder),
            "bytes": model.nbytes,
            "architecture": model.architecture,
            "model_type": model.model_type,
            "dtype": model.dtype,
            "complete": model.complete,
        }
        for model in models
    ]


def print_models(models: list["StoredModel"]) -> None:
    """Print models as a table on stdout. Without a terminal lines are not wrapped: one line per model."""
    from rich.console import Console
    from rich.table import Table

    from lean.store.installed import printable

    if not models:
        print(f"no models yet: lean pull {next(iter(ARTEFACTS))}")
        return
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 10_000
    table = Table(box=None, pad_edge=False)
    for title in ("name", "architecture", "dtype", "size", "origin", "folder"):
        table.add_column(
            title,
            justify="right" if title == "size" else "left",
            no_wrap=title in ("name", "size"),
            overflow="fold",
        )
    for model in models:
        folder = str(model.folder) + (f" -> {os.readlink(model.folder)}" if model.folder.is_symlink() else "")
        table.add_row(
            printable(model.name),
            printable(model.architecture or model.model_type or "?"),
            printable(model.dtype or "?"),
            mib(model.nbytes),
            model.origin + ("" if model.complete else ", incomplete"),
            printable(folder),
        )
    console.print(table)


def print_model_report(report: dict[str, Any]) -> None:
    """Print the report of `lean.report.model_report` as tables."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    facts = Table(show_header=False, box=None)
    windows = report["windows"]
    sliding = [window for window in windows if window]
    for key, value in report.items():
        if key == "windows":
            value = f"{len(sliding)} of {len(windows)} layers: {sorted(set(sliding))}" if sliding else "none"
        if key == "kv_layers":
            own = len(set(value))
            value = f"{own} of {len(value)} layers have K/V of their own" if own < len(value) else "all"
        if not key.startswith("bytes") and key != "notes":
            facts.add_row(key, f"{value:,}" if isinstance(value, int) else str(value))
    console.print(facts)
    table = Table("KV format", "bytes per token", "vs bf16", "at 4,096 tokens", title="KV cache, all layers")
    for kv_dtype, nbytes in report["bytes_per_token"].items():
        if nbytes is None:
            table.add_row(kv_dtype, "head_dim not divisible by 8", "", "")
        else:
            ratio = report["bytes_per_token"]["bf16"] / nbytes
            table.add_row(kv_dtype, f"{nbytes:,}", f"{ratio:.2f}x", mib(report["bytes_at_4096_tokens"][kv_dtype]))
    console.print(table)
    for note in report["notes"]:
        console.print(f"note: {note}", soft_wrap=True)
