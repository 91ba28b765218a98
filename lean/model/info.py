"""A transformers model before its weights are read: its shapes and settings, and which models are refused."""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

import torch
import transformers

from lean.cache.plan import LayerShape
from lean.cache.states import StateShape
from lean.config import EngineConfig
from lean.errors import ModelError, one_line, shown
from lean.model import attention, latent, shapes
from lean.model.dtype import choose_dtype, packable_dtype
from lean.model.packages import lacks_packages, quantization_of, require_known_method
from lean.model.packing import (
    PACKED,
    Packing,
    Stored,
    choose_method,
    may_pack,
    plan_packing,
    why_nothing_is_kept,
)
from lean.model.settings import check_heads, check_rope_types, check_settings, explained
from lean.model.wrappers import renamed, text_keys
from lean.quant.weights import Quantizable, quantizable
from lean.store.checkpoint import CONFIG, check_checkpoint, read_object
from lean.store.gguf.config import transformers_config
from lean.store.gguf.file import GgufFile, read_gguf
from lean.store.gguf.weights import plan_weights, unused_notes
from lean.store.library import ABOUT_CONFIG, attempt, quiet
from lean.store.prequantized.files import TensorFiles
from lean.store.prequantized.plan import plan_quantized, plan_unquantized
from lean.store.prequantized.scheme import METHODS
from lean.store.source import ModelSource
from lean.units import ENDLESS

_CPU = torch.device("cpu")
# Layer types of configurations. What such a layer computes is seen when the forward pass is followed.
_KINDS = {"full_attention", "sliding_attention", "linear_attention", "conv", "hybrid", "mlp", "moe"}
_MULTIMODAL = "{name} ({kind}) is multimodal: lean reads its text model, and no images or audio"
_QUICKLY_BUILT = 256  # layers: whatever the files hold, so that a model of an unsupported kind is refused as such


