"""The engine's flags, once, for every command that runs an engine; and which of them were given."""

import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from lean.cli.terminal import stderr
from lean.config import DEFAULT_MODEL, KV_DTYPE_HELP, EngineConfig

if TYPE_CHECKING:
    from lean.llm import LLM
    from lean.options import Options
    from lean.store.source import ModelSource

_DEFAULT = EngineConfig()

ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help=f"Folder, .gguf file, pulled name or hub id; LEAN_MODEL, else {DEFAULT_MODEL}.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print exactly one JSON object on stdout.")]


def option(help: str, default: str = "", *names: str, **more: Any) -> Any:
    """An option whose default is said in words; its name is the parameter's where no ``names`` are given."""
    return typer.Option(*names, help=help, show_default=default or False, **more)


def _engine_flags(
    config: Annotated[Path | None, option("Options from a file; flags win.", metavar="YAML")] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the options in force as YAML, and run nothing.")
    ] = False,
    kv_dtype: Annotated[str, typer.Option(help=KV_DTYPE_HELP)] = _DEFAULT.kv_dtype,
    kv_layers: Annotated[
        str | None, option("Formats of single layers, e.g. '0-1:bf16,2-15:k8v4,16-:int4'; the others: --kv-dtype.")
    ] = None,
    kv_skip_layers: Annotated[
        str | None, option("Layers that stay unquantized, e.g. 0,1,-1.", metavar="LAYERS")
    ] = None,
    window: Annotated[
        int | None, option("See only the last so many tokens and the sinks: constant memory, any length.", "none")
    ] = None,
    kv_residual_length: Annotated[
        int | None, option("Read the last so many tokens exact.", "64 for quantized formats, else 0")
    ] = None,
    sinks: Annotated[
        int | None,
        option("The first so many tokens stay visible for ever under a window, and exact with a residual.", "4"),
    ] = None,
    max_model_len: Annotated[
        int | None, option("Longest prompt and answer together, in tokens.", "the model's, or what fits")
    ] = None,
    kv_memory: Annotated[
        str | None,
        option(
            "Memory of the KV cache, e.g. 512MiB.",
            "90% of free GPU memory; on a CPU what the sequences can need, at most 1/4 of what is free",
            metavar="SIZE",
        ),
    ] = None,
    block_size: Annotated[int, typer.Option(help="Tokens per cache block.")] = _DEFAULT.block_size,
    num_blocks: Annotated[int | None, option("Cache blocks, instead of --kv-memory.", "from the memory")] = None,
    prefill_chunk: Annotated[
        int, typer.Option(help="Most prompt tokens of a sequence in a step.")
    ] = _DEFAULT.prefill_chunk,
    max_num_seqs: Annotated[
        int, option("Sequences that run at once.", f"{_DEFAULT.max_num_seqs}; one prompt: n")
    ] = _DEFAULT.max_num_seqs,
    max_num_batched_tokens: Annotated[
        int | None, option("Most tokens of all sequences in a step.", "512, or --prefill-chunk")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="auto, bfloat16, float16, float32 or float64: weights and activations.")
    ] = _DEFAULT.dtype,
    quantization: Annotated[
        str | None,
        option(
            "Weights of the linear layers in bnb-4bit or, on a GPU, bnb-8bit (bitsandbytes).", "none", metavar="FORMAT"
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = _DEFAULT.device,
    threads: Annotated[int | None, option("CPU threads.", "torch's choice")] = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="The same bits whatever the chunk or batch; slower.")
    ] = False,
    compile: Annotated[
        bool, typer.Option("--compile", help="torch.compile decode steps: a slow first start, then faster tokens.")
    ] = False,
    enforce_eager: Annotated[
        bool, typer.Option("--enforce-eager", help="On a GPU: no CUDA graphs; slower, less memory.")
    ] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")
    ] = False,
) -> None:
    """A signature only: the fields of EngineConfig as flags, and the file they can be in."""


def engine_flags(command: Callable[..., None]) -> Callable[..., None]:
    """A command with the engine's flags behind its own, which win; it reads them with `given_options`."""
    own, shared = inspect.signature(command), inspect.signature(_engine_flags)

    @functools.wraps(command)
    def call(**values: Any) -> None:
        command(**{name: values[name] for name in own.parameters})

    for item in shared.parameters.values():
        item.annotation.__metadata__[0].rich_help_panel = "Engine and cache"
    parameters = [*own.parameters.values(), *(p for n, p in shared.parameters.items() if n not in own.parameters)]
    call.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {item.name: item.annotation for item in parameters}
    return call


def given_options(
    context: typer.Context, usual: "Callable[[dict[str, Any]], dict[str, Any]] | None" = None
) -> "Options":
    """Flags over the file of --config over what the command takes by default.

    ``usual``: makes the latter from what was given, in a file or as flags.
    """
    from lean.options import ENGINE_KEYS, SAMPLING_KEYS, Options, read_yaml

    given: dict[str, Any] = {
        name: value
        for name, value in context.params.items()
        if name in ("model", *ENGINE_KEYS, *SAMPLING_KEYS)
        and value is not None
        and (source := context.get_parameter_source(name)) is not None
        and source.name != "DEFAULT"
    }
    config: Path | None = context.params["config"]
    file: dict[str, Any] = {} if config is None else read_yaml(config)
    for one, other in (("kv_memory", "num_blocks"), ("num_blocks", "kv_memory")):
        if one in given:
            file.pop(other, None)
    return Options.merge(usual({**file, **given}) if usual else {}, file, given)


def choose_model(model: str | None) -> str:
    """MODEL, else LEAN_MODEL, else the demo model; says which one it took."""
    if model:
        return model
    chosen = os.environ.get("LEAN_MODEL")
    stderr.print(f"model: {chosen or DEFAULT_MODEL} ({'LEAN_MODEL' if chosen else 'the default'})")
    return chosen or DEFAULT_MODEL


def start(name: str, source: "ModelSource", options: "Options") -> "LLM":
    """Load a model, and say what really applies."""
    from lean.llm import LLM
    from lean.report import start_up_line

    compiling = ", and compiling its decode steps" if options.engine.compile else ""
    with stderr.status(Text(f"loading {name}{compiling}")):
        llm = LLM(source, options.engine)
    for note in llm.notes:
        stderr.print(f"note: {note}")
    stderr.print(start_up_line(llm))
    return llm
