"""transformers models bound to lean: how one is loaded, and how it is called."""

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import transformers
from transformers.utils import logging as hf_logging

from lean.errors import ConfigError, ModelError, RequestError
from lean.model import attention
from lean.model.info import ModelInfo, attempt
from lean.quant.weights import WeightUse, check_quantization, quantize_linears
from lean.sampling_params import SamplingParams
from lean.store.gguf import load_gguf_tokenizer
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
        self._decoder = self.module.get_decoder()  # type: ignore[operator]
        self._run_decoder: Callable = self._decoder.forward
        self._decoder.forward = self._decoder_or_given

    def _decoder_or_given(self, *args: Any, lean_hidden: torch.Tensor | None = None, **kwargs: Any) -> Any:
        """The decoder's forward. Given ``lean_hidden``, it returns that, so that only the model's own head runs."""
        if lean_hidden is not None:
            return _DecoderResult(lean_hidden)
        return self._run_decoder(*args, **kwargs)

    def check_weights(self, quantization: str | None, deterministic: bool) -> None:
        """Raise ConfigError where an engine needs other weights than these."""
        if quantization is not None and quantization != self.info.quantization:
            raise ConfigError(
                f"quantization {quantization} does not match the loaded model, which has {self.info.quantization}: "
                "load the model again"
            )
        if deterministic and self.weights is not None and not self.weights.row_invariant:
            raise ConfigError(
                f"--deterministic is not possible with the {self.weights.name} weights of the loaded model: remove it"
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
        """input_ids, position_ids [1, tokens] -> [tokens, hidden_size] after the last norm."""
        out = self._decoder(input_ids=input_ids, position_ids=position_ids, use_cache=False, **batch)
        return out.last_hidden_state[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [rows, hidden_size] -> [rows, vocab], through all that the model does after its decoder."""
        ids = torch.zeros(1, hidden.shape[0], dtype=torch.long, device=hidden.device)
        return self.module(input_ids=ids, lean_hidden=hidden[None], use_cache=False).logits[0]


def _generation_defaults(source: ModelSource) -> tuple[set[int], dict[str, Any]]:
    """(end-of-sequence ids, sampling defaults) of generation_config.json; greedy unless it sets do_sample."""
    path = source.folder / "generation_config.json"
    if source.gguf_file is not None or not path.is_file():
        return set(), {}
    raw = attempt(f"cannot read {path}", json.loads, path.read_text(encoding="utf-8"))
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
    """The ids of an end-of-sequence entry, which is null, one id or a list of ids."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(type(token) is not int for token in ids):
        raise ModelError(f"{where}: eos_token_id {value!r} must be a token id or a list of token ids")
    return set(ids)


def load_tokenizer(source: ModelSource, trust_remote_code: bool = False) -> Any:
    """The model's tokenizer. Raises ModelError."""
    what = f"cannot read the tokenizer of {source.name}"
    if source.gguf_file is not None:
        return attempt(what, load_gguf_tokenizer, source.folder / source.gguf_file)
    call = transformers.AutoTokenizer.from_pretrained
    return attempt(what, call, source.folder, trust_remote_code=trust_remote_code)


def _list_names(names: Any) -> str:
    names = sorted(names)
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _from_pretrained_without_bar(*args: Any, **kwargs: Any) -> Any:
    """Without transformers' progress bar, which would break the one line that lean prints."""
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
        ConfigError: the quantization does not work with this dtype, this device or ``deterministic``.
    """
    source = info.source
    if info.quantization:
        try:
            check_quantization(info.quantization, info.dtype, device, deterministic)
        except ValueError as error:
            raise ConfigError(str(error)) from None
    tokenizer = load_tokenizer(source, info.trust_remote_code)
    arguments: dict[str, Any] = {"use_safetensors": True}
    if source.gguf_file is not None:
        arguments = {"gguf_file": source.gguf_file, "quantization_config": transformers.GgufConfig(dequantize=True)}
    if deterministic or info.dtype is torch.float64:
        # One plain product per expert, which can be cut into row tiles. Grouped products do not support float64.
        arguments["experts_implementation"] = "eager"
    module, report = attempt(
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
        weights = attempt(source.name, quantize_linears, module, decoder, info.quantization, device)
    return LoadedModel(info, module.to(device), tokenizer, frozenset(eos), generation, weights)
