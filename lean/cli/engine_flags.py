"""The flags of the engine, its cache and its sampler: one flag per field of EngineConfig and SamplingParams."""

from pathlib import Path
from typing import Annotated

import typer

from lean.cli.flags import Command, flag_group, option
from lean.config import (
    DEFAULT_CHAT_MAX_TOKENS,
    DEFAULT_MAX_TOKENS,
    DEFAULT_STEP_TOKENS,
    KV_DTYPE_HELP,
    LATENT_PREFILL_CHUNK,
    EngineConfig,
)
from lean.kernels.layout import BLOCK_SIZES

_DEFAULT = EngineConfig()
_GENERATION_CONFIG = "from the model's generation_config.json"


@flag_group("Sampling")
def sampling_flags(
    max_tokens: Annotated[
        int,
        option("Maximum number of tokens to generate.", f"{DEFAULT_MAX_TOKENS}; in a chat {DEFAULT_CHAT_MAX_TOKENS}"),
    ] = DEFAULT_MAX_TOKENS,
    temperature: Annotated[
        float | None,
        option("Sampling temperature. 0: always take the most likely token.", f"{_GENERATION_CONFIG}, else 0"),
    ] = None,
    top_p: Annotated[
        float | None,
        option(
            "Sample from the smallest set of tokens whose total probability reaches TOP_P.",
            _GENERATION_CONFIG,
            metavar="TOP_P",
        ),
    ] = None,
    top_k: Annotated[
        int | None, option("Sample from the K most likely tokens; 0: from all tokens.", _GENERATION_CONFIG, metavar="K")
    ] = None,
    min_p: Annotated[
        float | None,
        option(
            "Drop tokens whose probability is below MIN_P times that of the most likely token.",
            _GENERATION_CONFIG,
            metavar="MIN_P",
        ),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        option(
            "Above 1: make tokens that are already in the prompt or the answer less likely.",
            f"{_GENERATION_CONFIG}, else 1",
        ),
    ] = None,
    presence_penalty: Annotated[
        float, typer.Option(help="Subtract this from the logit of each token that is already in the answer.")
    ] = 0.0,
    frequency_penalty: Annotated[
        float, typer.Option(help="Subtract this from a token's logit once for each time it is already in the answer.")
    ] = 0.0,
    seed: Annotated[
        int | None,
        option(
            "Seed of the random numbers; repeats an answer exactly with --deterministic.",
            "random",
        ),
    ] = None,
    n: Annotated[int, typer.Option("--n", help="Number of answers to each prompt.")] = 1,
    stop: Annotated[
        list[str] | None,
        option(
            "Stop when this text is generated, and leave it out of the answer. Can be given several times.",
            metavar="TEXT",
        ),
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Continue after end-of-sequence tokens.")] = False,
    logprobs: Annotated[
        int | None,
        option(
            "With --json: report the log-probability of each token, and of the N most likely tokens in its place.",
            metavar="N",
        ),
    ] = None,
) -> None:
    """A signature only: fields of SamplingParams."""


@flag_group("KV cache")
def _cache_flags(
    kv_dtype: Annotated[str, typer.Option(help=KV_DTYPE_HELP)] = _DEFAULT.kv_dtype,
    kv_layers: Annotated[
        str | None,
        option(
            "KV formats of single layers or ranges of layers, e.g. '0-1:bf16,2-15:k8v4,16-:int4'. "
            "Other layers use --kv-dtype."
        ),
    ] = None,
    kv_skip_layers: Annotated[
        str | None,
        option(
            "Layers whose K and V are not quantized, e.g. 0,1,-1. Negative numbers count from the last layer.",
            metavar="LAYERS",
        ),
    ] = None,
    window: Annotated[
        int | None,
        option("Attend only to the last N tokens and the attention sinks; memory stays constant.", "none", metavar="N"),
    ] = None,
    kv_residual_length: Annotated[
        int | None,
        option("Keep K and V of the last N tokens unquantized.", "64 for quantized formats, else 0", metavar="N"),
    ] = None,
    sinks: Annotated[
        int | None,
        option(
            "Number of initial tokens (attention sinks) that stay visible under --window, and stay unquantized "
            "with --kv-residual-length.",
            "4",
            metavar="N",
        ),
    ] = None,
    max_model_len: Annotated[
        int | None,
        option(
            "Maximum length of prompt and answer together, in tokens.",
            "the model's maximum, less if memory is short, unlimited with --window",
        ),
    ] = None,
    kv_memory: Annotated[
        str | None,
        option(
            "Memory for the KV cache, e.g. 512MiB.",
            "what --max-num-seqs sequences need, at most 90% of what weights and steps leave free on a GPU, or 25% of "
            "free memory on a CPU",
            metavar="SIZE",
        ),
    ] = None,
    block_size: Annotated[
        int, typer.Option(help=f"Number of tokens per cache block: {', '.join(map(str, BLOCK_SIZES))}.")
    ] = _DEFAULT.block_size,
    num_blocks: Annotated[
        int | None, option("Number of cache blocks, in place of --kv-memory.", "computed from --kv-memory")
    ] = None,
) -> None:
    """A signature only: fields of EngineConfig."""


@flag_group("Prefix cache")
def _prefix_flags(
    prefix_cache: Annotated[
        bool,
        typer.Option(
            "--prefix-cache/--no-prefix-cache",
            help="Begin a prompt with the cached K and V of an earlier prompt or answer that begins alike.",
            show_default="on; off where speed or accuracy is measured",
        ),
    ] = _DEFAULT.prefix_cache,
    prefix_tail_memory: Annotated[
        str | None,
        option(
            "Part of the KV memory that keeps the ends of prefixes where layers have a window or a residual, e.g. "
            "64MiB. Without it fewer prefixes are found again.",
            "1/8 of the KV memory, at most 64 ends, and no more than the longest sequence leaves; none for one prompt",
            metavar="SIZE",
        ),
    ] = None,
    prefix_cache_dir: Annotated[
        str | None,
        option(
            "Keep the prefix cache in this folder, too: it is found again after a restart, and by other processes.",
            "none",
            metavar="DIR",
        ),
    ] = None,
    prefix_cache_size: Annotated[
        str | None, option("Largest size of the files in --prefix-cache-dir, e.g. 20GiB.", "10GiB", metavar="SIZE")
    ] = None,
) -> None:
    """A signature only: fields of EngineConfig."""


@flag_group("Engine")
def _device_flags(
    prefill_chunk: Annotated[
        int | None,
        option(
            "Maximum number of prompt tokens of one sequence per step.",
            f"{DEFAULT_STEP_TOKENS}; of latent attention (MLA) on a CPU {LATENT_PREFILL_CHUNK}",
        ),
    ] = None,
    max_num_seqs: Annotated[
        int,
        option(
            "Maximum number of sequences that run at the same time.",
            f"{_DEFAULT.max_num_seqs}; for one prompt the number of answers",
        ),
    ] = _DEFAULT.max_num_seqs,
    max_num_batched_tokens: Annotated[
        int | None,
        option(
            "Maximum number of tokens of all sequences together per step.",
            "512, or --prefill-chunk or --max-num-seqs if that is larger",
        ),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            help="Data type of weights and activations: auto (as stored in the model; float16 in place of bfloat16 on "
            "GPUs before Ampere), bfloat16, float16, float32 or float64."
        ),
    ] = _DEFAULT.dtype,
    quantization: Annotated[
        str | None,
        option(
            "Weights: none (unquantized), auto (those of a GGUF file and of a quantized checkpoint in their 4 and 8 "
            "bits, on a CPU in bfloat16), int4 or int8 (quantized at load, on a CPU), bnb-4bit, or bnb-8bit (GPU).",
            "auto for GPTQ, AWQ and compressed-tensors, else none",
            metavar="FORMAT",
        ),
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            help="Device to run on: auto (the first GPU that torch supports, else the CPU), cpu, cuda, cuda:1, ..."
        ),
    ] = _DEFAULT.device,
    threads: Annotated[int | None, option("Number of CPU threads.", "torch's, at most the CPU quota")] = None,
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic",
            help="Make answers independent, to the last bit, of --prefill-chunk and of "
            "other sequences in the batch. Slower.",
        ),
    ] = False,
    compile: Annotated[
        bool,
        typer.Option(
            "--compile",
            help="Compile decode steps with torch.compile for faster tokens. On a CPU the first steps run uncompiled "
            "meanwhile.",
        ),
    ] = False,
    enforce_eager: Annotated[
        bool, typer.Option("--enforce-eager", help="Do not use CUDA graphs: slower on a GPU, but needs less memory.")
    ] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Allow Python code that comes with the model to run.")
    ] = False,
) -> None:
    """A signature only: fields of EngineConfig."""


@flag_group(None)
def _file_flags(
    config: Annotated[
        Path | None,
        option("YAML file of options. Flags on the command line take precedence.", metavar="YAML"),
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print all options and their values as YAML, and exit.")
    ] = False,
) -> None:
    """A signature only: where options are read from."""


def engine_flags(command: Command) -> Command:
    """Add the flags of an engine and its cache to a command, and --config and --print-config."""
    return _file_flags(_device_flags(_prefix_flags(_cache_flags(command))))
