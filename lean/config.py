"""EngineConfig: the options of the engine, and their defaults."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from lean.errors import ConfigError, shown
from lean.kernels.layout import BLOCK_SIZES
from lean.layer_formats import check_spelling
from lean.quant.formats import NAMES
from lean.units import MOST_BYTES

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_RESIDUAL_LENGTH = 64
DEFAULT_SINKS = 4
DEFAULT_MAX_TOKENS = 256
DEFAULT_CHAT_MAX_TOKENS = 1024
DEFAULT_STEP_TOKENS = 512
DEFAULT_PREFIX_CACHE_SIZE = 10 * 2**30  # bytes on disk
LATENT_PREFILL_CHUNK = 2048  # expanding the vectors in the cache for every chunk (`lean.model.expansion`) costs less
QUANTIZATIONS = ("auto", "none", "int4", "int8", "bnb-4bit", "bnb-8bit")
DTYPES = ("auto", "bfloat16", "float16", "float32", "float64")

_MOST = 2**31 - 1  # tokens, sequences and blocks are counted in 32 bits where kernels count them
_RANGES = {  # least and most of every option that is a number; block_size is one of a list
    "window": (1, _MOST),
    "kv_residual_length": (0, _MOST),
    "sinks": (0, _MOST),
    "num_blocks": (1, _MOST),
    "kv_memory": (1, MOST_BYTES),
    "prefix_tail_memory": (0, MOST_BYTES),
    "prefix_cache_size": (1, MOST_BYTES),
    "max_model_len": (1, _MOST),
    "prefill_chunk": (1, _MOST),
    "max_num_seqs": (1, _MOST),
    "max_num_batched_tokens": (1, _MOST),
    "threads": (1, 1024),
}


def _is_of(value: object, annotation: str) -> bool:
    """Whether a value has the type a field is annotated with, e.g. ``int | None``."""
    kind = "None" if value is None else type(value).__name__
    return kind in annotation.split(" | ")


@dataclass(frozen=True)
class EngineConfig:
    """Options of one engine. None: the engine derives the value from the model and the machine.

    Attributes:
        kv_dtype: format of the KV cache: a name of ``lean.quant.NAMES``, ``k=NAME,v=NAME``, or ``auto``, the model's
            dtype.
        kv_layers: formats of single layers and ranges of layers, e.g. ``0-1:bf16,2-15:k8v4,16-:int4``. Other layers
            have kv_dtype.
        kv_skip_layers: layers whose K and V stay in the model's dtype, e.g. ``0,1,-1``. Negative numbers count from the
            end.
        window: full-attention layers attend only to the last ``window`` tokens and the sinks; memory is constant.
            Layers that have a window in the model keep it.
        kv_residual_length: number of last tokens whose K and V are read unquantized; None: 64 for quantized formats. 0
            turns it off.
        sinks: number of first tokens that stay visible under a window, and are read unquantized if there is a residual;
            None: 4.
        block_size: tokens per block.
        num_blocks: usable blocks of each unbounded pool.
        kv_memory: bytes for all pools together.
        prefix_cache: begin a request with the K and V of an earlier one where the prompts begin alike. Gives the same
            bits as computing them where ``deterministic`` is set.
        prefix_tail_memory: bytes, within those of the cache, for the ends of prefixes in pools with a window
            (`lean.cache.prefix`); None: 1/8 of the cache, at most 64 of them.
        prefix_cache_dir: a folder that keeps the prefix cache on disk, across restarts and for other processes.
        prefix_cache_size: most bytes of its files; None: 10 GiB.
        max_model_len: longest sequence, prompt and answer together; None: the model's maximum, unlimited under a
            window.
        prefill_chunk: most prompt tokens of one sequence in one step; None: 512, or 2,048 where latent attention (MLA)
            expands the vectors in the cache for every chunk.
        max_num_seqs: most sequences that run at once.
        max_num_batched_tokens: most tokens of all sequences in one step; None: 512, or prefill_chunk or max_num_seqs if
            larger.
        dtype: dtype of weights and activations; ``auto`` is the checkpoint's, or what the GPU is fast in
            (`lean.model.dtype`).
        quantization: of the weights. ``none``: all in ``dtype``; ``auto`` keeps the 4 or 8 bits of a GGUF file and of
            a checkpoint that GPTQ, AWQ or compressed-tensors quantized, on a CPU in bfloat16, and leaves other weights
            as they are; None: ``auto`` for such a checkpoint, else ``none``; ``int4`` and ``int8`` quantize any
            checkpoint at load, on a CPU (`lean.model.packing`); ``bnb-4bit`` (NF4) or ``bnb-8bit`` (int8, on a GPU):
            bitsandbytes quantizes the decoder's linear layers.
        device: ``auto`` is the first GPU that torch has code for, else the CPU.
        threads: CPU threads of this process; None: torch's choice, at most the CPU quota (`lean.threads`).
        deterministic: compute linear layers and expert products in fixed row tiles, so that neither the chunk size nor
            other sequences in the batch change a bit.
        compile: torch.compile the decoder's layers for decode steps. On Linux CPUs another process does it, and
            steps run uncompiled meanwhile; see `LLM.wait_until_compiled`.
        enforce_eager: use no CUDA graphs on a GPU.
        trust_remote_code: let transformers run code from the model's folder.
    """

    kv_dtype: str = "int8"
    kv_layers: str | None = None
    kv_skip_layers: str | None = None
    window: int | None = None
    kv_residual_length: int | None = None
    sinks: int | None = None
    block_size: int = 32
    num_blocks: int | None = None
    kv_memory: int | None = None
    prefix_cache: bool = True
    prefix_tail_memory: int | None = None
    prefix_cache_dir: str | None = None
    prefix_cache_size: int | None = None
    max_model_len: int | None = None
    prefill_chunk: int | None = None
    max_num_seqs: int = 8
    max_num_batched_tokens: int | None = None
    dtype: str = "auto"
    quantization: str | None = None
    device: str = "auto"
    threads: int | None = None
    deterministic: bool = False
    compile: bool = False
    enforce_eager: bool = False
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        def refuse(field: str, why: str) -> None:
            raise ConfigError(f"{field.replace('_', '-')} {shown(getattr(self, field))} {why}")

        for item in fields(self):
            if not _is_of(getattr(self, item.name), str(item.type)):
                refuse(item.name, f"must be of type {item.type}")
        check_spelling(self.kv_dtype, self.kv_layers, self.kv_skip_layers)
        if self.block_size not in BLOCK_SIZES:
            refuse("block_size", f"must be one of {', '.join(map(str, BLOCK_SIZES))}")
        if self.dtype not in DTYPES:
            refuse("dtype", f"must be one of {', '.join(DTYPES)}")
        if self.quantization not in (None, *QUANTIZATIONS):
            refuse("quantization", f"must be one of {', '.join(QUANTIZATIONS)}")
        if self.quantization not in (None, "auto", "none") and self.dtype == "float64":
            refuse("quantization", "cannot be combined with dtype float64: remove one of them")
        for field, (least, most) in _RANGES.items():
            value = getattr(self, field)
            if value is not None and not least <= value <= most:
                refuse(field, f"must be from {least} to {most}")
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max-num-batched-tokens {self.max_num_batched_tokens} is less than max-num-seqs {self.max_num_seqs}: "
                "every running sequence needs a token in every step. Raise the first or lower the second."
            )
        if self.compile and self.deterministic:
            raise ConfigError(
                "--compile cannot be combined with --deterministic: compiled code adds numbers in another order. "
                "Remove one of them."
            )
        if self.num_blocks is not None and self.kv_memory is not None:
            raise ConfigError("num-blocks and kv-memory both set the size of the cache: give one of them")
        if self.prefix_tail_memory and not self.prefix_cache:
            raise ConfigError("prefix-tail-memory has no effect without the prefix cache: remove it")
        if self.prefix_cache_dir is not None and not self.prefix_cache:
            raise ConfigError("prefix-cache-dir has no effect without the prefix cache: remove it")
        if self.prefix_cache_dir == "":
            refuse("prefix_cache_dir", "must name a folder")
        if self.prefix_cache_size is not None and self.prefix_cache_dir is None:
            raise ConfigError("prefix-cache-size has no effect without prefix-cache-dir: give that, or remove it")

    @property
    def step_tokens(self) -> int:
        """Most tokens of all sequences in one step."""
        return self.max_num_batched_tokens or max(DEFAULT_STEP_TOKENS, self.chunk_tokens, self.max_num_seqs)

    @property
    def chunk_tokens(self) -> int:
        """Most prompt tokens of one sequence in one step."""
        return self.prefill_chunk or DEFAULT_STEP_TOKENS

    def exact(self) -> EngineConfig:
        """The same options with the KV cache in the model's dtype. A window stays."""
        sinks = self.sinks if self.window else None
        return replace(self, kv_dtype="auto", kv_layers=None, kv_skip_layers=None, kv_residual_length=None, sinks=sinks)

    def without_residual(self, least: int = 0) -> EngineConfig:
        """The same options without a residual: quantized keys and values are read from quantized blocks only.

        ``least``: tokens of the residual that the KV format cannot do without.
        """
        sinks = self.sinks if self.window else 0 if least else None
        return replace(self, kv_residual_length=least, sinks=sinks)

    def residual(self, quantized: bool) -> tuple[int, int]:
        """(residual length, sinks) of a cache. ``quantized``: whether any layer is quantized. Raises ConfigError."""
        if self.kv_residual_length and not quantized:
            raise ConfigError(
                f"kv-residual-length {self.kv_residual_length} has no effect: no layer is quantized "
                f"(kv-dtype {self.kv_dtype}). Remove it or choose a quantized format."
            )
        length = DEFAULT_RESIDUAL_LENGTH if self.kv_residual_length is None else self.kv_residual_length
        length = length if quantized else 0
        if self.sinks and not length and not self.window:
            raise ConfigError(
                f"sinks {self.sinks} has no effect: it needs --window, or --kv-residual-length with a quantized "
                "format. Remove it or give one of them."
            )
        sinks = DEFAULT_SINKS if self.sinks is None else self.sinks
        return length, sinks if length or self.window else 0


KV_DTYPE_HELP = (
    f"KV cache format: {', '.join(NAMES)} (int8, int6 or int5 keys, int4 values), auto (the model's dtype), or "
    "k=NAME,v=NAME (different formats for keys and values). int3 to int6 may name a size of groups, as in int4g64. "
    "Keys may also be pc3, pc4 or pc5: 3 to 5 bits with scales by channel, for groups of 32 tokens."
)
