"""transformers models bound to lean: what is accepted, how one is loaded, and how it is called."""

import json
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
import transformers
from transformers.utils import logging as hf_logging

from lean.cache.plan import LayerShape
from lean.errors import ConfigError, ModelError, RequestError, one_line
from lean.model import attention
from lean.quant.codecs import RAW_DTYPES
from lean.quant.weights import WeightUse, check_quantization, quantize_linears
from lean.sampling_params import SamplingParams
from lean.store.checkpoint import check_checkpoint, read_header
from lean.store.gguf import load_gguf_tokenizer
from lean.store.source import ModelSource
from lean.units import ENDLESS

log = logging.getLogger("lean")
T = TypeVar("T")


_LOGIT_ROWS = 64
_LOGITS = 2**22  # most of them at once: 16 MiB in float32


@dataclass(frozen=True)
class ModelInfo:
    """A model before its weights are loaded.

    Attributes:
        config: its text configuration.
        layers: its attention layers, by layer index.
        dtype: of the weights and activations.
        parameters: number of parameters, tied ones counted once.
        notes: lines the user should see.
        quantization: format to load the decoder's linear layers into; None leaves them as they are.
    """

    source: ModelSource
    config: Any
    layers: tuple[LayerShape, ...]
    dtype: torch.dtype
    parameters: int
    trust_remote_code: bool = False
    notes: tuple[str, ...] = ()
    quantization: str | None = None

    @property
    def architecture(self) -> str:
        return (getattr(self.config, "architectures", None) or [self.config.model_type])[0]

    @property
    def max_position_embeddings(self) -> int:
        """Positions the model is made for; dynamic NTK stretches them, ENDLESS stands for no limit."""
        limit = getattr(self.config, "max_position_embeddings", None)
        rope = getattr(self.config, "rope_parameters", None) or {}
        stretch = rope.get("factor", 1) if rope.get("rope_type") == "dynamic" else 1
        return ENDLESS if limit is None else int(limit * stretch)


def _hub_arguments(source: ModelSource) -> dict[str, Any]:
    return {} if source.gguf_file is None else {"gguf_file": source.gguf_file}


