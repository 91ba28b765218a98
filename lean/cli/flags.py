"""How commands share flags, and the options that the flags give."""

import functools
import inspect
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from lean.cli.terminal import stderr
from lean.config import DEFAULT_MODEL

if TYPE_CHECKING:
    from lean.kernels.compiling import Compiled
    from lean.llm import LLM
    from lean.options import Options
    from lean.store.source import ModelSource

ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="Model folder, .gguf file, name of a pulled model, or Hugging Face hub id. "
        f"Default: the environment variable LEAN_MODEL, else {DEFAULT_MODEL}.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object on stdout.")]

Command = Callable[..., None]


def option(help: str, default: str = "", *names: str, **more: Any) -> Any:
    """An option whose default is described in words. Its flag is the parameter's name unless ``names`` are given."""
    return typer.Option(*names, help=help, show_default=default or False, **more)


def flag_group(panel: str | None) -> Callable[[Command], Callable[[Command], Command]]:
    """Make a signature a decorator that adds the signature's flags to a command.

    The flags are listed under ``panel`` in --help. A flag that the command defines itself wins. The command reads the
    added flags with `given_options`.
    """

    def read(signature: Command) -> Callable[[Command], Command]:
        shared = inspect.signature(signature).parameters
        for item in shared.values():
            item.annotation.__metadata__[0].rich_help_panel = panel

        def add(command: Command) -> Command:
            own = inspect.signature(command)

            @functools.wraps(command)
            def call(**values: Any) -> None:
                command(**{name: values[name] for name in own.parameters})

            parameters = [*own.parameters.values(), *(p for name, p in shared.items() if name not in own.parameters)]
            call.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
            call.__annotations__ = {item.name: item.annotation for item in parameters}
            return call

        return add

    return read


def given_options(
    context: typer.Context,
    usual: "Callable[[dict[str, Any]], dict[str, Any]] | None" = None,
    also: Collection[str] = (),
) -> "Options":
    """The options of a command: flags win over the file of --config, the file wins over the command's defaults.

    Args:
        usual: makes the command's defaults from what the flags and the file give.
        also: further keys that the file may have; they are not options of the engine.

    Raises:
        ConfigError, RequestError: an impossible value or combination, or a file that cannot be used.
    """
    from lean.options import ENGINE_KEYS, SAMPLING_KEYS, Options

    given = given_flags(context, ("model", *ENGINE_KEYS, *SAMPLING_KEYS))
    file = given_file(context, also)
    for one, other in (("kv_memory", "num_blocks"), ("num_blocks", "kv_memory")):
        if one in given:
            file.pop(other, None)
    return Options.merge(usual({**file, **given}) if usual else {}, file, given)


def given_flags(context: typer.Context, names: Collection[str]) -> dict[str, Any]:
    """The values of those flags that the user gave, on the command line or in a variable of the environment."""
    return {
        name: value
        for name, value in context.params.items()
        if name in names
        and value is not None
        and (source := context.get_parameter_source(name)) is not None
        and source.name != "DEFAULT"
    }


def given_file(context: typer.Context, also: Collection[str] = ()) -> dict[str, Any]:
    """The values of the file of --config; none without one. ``also``: further keys that the file may have."""
    from lean.options import read_yaml

    config: Path | None = context.params["config"]
    return {} if config is None else read_yaml(config, also)


def printed_config(context: typer.Context, options: "Options") -> bool:
    """Print the options if --print-config is given. Returns whether it is: the command then ends."""
    if context.params["print_config"]:
        print(options.to_yaml(), end="")
    return bool(context.params["print_config"])


def choose_model(model: str | None) -> str:
    """MODEL, else LEAN_MODEL, else the demo model. Reports on stderr which default is used."""
    if model:
        return model
    chosen = os.environ.get("LEAN_MODEL")
    stderr.print(f"model: {chosen or DEFAULT_MODEL} ({'LEAN_MODEL' if chosen else 'the default'})")
    return chosen or DEFAULT_MODEL


def start(name: str, source: "ModelSource", options: "Options") -> "LLM":
    """Load a model, and report on stderr how it runs."""
    from lean.llm import LLM
    from lean.report import start_up_line

    with stderr.status(Text(f"loading {name}")) as status:

        def show(kernel: str, compiled: "Compiled") -> None:
            count = compiled.kernels.total()
            if count == 1:
                stderr.print("note: compiling GPU kernels; later starts find them compiled")
            status.update(Text(f"loading {name}: {count} GPU kernels compiled, the last one is {kernel}"))

        llm = LLM(source, options.engine, on_compile=show)
    for note in llm.notes:
        stderr.print(f"note: {note}")
    stderr.print(start_up_line(llm))
    return llm