@dataclass(frozen=True)
class ModelInfo:
    """A model before its weights are loaded.

    Attributes:
        config: its text configuration.
        layers: its attention layers, in their order.
        dtype: of the weights and activations.
        parameters: number of parameters, tied ones counted once.
        notes: lines the user should see.
        quantization: how the weights are quantized, see `lean.model.packing.choose_method`; None leaves them as they
            are.
        quantizable: the weights that bitsandbytes quantizes.
        packing: the weights that torch's packed products multiply, where ``quantization`` is one of `PACKED`.
        key_mapping: regular expressions and what they become in the names of the tensors of a multimodal checkpoint.
        carried: its layers do not hand keyword arguments on, see `lean.model.carrier`.
        attention_modules: names of the modules of ``layers``, where other layers lie between them.
        states, mixers: see `lean.model.shapes.Followed`.
        stored: where the tensors lie in the GGUF file that it was read from, or in a checkpoint whose weights lean
            unpacks itself, until the weights are loaded: a GGUF file's vocabulary takes tens of MiB.
        is_latent: the cache holds its latent vectors, see `lean.model.latent`.
    """

    source: ModelSource
    config: Any
    layers: tuple[LayerShape, ...]
    dtype: torch.dtype
    parameters: int
    trust_remote_code: bool = False
    notes: tuple[str, ...] = ()
    quantization: str | None = None
    quantizable: Quantizable = field(default_factory=Quantizable)
    packing: Packing | None = field(default=None, repr=False, compare=False)
    key_mapping: Mapping[str, str] = field(default_factory=dict)
    carried: bool = False
    attention_modules: tuple[str, ...] = ()
    states: tuple[StateShape, ...] = ()
    mixers: tuple[str, ...] = ()
    stored: Stored | None = field(default=None, repr=False, compare=False)
    is_latent: bool = False

    @property
    def architecture(self) -> str:
        named = getattr(self.config, "architectures", None)
        return named[0] if isinstance(named, list) and named and isinstance(named[0], str) else self.config.model_type

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights when they are loaded; of the files, where these are quantized."""
        if self.packing is not None:
            return self.packing.nbytes
        if getattr(self.config, "quantization_config", None) is not None:
            return sum(size for _, size, _ in self.source.weight_files())
        return self.parameters * self.dtype.itemsize

    def gpu_bytes(self, quantization: str | None) -> int:
        """Bytes of the weights on a GPU, loaded with this quantization."""
        if quantization is None or self.packing is not None:
            return self.weight_bytes
        exact = self.parameters - self.quantizable.weights
        return exact * self.dtype.itemsize + self.quantizable.gpu_bytes(quantization)

    @property
    def max_position_embeddings(self) -> int:
        """Positions the model is made for; dynamic NTK stretches them, ENDLESS stands for no limit."""
        limit = getattr(self.config, "max_position_embeddings", None)
        rope = getattr(self.config, "rope_parameters", None) or {}
        stretch = rope.get("factor", 1) if rope.get("rope_type") == "dynamic" else 1
        return ENDLESS if limit is None else int(limit * stretch)


def refuse_by_config(config: Any, name: str) -> None:
    """Raise ModelError for a kind of model whose attention lean does not compute."""

    def refuse(what: str) -> None:
        raise ModelError(f"{name} ({config.model_type}): {what} not supported by lean")

    if config.is_encoder_decoder:
        refuse("encoder-decoder models are")
    for kind in set(getattr(config, "layer_types", None) or []):
        if kind not in _KINDS:
            refuse(f"{kind} layers are")
    # "vision": between the parts of an image only, and lean reads text.
    bidirectional = getattr(config, "use_bidirectional_attention", False) not in (False, None, "vision")
    if bidirectional or getattr(config, "is_causal", True) is False:
        refuse("bidirectional attention is")
    if getattr(config, "attention_chunk_size", None):
        refuse("chunked attention is")
    if getattr(config, "index_topk", None):
        refuse("sparse attention that chooses its keys (index_topk) is")
    if getattr(config, "attn_temperature_tuning", None):
        # transformers takes positions from the length of its own cache here, not from the position ids.
        refuse("attention whose temperature depends on the position (attn_temperature_tuning) is")
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        value = getattr(config, cap, None)
        if value is not None and not (isinstance(value, (int, float)) and math.isfinite(value) and value > 0):
            raise ModelError(f"{name}: config.json has {cap} {value}; it must be a finite number above 0, or null")


def _check_shapes(skeleton: torch.nn.Module, tensors: Mapping[str, Mapping[str, Any]], name: str) -> None:
    """Raise ModelError where the files hold another model than the configuration describes, before they are read.

    Tensors that transformers renames are only counted. Quantized weights that config.json does not speak of are refused
    too: transformers would take their codes for the weights.
    """
    shapes = [(key, list(parameter.shape)) for key, parameter in skeleton.named_parameters()]
    others = [(key, shape) for key, shape in shapes if key in tensors and tensors[key]["shape"] != shape]
    if others:
        key, shape = others[0]
        raise ModelError(
            f"{name}: {key} has shape {tensors[key]['shape']}, config.json asks for {shape} "
            f"({len(others)} tensors differ): the files do not belong together"
        )
    whole = (key for key, _ in shapes if key in tensors and tensors[key]["dtype"][:1] in ("I", "U"))
    coarse = any(entry["dtype"].startswith("F8") for entry in tensors.values())
    names = {key for key, _ in shapes}
    scales = (key for key in tensors if coarse and "scale" in key.rpartition(".")[2] and key not in names)
    if code := next(chain(whole, scales), None):
        raise ModelError(
            f"{name}: {shown(code, 80)} ({tensors[code]['dtype']}) belongs to quantized weights, but config.json has "
            "no quantization_config: restore it, or pass the unquantized checkpoint"
        )
    described, stored = sum(math.prod(shape) for _, shape in shapes), sum(map(_numel, tensors.values()))
    if described > stored:
        absent = [key for key, _ in shapes if key not in tensors]
        raise ModelError(
            f"{name}: config.json describes {described:,} parameters, but the files hold {stored:,}: "
            f"tensors missing from the checkpoint, {absent[0]} among them"
        )


def _numel(entry: Mapping[str, Any]) -> int:
    return math.prod(entry["shape"])


def refuse_quantized(config: Any, asked: str | None, name: str) -> None:
    """Raise ModelError for weights quantized by bitsandbytes, or quantized weights that would be quantized again.

    Weights that are quantized by a method that transformers does not know are refused too.

    ``asked``: `--quantization`. What lean unpacks itself may stay as it is under int4, and become int8.
    """
    method = quantization_of(config)
    if method is None:
        return
    require_known_method(method, name)
    again = asked not in (None, "auto", "none") and not (method in METHODS and asked in ("int4", "int8"))
    if again or method.startswith("bitsandbytes"):
        raise ModelError(
            f"{name}: its weights are quantized already (quantization_config in config.json, {one_line(method, 40)}): "
            "pass the unquantized checkpoint; add --quantization to quantize it"
        )


def _own_settings(config: Any, device: torch.device) -> Mapping[str, Any] | None:
    """The quantization_config of a checkpoint that lean unpacks itself, which is taken out of ``config``; None else.

    On a GPU whose packages are installed, transformers' own products serve.
    """
    method = quantization_of(config)
    if method not in METHODS or (device.type == "cuda" and not lacks_packages(method)):
        return None
    settings = dict(config.quantization_config)
    del config.quantization_config
    return settings | {"quant_method": method}


class _Description(NamedTuple):
    """What the files of a model say about it: ``raw`` and ``tensors`` of a checkpoint folder, or ``gguf``."""

    config: Any
    raw: Mapping[str, Any] = {}
    tensors: Mapping[str, dict[str, Any]] = {}
    gguf: GgufFile | None = None


def _describe(source: ModelSource, trust_remote_code: bool) -> _Description:
    """Check and read the configuration of a model, and the headers of its weights. Raises ModelError."""
    if source.gguf_file is not None:
        gguf = read_gguf(source.folder / source.gguf_file)
        return _Description(transformers_config(gguf), gguf=gguf)
    tensors = check_checkpoint(source.folder, trust_remote_code=trust_remote_code)
    raw = read_object(source.folder / CONFIG)
    check_settings(raw, source.name)
    with quiet(f"the configuration of {source.name}", ABOUT_CONFIG), explained(raw, source.name):
        full = attempt(
            f"cannot read the configuration of {source.name}",
            transformers.AutoConfig.from_pretrained,
            source.folder,
            trust_remote_code=trust_remote_code,
        )
    return _Description(full, raw, tensors)


def inspect_model(
    source: ModelSource, config: EngineConfig, device: torch.device = _CPU, keep_latent: bool = True
) -> ModelInfo:
    """Read a model's configuration and shapes without its weights.

    Args:
        config: gives the dtype and the quantization, and says whether code in the model's folder is trusted.
        device: where the model will run; it may decide the dtype.
        keep_latent: False: K and V of latent attention are expanded, for comparisons.

    Raises:
        ModelError: damaged files, code that is not trusted, or a kind of model that lean refuses.
    """
    attention.register()
    if source.original is not None and may_pack(config, device):
        source = replace(source, gguf_file=source.original)  # its codes are packed as they are
    full, raw, found, gguf = _describe(source, config.trust_remote_code)
    tensors: Mapping[str, Mapping[str, Any]] = found
    text = full.get_text_config()
    if not isinstance(text, transformers.PreTrainedConfig):
        raise ModelError(f"{source.name} ({full.model_type}): this kind of model has no text_config: remove it")
    refuse_by_config(full, source.name)
    refuse_by_config(text, source.name)
    refuse_quantized(full, config.quantization, source.name)
    key_mapping: Mapping[str, str] = {}
    if text is not full:
        key_mapping = text_keys(full, text, raw, source.name)
        tensors = renamed(tensors, key_mapping)
    check_rope_types(text, source.name)
    _check_number_of_layers(text, tensors, source.name)
    settings = _own_settings(full, device)
    skeleton = _skeleton(text, raw, config.trust_remote_code, source.name)
    stored: Stored | None = None
    if settings is not None:
        files = TensorFiles(tensors)
        stored = plan_quantized(files, settings, settings["quant_method"], skeleton, source.name)
        tensors = stored.described()
    # Quantized products are other modules than those that `latent` replaces.
    is_latent = keep_latent and quantization_of(full) is None and latent.install(skeleton)
    parameters = sum(p.numel() for p in skeleton.parameters())
    dtype, about_dtype = choose_dtype(config.dtype, text, tensors, device)
    if settings is not None and device.type == "cpu" and config.quantization != "none":
        dtype, about_dtype = packable_dtype(config.dtype, dtype, about_dtype)
    followed = shapes.follow(skeleton, text, source.name, dtype)
    if gguf is not None:
        stored = plan_weights(gguf, skeleton)
    elif not getattr(full, "quantization_config", None):
        _check_shapes(skeleton, tensors, source.name)
    notes = [*about_dtype, *_notes(raw, text), *(unused_notes(gguf.tensors) if gguf is not None else ())]
    notes += [_MULTIMODAL.format(name=source.name, kind=full.model_type)] if key_mapping else []
    notes += shapes.notes(followed, text)
    method, packing = choose_method(config, dtype, device, stored), None
    if method in PACKED:
        if stored is None and not key_mapping:
            stored = plan_unquantized(TensorFiles(tensors), skeleton)
        may = {"may_time": not config.deterministic, "may_loop": not config.compile}
        packing = plan_packing(skeleton, method, stored, dtype, source.name, **may)
    elif why := why_nothing_is_kept(config.quantization, source.name, dtype, device, stored):
        notes.append(why)
    notes += _window_note(text, followed.layers, type(skeleton).__name__)
    return ModelInfo(
        source=source,
        config=text,
        layers=followed.layers,
        dtype=dtype,
        parameters=parameters,
        trust_remote_code=config.trust_remote_code,
        notes=tuple(notes),
        quantization=method,
        quantizable=quantizable(shapes.decoder_of(skeleton)),
        packing=packing,
        key_mapping=key_mapping,
        carried=followed.carried,
        attention_modules=followed.modules,
        states=followed.states,
        mixers=followed.mixers,
        stored=stored,
        is_latent=is_latent,
    )


def _skeleton(config: Any, raw: Mapping[str, Any], trust_remote_code: bool, name: str) -> Any:
    """The model without data, whose forward pass can be followed. Raises ModelError where it cannot be built."""
    check_heads(config, name)
    shapes.register()
    try:
        with torch.device("meta"), explained(raw, name):
            model = attempt(
                f"cannot build {name} from its configuration",
                transformers.AutoModelForCausalLM.from_config,
                copy.deepcopy(config),  # transformers notes the implementations in it
                attn_implementation=shapes.NAME,  # never what config.json asks for
                experts_implementation="batched_mm",  # does not depend on data
                trust_remote_code=trust_remote_code,
            )
    except ModelError as error:
        if isinstance(error.__cause__, KeyError) and error.__cause__.args == (shapes.NAME,):
            raise ModelError(f"{name} ({config.model_type}): {shapes.NOT_CUSTOM}: not supported by lean") from None
        raise
    for module in model.modules():
        positions = getattr(module, "position_embeddings", None)
        if isinstance(positions, torch.nn.Embedding) and positions.padding_idx is not None:
            raise ModelError(
                f"{name} ({config.model_type}): positions that begin behind padding are not supported by lean"
            )
    return model.eval()


def _check_number_of_layers(config: Any, tensors: Mapping[str, Any], name: str) -> None:
    """Raise ModelError for more layers than the files can hold, which would take long to build."""
    check_settings({"num_hidden_layers": getattr(config, "num_hidden_layers", None)}, name)
    if getattr(config, "num_hidden_layers", None) is None:
        raise ModelError(f"{name} ({config.model_type}): no num_hidden_layers: not supported by lean")
    if tensors and config.num_hidden_layers > max(_QUICKLY_BUILT, len(tensors)):
        raise ModelError(
            f"{name}: config.json has num_hidden_layers {config.num_hidden_layers}, but the files hold only "
            f"{len(tensors)} tensors: they do not belong together"
        )


def _window_note(config: Any, layers: Sequence[LayerShape], model_class: str) -> list[str]:
    """A line about a window that the model's code does not read."""
    window = getattr(config, "sliding_window", None)
    if window is None or any(layer.window for layer in layers):
        return []
    return [f"config.json has sliding_window {shown(window, 40)}, but {model_class} uses no window: it has no effect"]


def _notes(raw: Mapping[str, Any], config: Any) -> tuple[str, ...]:
    """Warnings about settings that would silently give wrong answers. ``raw``: config.json, empty for a GGUF file."""
    notes = []
    rope = getattr(config, "rope_parameters", None) or {}
    named = any(key in raw for key in ("rope_parameters", "rope_theta", "rope_scaling"))
    if raw and "rope_theta" in rope and not named:
        notes.append(f"config.json names no rope_theta: transformers' default {rope['rope_theta']:g} is used")
    return tuple(notes)