def _attempt(what: str, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call a library about the model; what it raises becomes one line."""
    try:
        return call(*args, **kwargs)
    except (ModelError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        raise ModelError(f"{what}: {one_line(error, 300)}") from error


def resolve_dtype(name: str, config: Any, source: ModelSource) -> torch.dtype:
    """``auto`` is the checkpoint's dtype: what config.json says, else that of its tensors; bfloat16 for a GGUF file."""
    if name != "auto":
        return getattr(torch, name)
    dtype = getattr(config, "dtype", None)
    dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is None and source.gguf_file is None:
        file = min(source.folder.glob("*.safetensors"))
        kinds = {entry["dtype"] for entry in read_header(file).values()}
        known = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
        dtype = next((known[kind] for kind in known if kind in kinds), None)
    return dtype if isinstance(dtype, torch.dtype) and dtype in RAW_DTYPES.values() else torch.bfloat16


def refuse_by_config(config: Any, name: str) -> None:
    """Raise ModelError for a kind of model whose attention lean does not compute."""

    def refuse(what: str) -> None:
        raise ModelError(f"{name} ({config.model_type}): {what} not supported by lean")

    if config.is_encoder_decoder:
        refuse("encoder-decoder models are")
    for kind in set(getattr(config, "layer_types", None) or []):
        if kind not in ("full_attention", "sliding_attention"):
            refuse(f"{kind} layers are")
    if getattr(config, "use_bidirectional_attention", False) or getattr(config, "is_causal", True) is False:
        refuse("bidirectional attention is")
    if getattr(config, "attention_chunk_size", None):
        refuse("chunked attention is")
    if getattr(config, "kv_lora_rank", None):
        refuse("multi-head latent attention (MLA) is")
    if getattr(config, "num_kv_shared_layers", 0):
        refuse("layers that share another layer's KV are")
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in [ropes, *(value for value in ropes.values() if isinstance(value, dict))]:
        if rope.get("mrope_section"):
            refuse("multi-dimensional rotary positions (M-RoPE) are")
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        value = getattr(config, cap, None)
        if value is not None and not (isinstance(value, (int, float)) and math.isfinite(value) and value > 0):
            raise ModelError(f"{name}: config.json has {cap} {value}; it must be a finite number above 0, or null")


def _attention_layers(skeleton: torch.nn.Module, config: Any, name: str) -> tuple[LayerShape, ...]:
    """Shapes and windows of the attention modules. Raises ModelError where they cannot be read."""
    if not getattr(type(skeleton), "_supports_attention_backend", False):
        raise ModelError(
            f"{name} ({config.model_type}): transformers has no exchangeable attention for it, lean cannot serve it"
        )
    modules: dict[int, torch.nn.Module] = {}
    for module in skeleton.modules():
        if "Attention" in type(module).__name__ and isinstance(getattr(module, "layer_idx", None), int):
            modules.setdefault(module.layer_idx, module)  # type: ignore[arg-type]
    if sorted(modules) != list(range(config.num_hidden_layers)):
        raise ModelError(
            f"{name} ({config.model_type}): found attention in {len(modules)} of {config.num_hidden_layers} layers; "
            "other layers (linear attention, state space, loops) are not supported by lean"
        )
    shapes = []
    for _, module in sorted(modules.items()):
        if getattr(module, "is_causal", True) is False:
            raise ModelError(f"{name} ({config.model_type}): bidirectional attention is not supported by lean")
        heads = config.num_attention_heads
        kv_heads = heads // int(getattr(module, "num_key_value_groups", 1))
        dim = int(getattr(module, "head_dim", None) or config.hidden_size // heads)
        # The value that the module will pass to its attention function; the first step verifies it.
        window = module.sliding_window if hasattr(module, "sliding_window") else getattr(config, "sliding_window", None)
        v_dim = int(getattr(module, "v_head_dim", None) or dim)
        shapes.append(LayerShape(heads, kv_heads, dim, v_dim, int(window or 0)))  # type: ignore[arg-type]
    return tuple(shapes)


def refuse_quantized(config: Any, quantization: str | None, name: str) -> None:
    """Raise ModelError for weights that bitsandbytes has quantized already, or that would be quantized once more."""
    found = getattr(config, "quantization_config", None) or {}
    found = found if isinstance(found, dict) else found.to_dict()
    method = str(found.get("quant_method") or ("bitsandbytes" if "load_in_4bit" in found else "unknown"))
    if found and (quantization or method.startswith("bitsandbytes")):
        raise ModelError(
            f"{name}: its weights are quantized already (quantization_config in config.json, {one_line(method, 40)}): "
            "pass the checkpoint they were made from, with --quantization where wanted"
        )


def inspect_model(
    source: ModelSource, dtype: str = "auto", trust_remote_code: bool = False, quantization: str | None = None
) -> ModelInfo:
    """Read a model's configuration and shapes without its weights.

    Raises:
        ModelError: damaged files, code without ``trust_remote_code``, or a kind of model that lean refuses.
    """
    if source.gguf_file is None:
        check_checkpoint(source.folder, trust_remote_code=trust_remote_code)
    attention.register()
    full = _attempt(
        f"cannot read the configuration of {source.name}",
        transformers.AutoConfig.from_pretrained,
        source.folder,
        trust_remote_code=trust_remote_code,
        **_hub_arguments(source),
    )
    config = full.get_text_config()
    refuse_by_config(full, source.name)
    refuse_by_config(config, source.name)
    refuse_quantized(full, quantization, source.name)
    if config is not full:
        raise ModelError(f"{source.name} ({full.model_type}): multimodal checkpoints are not supported by lean")
    with torch.device("meta"):
        skeleton = _attempt(
            f"cannot build {source.name}",
            transformers.AutoModelForCausalLM.from_config,
            config,
            attn_implementation=attention.NAME,  # never what config.json asks for
            trust_remote_code=trust_remote_code,
        )
    parameters = sum(p.numel() for p in skeleton.parameters())
    layers = _attention_layers(skeleton, config, source.name)
    chosen = resolve_dtype(dtype, config, source)
    notes = _notes(source, config, chosen)
    info = ModelInfo(source, config, layers, chosen, parameters, trust_remote_code, notes, quantization)
    if info.max_position_embeddings < 1:
        raise ModelError(f"{source.name}: config.json has max_position_embeddings {config.max_position_embeddings}")
    return info


def _notes(source: ModelSource, config: Any, dtype: torch.dtype) -> tuple[str, ...]:
    """What would go wrong without a word."""
    notes = []
    if dtype is torch.float16 and config.model_type.startswith("gemma"):
        notes.append("Gemma's activations can overflow float16: --dtype bfloat16 or float32 is safe")
    rope = getattr(config, "rope_parameters", None) or {}
    if source.gguf_file is None and "rope_theta" in rope:
        raw = json.loads((source.folder / "config.json").read_text(encoding="utf-8"))
        if not any(key in raw for key in ("rope_parameters", "rope_theta", "rope_scaling")):
            notes.append(f"config.json names no rope_theta: transformers' default {rope['rope_theta']:g} is used")
    return tuple(notes)


class _DecoderResult:
    """A decoder's output that holds the last hidden state; whatever else a model's head looks at is None."""

    def __init__(self, last_hidden_state: torch.Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getitem__(self, index: int) -> torch.Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


@dataclass
class LoadedModel:
    """A model with its weights, its tokenizer, and what they say about generation. Holds no cache and no requests."""

    info: ModelInfo
    module: torch.nn.Module
    tokenizer: Any
    eos_token_ids: frozenset[int]
    generation: dict[str, Any] = field(default_factory=dict)
    weights: WeightUse | None = None  # where they are quantized

    def __post_init__(self) -> None:
        self._decoder = self.module.get_decoder()  # type: ignore[operator]
        self._run_decoder: Callable = self._decoder.forward
        self._decoder.forward = self._decoder_or_given

    def _decoder_or_given(self, *args: Any, lean_hidden: torch.Tensor | None = None, **kwargs: Any) -> Any:
        """The decoder's forward. Given its result, it only hands it on: the model's own head then does the rest."""
        if lean_hidden is not None:
            return _DecoderResult(lean_hidden)
        return self._run_decoder(*args, **kwargs)

    def check_weights(self, quantization: str | None, deterministic: bool) -> None:
        """Raise ConfigError where an engine asks for other weights than these."""
        if quantization is not None and quantization != self.info.quantization:
            raise ConfigError(
                f"quantization {quantization} asked for, the loaded model has {self.info.quantization}: load it again"
            )
        if deterministic and self.weights is not None and not self.weights.row_invariant:
            raise ConfigError(
                f"--deterministic cannot hold with the {self.weights.name} weights of the loaded model: leave it out"
            )

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @cached_property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return self.module.get_input_embeddings().weight.shape[0]  # type: ignore[operator]

    @cached_property
    def token_limit(self) -> int:
        """Ids from here on belong to no token; checkpoints pad their vocabulary."""
        return max(self.tokenizer.get_vocab().values()) + 1

    @cached_property
    def logit_rows(self) -> int:
        """Rows of logits that exist at once when many are wanted; fewer where the vocabulary is large."""
        return max(1, min(_LOGIT_ROWS, _LOGITS // self.vocab_size))

    def logit_slices(self, num_rows: int) -> Iterator[slice]:
        """Slices that cover ``num_rows`` rows, each of at most `logit_rows`."""
        step = self.logit_rows
        return (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))

    def hidden(self, input_ids: torch.Tensor, position_ids: torch.Tensor, **batch: Any) -> torch.Tensor:
        """input_ids, position_ids [1, tokens] -> [tokens, hidden_size] after the last norm."""
        out = self._decoder(input_ids=input_ids, position_ids=position_ids, use_cache=False, **batch)
        return out.last_hidden_state[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [rows, hidden_size] -> [rows, vocab], through whatever the model does after its decoder."""
        ids = torch.zeros(1, hidden.shape[0], dtype=torch.long, device=hidden.device)
        return self.module(input_ids=ids, lean_hidden=hidden[None], use_cache=False).logits[0]


def _generation_defaults(source: ModelSource) -> tuple[set[int], dict[str, Any]]:
    """(end-of-sequence ids, sampling defaults) of generation_config.json; chance only where it says do_sample."""
    path = source.folder / "generation_config.json"
    if source.gguf_file is not None or not path.is_file():
        return set(), {}
    raw = _attempt(f"cannot read {path}", json.loads, path.read_text(encoding="utf-8"))
    keys = ["repetition_penalty"]
    if raw.get("do_sample"):
        keys += ["temperature", "top_p", "top_k", "min_p"]
        raw["temperature"] = 1.0 if raw.get("temperature") is None else raw["temperature"]
    defaults = {key: raw[key] for key in keys if raw.get(key) is not None}
    try:
        SamplingParams(**defaults)
    except RequestError as error:
        raise ModelError(f"{path}: {error}") from None
    return _ids(raw.get("eos_token_id"), str(path)), defaults


def _ids(value: Any, where: str) -> set[int]:
    """An end-of-sequence entry: nothing, one id, or a list of them."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(type(token) is not int for token in ids):
        raise ModelError(f"{where}: eos_token_id {value!r} must be a token id or a list of them")
    return set(ids)


def load_tokenizer(source: ModelSource, trust_remote_code: bool = False) -> Any:
    """The model's tokenizer. Raises ModelError."""
    what = f"cannot read the tokenizer of {source.name}"
    if source.gguf_file is not None:
        return _attempt(what, load_gguf_tokenizer, source.folder / source.gguf_file)
    call = transformers.AutoTokenizer.from_pretrained
    return _attempt(what, call, source.folder, trust_remote_code=trust_remote_code)


def _list_names(names: Any) -> str:
    names = sorted(names)
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _from_pretrained_without_bar(*args: Any, **kwargs: Any) -> Any:
    """transformers' own progress bar would break the one line that lean prints."""
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        return transformers.AutoModelForCausalLM.from_pretrained(*args, **kwargs)
    finally:
        if shown:
            hf_logging.enable_progress_bar()


def load_model(info: ModelInfo, device: torch.device, deterministic: bool = False) -> LoadedModel:
    """Load the weights, and quantize them where ``info`` says so.

    Raises:
        ModelError: tensors are missing or have another shape, or none can be quantized.
        ConfigError: the quantization cannot serve here.
    """
    source = info.source
    if info.quantization:
        try:
            check_quantization(info.quantization, info.dtype, device, deterministic)
        except ValueError as error:
            raise ConfigError(str(error)) from None
    tokenizer = load_tokenizer(source, info.trust_remote_code)
    arguments = _hub_arguments(source)
    if source.gguf_file is not None:
        arguments = {"gguf_file": source.gguf_file, "quantization_config": transformers.GgufConfig(dequantize=True)}
    else:
        arguments["use_safetensors"] = True
    if deterministic or info.dtype is torch.float64:
        # One plain product per expert, which row tiles can cut; grouped products take no float64.
        arguments["experts_implementation"] = "eager"
    module, report = _attempt(
        f"cannot load {source.name}",
        _from_pretrained_without_bar,
        source.folder,
        config=info.config,
        dtype=info.dtype,
        attn_implementation=attention.NAME,
        trust_remote_code=info.trust_remote_code,
        ignore_mismatched_sizes=True,  # reported below, with the other faults
        output_loading_info=True,
        **arguments,
    )
    if report["mismatched_keys"]:
        name, found, wanted = sorted(report["mismatched_keys"])[0]
        raise ModelError(
            f"{source.name}: {name} has shape {list(found)}, config.json asks for {list(wanted)} "
            f"({len(report['mismatched_keys'])} tensors differ): the files do not belong together"
        )
    if report["missing_keys"]:
        raise ModelError(f"{source.name}: tensors missing from the checkpoint: {_list_names(report['missing_keys'])}")
    if report["unexpected_keys"]:
        log.warning("%s: tensors not used: %s", source.name, _list_names(report["unexpected_keys"]))
    eos, generation = _generation_defaults(source)
    eos |= _ids(getattr(info.config, "eos_token_id", None), "config.json")
    eos |= _ids(tokenizer.eos_token_id, "the tokenizer")
    module = module.eval().requires_grad_(False)
    weights = None
    if info.quantization:
        decoder = module.get_decoder()
        weights = _attempt(source.name, quantize_linears, module, decoder, info.quantization, device)
    return LoadedModel(info, module.to(device), tokenizer, frozenset(eos), generation, weights)
