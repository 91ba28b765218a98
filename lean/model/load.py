"""transformers models bound to lean: how one is loaded, and how it is called."""

import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any

import torch
import transformers

from lean.errors import ConfigError, ModelError, shown
from lean.model import attention, experts, latent
from lean.model.carrier import Carrier, as_cache
from lean.model.generation import generation_defaults
from lean.model.info import ModelInfo
from lean.model.layer_calls import hand_over
from lean.model.mixers import PackedStates, hand_over_by_group
from lean.model.packages import require_for_weights
from lean.model.packing import Stored, pack
from lean.model.shapes import decoder_of
from lean.model.tokenizer import read_tokenizer
from lean.quant.packed_experts import PackedExperts
from lean.quant.weight_use import WeightUse
from lean.quant.weights import check_quantization, quantize_linears
from lean.store.gguf.file import GgufFile, read_gguf
from lean.store.gguf.tokenizer import load_gguf_tokenizer
from lean.store.gguf.weights import GgufModel, load_weights, read_model
from lean.store.library import attempt
from lean.store.source import ModelSource

log = logging.getLogger("lean")

_LOGIT_ROWS = 64  # most rows of logits at once
_LOGITS = 2**22  # most logits at once: 16 MiB in float32


class _DecoderResult:
    """A decoder's output that holds the last hidden state. Every other attribute is None."""

    def __init__(self, last_hidden_state: torch.Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getitem__(self, index: int) -> torch.Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


@dataclass
class LoadedModel:
    """A model with its weights, its tokenizer and its defaults for generation. Holds no cache and no requests."""

    info: ModelInfo
    module: torch.nn.Module
    tokenizer: Any
    eos_token_ids: frozenset[int]
    generation: dict[str, Any] = field(default_factory=dict)
    weights: WeightUse | None = None  # where they are quantized

    def __post_init__(self) -> None:
        for number, name in enumerate(self.info.attention_modules):
            self.module.get_submodule(name).layer_idx = number  # type: ignore[assignment]
        for name in self.info.mixers:
            hand_over_by_group(self.module.get_submodule(name))
        self._decoder = decoder_of(self.module)
        parts = [
            [self.module.get_submodule(name) for name in names]
            for names in (self.info.attention_modules, self.info.mixers)
        ]
        hand_over(self._decoder, *parts)
        self._run_decoder: Callable = self._decoder.forward
        self._decoder.forward = self._decoder_or_given

    def _decoder_or_given(self, *args: Any, lean_hidden: torch.Tensor | None = None, **kwargs: Any) -> Any:
        """The decoder's forward. Given ``lean_hidden``, it returns that, so that only the model's own head runs."""
        if lean_hidden is not None:
            return _DecoderResult(lean_hidden)
        return self._run_decoder(*args, **kwargs)

    def check_weights(self, quantization: str | None, deterministic: bool, compiled: bool = False) -> None:
        """Raise ConfigError where an engine needs other weights than these."""
        if quantization not in (None, "auto", "none", self.info.quantization):
            raise ConfigError(
                f"quantization {quantization} does not match the loaded model, which has {self.info.quantization}: "
                "load the model again"
            )
        if deterministic and self.weights is not None and not self.weights.row_invariant:
            raise ConfigError(
                f"--deterministic is not possible with the {self.weights.name} weights of the loaded model: remove it, "
                "or load the model with it"
            )
        if compiled and any(isinstance(part, PackedExperts) for part in self.module.modules()):
            raise ConfigError(
                "--compile is not possible with the packed experts of the loaded model: remove it, or load the model "
                "with it"
            )

    @property
    def device(self) -> torch.device:
        return next(chain(self.module.parameters(), self.module.buffers())).device  # packed weights are buffers

    @cached_property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return self.module.get_input_embeddings().num_embeddings  # type: ignore[operator]

    @cached_property
    def token_limit(self) -> int:
        """One above the largest token id; the embedding may have more rows, as padding."""
        return max(self.tokenizer.get_vocab().values()) + 1

    @cached_property
    def logit_rows(self) -> int:
        """Most rows of logits to compute at once; fewer for a large vocabulary."""
        return max(1, min(_LOGIT_ROWS, _LOGITS // self.vocab_size))

    def logit_slices(self, num_rows: int) -> Iterator[slice]:
        """Slices that cover ``num_rows`` rows, each of at most `logit_rows`."""
        step = self.logit_rows
        return (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))

    def hidden(self, input_ids: torch.Tensor, position_ids: torch.Tensor, **batch: Any) -> torch.Tensor:
        """input_ids, position_ids [1, tokens] -> [tokens, hidden_size] after the last norm.

        ``batch``: arguments of `lean.model.attention.lean_attention`.
        """
        if self.info.carried:
            states = batch["kv_cache"].states
            carrier = Carrier(batch)
            if states is not None:
                carrier = PackedStates(batch, states, batch["attention_batch"].states)
            batch = as_cache(self._decoder, carrier)
        out = self._decoder(input_ids=input_ids, position_ids=position_ids, use_cache=False, **batch)
        return out.last_hidden_state[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [rows, hidden_size] -> [rows, vocab], through all that the model does after its decoder."""
        ids = torch.zeros(1, hidden.shape[0], dtype=torch.long, device=hidden.device)
        return self.module(input_ids=ids, lean_hidden=hidden[None], use_cache=False).logits[0]


def end_ids(value: Any, where: str, vocab_size: int) -> set[int]:
    """The ids of an end-of-sequence entry, which is null, one id or a list of ids.

    An id that no row of the embedding has can never be drawn: it is left out, with a warning that names it.

    Raises ModelError for an entry of another kind.
    """
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(type(token) is not int for token in ids):
        raise ModelError(f"{where}: eos_token_id {shown(value, 60)} must be a token id or a list of token ids")
    known = {token for token in ids if 0 <= token < vocab_size}
    if others := sorted(set(ids) - known):
        log.warning(
            "%s: eos_token_id %s is no token of this model, which has ids 0 to %d: ignored",
            where,
            shown(others[0] if len(others) == 1 else others, 60),
            vocab_size - 1,
        )
    return known


def load_tokenizer(
    source: ModelSource, trust_remote_code: bool = False, gguf: GgufFile | None = None
) -> tuple[Any, Any]:
    """(the model's tokenizer, its end-of-sequence entry: see `end_ids`). Raises ModelError.

    ``gguf``: the source's file, where it is read already.
    """
    if source.gguf_file is not None:
        gguf = gguf or read_gguf(source.folder / source.gguf_file)
        tokenizer, found = attempt(f"cannot read the tokenizer of {source.name}", load_gguf_tokenizer, gguf)
        ends = sorted(found)
    else:
        tokenizer = read_tokenizer(source, trust_remote_code)
        ends = tokenizer.eos_token_id
    tokenizer.model_max_length = sys.maxsize  # the engine knows the longest prompt; the tokenizer need not warn
    tokenizer.name_or_path = source.name  # for errors about its chat template
    return tokenizer, ends


def _list_names(names: Any) -> str:
    names = sorted(names)
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _follow_tie(module: torch.nn.Module, config: Any, name: str) -> None:
    """Make the embedding the head where config.json ties them.

    transformers keeps a head of the file that differs from the embedding. Equal ones are tied already.
    """
    if not getattr(config, "tie_word_embeddings", False):
        return
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()  # type: ignore[operator]
    if head is None or head.weight is embedding.weight or head.weight.shape != embedding.weight.shape:
        return
    key = next(key for key, parameter in module.named_parameters() if parameter is head.weight)
    if key not in (getattr(module, "_tied_weights_keys", None) or ()):  # a class that never ties
        return
    head.weight = embedding.weight
    log.warning(
        "%s: config.json sets tie_word_embeddings, so the embedding is the head; %s of the files differs from it and "
        "is not used (set tie_word_embeddings to false to use it)",
        name,
        key,
    )


def _read_module(info: ModelInfo, stored: Stored | None, device: torch.device, deterministic: bool) -> Any:
    """transformers' module with the weights of the checkpoint or of the GGUF file.

    ``stored``: what these hold, where they may be quantized.

    Raises ModelError where tensors are missing or do not fit.
    """
    source = info.source
    arguments: dict[str, Any] = {"attn_implementation": attention.NAME}
    if (products := experts.implementation(info.config, device, info.dtype, deterministic)) is not None:
        arguments["experts_implementation"] = products
    what = f"cannot load {source.name}"
    later = info.packing.left_out if info.packing is not None else ()
    if isinstance(stored, GgufModel):
        return attempt(what, load_weights, stored, info.config, info.dtype, later, **arguments)
    arguments |= {"config": info.config, "dtype": info.dtype}
    arguments |= {"ignore_mismatched_sizes": True, "output_loading_info": True}  # reported below, with other faults
    if stored is not None:
        module, report = attempt(what, stored.load, later, **arguments)
    else:
        if info.key_mapping:
            arguments["key_mapping"] = dict(info.key_mapping)
        loader: Callable[..., Any] = transformers.AutoModelForCausalLM.from_pretrained
        arguments |= {"trust_remote_code": info.trust_remote_code, "use_safetensors": True}
        module, report = attempt(what, loader, source.folder, **arguments)
    if report["mismatched_keys"]:
        name, found, wanted = sorted(report["mismatched_keys"])[0]
        raise ModelError(
            f"{source.name}: {name} has shape {list(found)}, config.json asks for {list(wanted)} "
            f"({len(report['mismatched_keys'])} tensors differ): the files do not belong together"
        )
    if report["missing_keys"]:
        raise ModelError(f"{source.name}: tensors missing from the checkpoint: {_list_names(report['missing_keys'])}")
    if report["unexpected_keys"] and not info.key_mapping:  # a multimodal checkpoint has tensors for images and audio
        log.warning("%s: tensors not used: %s", source.name, _list_names(report["unexpected_keys"]))
    _follow_tie(module, info.config, source.name)
    return module


def load_model(info: ModelInfo, device: torch.device, deterministic: bool = False) -> LoadedModel:
    """Load the weights, and quantize them where ``info`` says so.

    Raises:
        ModelError: tensors are missing or have another shape, or none can be quantized.
        ConfigError: the quantization does not work with this dtype, this device or ``deterministic``.
    """
    source = info.source
    require_for_weights(info.config, source.name)
    if info.quantization and info.packing is None:
        try:
            check_quantization(info.quantization, info.dtype, device, deterministic)
        except ValueError as error:
            raise ConfigError(str(error)) from None
    stored = info.stored
    if stored is None and source.gguf_file is not None:  # the model was loaded before
        stored = read_model(read_gguf(source.folder / source.gguf_file), info.config)
    file = stored.file if isinstance(stored, GgufModel) else None
    tokenizer, ends = load_tokenizer(source, info.trust_remote_code, file)
    listed, generation = generation_defaults(source, file)
    module = _read_module(info, stored, device, deterministic)
    rows = module.get_input_embeddings().num_embeddings
    eos = end_ids(listed, f"{source.name}: generation_config.json", rows)
    eos |= end_ids(getattr(info.config, "eos_token_id", None), f"{source.name}: config.json", rows)
    eos |= end_ids(ends, f"{source.name}: the tokenizer", rows)
    if tokenizer.bos_token_id is not None and not 0 <= tokenizer.bos_token_id < rows:
        log.warning(
            "%s: the tokenizer's bos_token %s has id %d, but the model has ids 0 to %d: prompts that begin with it "
            "are refused",
            source.name,
            shown(tokenizer.bos_token, 40),
            tokenizer.bos_token_id,
            rows - 1,
        )
    module = module.eval().requires_grad_(False)
    if info.is_latent and not latent.install(module, head_by_head=deterministic):
        raise ModelError(f"{source.name}: its modules of latent attention are not those of its configuration")
    weights = None
    if info.packing is not None:
        weights = attempt(source.name, pack, module, info.packing, deterministic)
    elif info.quantization:
        weights = attempt(source.name, quantize_linears, module, decoder_of(module), info.quantization, device)
    info = replace(info, stored=None if file is not None else info.stored, packing=None)
    return LoadedModel(info, module.to(device), tokenizer, frozenset(eos), generation, weights)
