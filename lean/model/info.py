"""A transformers model before its weights are read: its shapes and settings, and which models are refused."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import transformers

from lean.cache.plan import LayerShape
from lean.config import EngineConfig
from lean.errors import ModelError, one_line
from lean.model import attention
from lean.quant.codecs import RAW_DTYPES
from lean.store.checkpoint import check_checkpoint, read_header
from lean.store.source import ModelSource
from lean.units import ENDLESS

T = TypeVar("T")


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


def attempt(what: str, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call a library's function. Its error becomes a ModelError of one line that begins with ``what``."""
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
            f"{name} ({config.model_type}): its transformers class does not support custom attention "
            "functions, so lean cannot run it"
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
    """Raise ModelError for weights quantized by bitsandbytes, or quantized weights that would be quantized again."""
    found = getattr(config, "quantization_config", None) or {}
    found = found if isinstance(found, dict) else found.to_dict()
    method = str(found.get("quant_method") or ("bitsandbytes" if "load_in_4bit" in found else "unknown"))
    if found and (quantization or method.startswith("bitsandbytes")):
        raise ModelError(
            f"{name}: its weights are quantized already (quantization_config in config.json, {one_line(method, 40)}): "
            "pass the unquantized checkpoint; add --quantization to quantize it"
        )


def inspect_model(source: ModelSource, config: EngineConfig) -> ModelInfo:
    """Read a model's configuration and shapes without its weights.

    Args:
        config: gives the dtype and the quantization, and says whether code in the model's folder is trusted.

    Raises:
        ModelError: damaged files, code that is not trusted, or a kind of model that lean refuses.
    """
    trusted = config.trust_remote_code
    if source.gguf_file is None:
        check_checkpoint(source.folder, trust_remote_code=trusted)
    attention.register()
    full = attempt(
        f"cannot read the configuration of {source.name}",
        transformers.AutoConfig.from_pretrained,
        source.folder,
        trust_remote_code=trusted,
        **({} if source.gguf_file is None else {"gguf_file": source.gguf_file}),
    )
    text = full.get_text_config()
    refuse_by_config(full, source.name)
    refuse_by_config(text, source.name)
    refuse_quantized(full, config.quantization, source.name)
    if text is not full:
        raise ModelError(f"{source.name} ({full.model_type}): multimodal checkpoints are not supported by lean")
    with torch.device("meta"):
        skeleton = attempt(
            f"cannot build {source.name}",
            transformers.AutoModelForCausalLM.from_config,
            text,
            attn_implementation=attention.NAME,  # never what config.json asks for
            trust_remote_code=trusted,
        )
    parameters = sum(p.numel() for p in skeleton.parameters())
    layers = _attention_layers(skeleton, text, source.name)
    dtype = resolve_dtype(config.dtype, text, source)
    notes = _notes(source, text, dtype)
    info = ModelInfo(source, text, layers, dtype, parameters, trusted, notes, config.quantization)
    if info.max_position_embeddings < 1:
        raise ModelError(f"{source.name}: config.json has max_position_embeddings {text.max_position_embeddings}")
    return info


def _notes(source: ModelSource, config: Any, dtype: torch.dtype) -> tuple[str, ...]:
    """Warnings about settings that would silently give wrong answers."""
    notes = []
    if dtype is torch.float16 and config.model_type.startswith("gemma"):
        notes.append("Gemma's activations can overflow float16: --dtype bfloat16 or float32 is safe")
    rope = getattr(config, "rope_parameters", None) or {}
    if source.gguf_file is None and "rope_theta" in rope:
        raw = json.loads((source.folder / "config.json").read_text(encoding="utf-8"))
        if not any(key in raw for key in ("rope_parameters", "rope_theta", "rope_scaling")):
            notes.append(f"config.json names no rope_theta: transformers' default {rope['rope_theta']:g} is used")
    return tuple(notes)
