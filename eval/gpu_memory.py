"""What a card holds: weights, steps, cache and what stays free, computed without a GPU and without a model's files.

    python -m lean.eval.gpu_memory

The largest steps run on tensors without values, and every tensor that they hold is counted. So the figures are those of
a start on a card, but for what only a card shows: the memory of the driver and of compiled kernels (`DRIVER`, assumed)
and the gaps between allocations (part of the reserve).
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from lean.cache.plan import LayerShape, plan_cache
from lean.cache.size import CacheSize, size_cache
from lean.config import EngineConfig
from lean.device import GPU_SHARE
from lean.engine.deterministic import rows_apart
from lean.engine.working_memory import Working, measure
from lean.errors import ConfigError, run_main
from lean.kernels.call import AttentionCall
from lean.kernels.serving import has_triton
from lean.model import attention
from lean.model.info import ModelInfo
from lean.model.load import LoadedModel
from lean.model.shapes import decoder_of
from lean.options import Options
from lean.quant import raw_format
from lean.quant.weights import quantizable
from lean.store.source import ModelSource
from lean.units import ENDLESS

GIB = 2**30
# Taken by the driver, compiled kernels and the workspaces of libraries before lean counts what is free. An assumption:
# nvidia-smi shows it. A screen on the same card takes more.
DRIVER = 400 * 2**20
TARGET = "cuda", 86
CONFIGS = Path(__file__).resolve().parents[1] / "configs"
_ATTENTION = torch.ops.lean.paged_attention.default


@dataclass(frozen=True)
class Architecture:
    """The fields of a model's config.json that decide its memory, by transformers' names."""

    name: str
    kind: str
    fields: dict[str, int | bool]


LLAMA_3B = Architecture(
    "Llama-3.2-3B", "llama",
    {"vocab_size": 128256, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28,
     "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
     "max_position_embeddings": 131072},
)  # fmt: skip
LLAMA_8B = Architecture(
    "Llama-3.1-8B", "llama",
    {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
     "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072},
)  # fmt: skip
# Card in GiB, model, quantization, and the presets of configs/.
CASES = (
    (8, LLAMA_3B, None, ("consumer-8gb", "streaming")),
    (8, LLAMA_8B, "bnb-4bit", ("consumer-8gb",)),
    (12, LLAMA_3B, None, ("consumer-8gb", "streaming")),
    (12, LLAMA_8B, "bnb-4bit", ("consumer-8gb", "consumer-24gb", "streaming")),
    (24, LLAMA_3B, None, ("accuracy",)),
    (24, LLAMA_8B, None, ("consumer-24gb", "consumer-8gb", "streaming")),
)


@dataclass(frozen=True)
class Share:
    """How a card's memory is shared, in bytes. size: None where the cache does not fit."""

    card: int
    weights: int
    working: Working
    size: CacheSize | None

    @property
    def cache(self) -> int:
        return self.size.nbytes if self.size is not None else 0

    @property
    def left(self) -> int:
        """What stays free beside everything that is counted; below 0 where this does not fit."""
        return self.card - DRIVER - self.weights - self.working.total - self.cache


class Held(TorchDispatchMode):
    """Counts the bytes of all tensors that are made while it is active, as long as something holds them.

    ``paged_attention`` makes those that its kernels on TARGET would.
    """

    def __init__(self, deterministic: bool) -> None:
        super().__init__()
        self.now = self.most = 0
        self._deterministic = deterministic
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _ATTENTION:
            from lean.kernels.triton.parameters import Target
            from lean.kernels.triton.plan_attention import plan_paged_attention

            with self:
                call = AttentionCall(*args)
                return plan_paged_attention(rows_apart(call) if self._deterministic else call, Target(*TARGET))[0]
        out = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(out):
            if storage._cdata not in given:  # no view
                self._count(storage)
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self.now += nbytes
        self.most = max(self.most, self.now)

        def gone() -> None:
            self._seen.discard(key)
            self.now -= nbytes

        weakref.finalize(storage, gone)


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    return (value.untyped_storage() for value in tree_leaves(values) if isinstance(value, torch.Tensor))


def share_card(card: int, model: Architecture, config: EngineConfig) -> Share:
    """How an engine with this configuration shares a card of ``card`` bytes. Raises ConfigError for the options."""
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(AutoConfig.for_model(model.kind, **model.fields), dtype=torch.float32)
    info = _info(model, whole, config)
    weights = info.gpu_bytes(None if config.quantization == "none" else config.quantization)
    working = _working(model, info, config)
    if config.quantization == "bnb-4bit":  # a product of several rows first makes an exact copy of its layer
        copy = max(part.weight.nbytes for part in whole.get_decoder().modules() if isinstance(part, torch.nn.Linear))
        copy = copy // torch.float32.itemsize * info.dtype.itemsize
        working = working._replace(largest=working.largest + copy, recorded=working.recorded + copy)
    plan = plan_cache(info.layers, config, raw_format(info.dtype), info.states)
    free = max(0, card - DRIVER - weights - working.total)
    try:
        size = size_cache(plan, config, info.max_position_embeddings, free, GPU_SHARE)
    except ConfigError:
        size = None
    return Share(card, weights, working, size)


def _info(model: Architecture, whole: Any, config: EngineConfig) -> ModelInfo:
    own, dtype = whole.config, getattr(torch, config.dtype) if config.dtype != "auto" else torch.bfloat16
    layer = LayerShape(own.num_attention_heads, own.num_key_value_heads, own.head_dim, own.head_dim)
    parameters = sum(parameter.numel() for parameter in whole.parameters())
    source = ModelSource(Path(), None, model.name, "path")
    layers = (layer,) * own.num_hidden_layers
    return ModelInfo(source, own, layers, dtype, parameters, quantizable=quantizable(decoder_of(whole)))


def _working(model: Architecture, info: ModelInfo, config: EngineConfig) -> Working:
    """Steps of a model with two layers: no layer leaves anything behind but the hidden states."""
    attention.register()
    narrow = AutoConfig.for_model(model.kind, **model.fields | {"num_hidden_layers": 2})
    narrow._attn_implementation = attention.NAME
    few = replace(info, layers=info.layers[:2])
    plan = plan_cache(few.layers, config, raw_format(info.dtype))

    def peak_of(run: Callable[[], None]) -> int:
        with Held(config.deterministic) as held:
            run()
        return held.most

    with FakeTensorMode(allow_non_fake_inputs=True):
        module = AutoModelForCausalLM.from_config(narrow, dtype=info.dtype).eval().requires_grad_(False)
        loaded = LoadedModel(few, module, None, frozenset())
        return measure(loaded, config, plan, "Triton", config.max_num_seqs, peak_of)


def rows(cases: Iterable[tuple[int, Architecture, str | None, tuple[str, ...]]] = CASES) -> list[tuple[str, ...]]:
    """The table: one row for each case and preset. Sizes are in MiB."""
    found = []
    for card, model, quantization, presets in cases:
        for preset in presets:
            config = replace(Options.from_yaml(CONFIGS / f"{preset}.yaml").engine, quantization=quantization or "none")
            share = share_card(card * GIB, model, config)
            name = model.name + (f", {quantization}" if quantization else "")
            sizes = (share.weights, *share.working, share.cache, share.left)
            found.append((f"{card} GiB", name, preset, *(f"{nbytes / 2**20:,.0f}" for nbytes in sizes), _room(share)))
    return found


def _room(share: Share) -> str:
    size = share.size
    if size is None:
        return "does not fit"
    if size.max_model_len == ENDLESS:
        return "endless"
    return f"{size.num_tokens:,}"


HEADER = (
    "card", "model", "preset", "weights", "largest step", "recorded step", "reserve", "cache", "left",
    "tokens in cache",
)  # fmt: skip


def main() -> None:
    """Print the table as Markdown. Raises ConfigError without Triton, whose launches are planned."""
    if not has_triton():
        raise ConfigError("the GPU kernels are planned with Triton, which is missing: pip install triton")
    for row in (HEADER, ("---",) * len(HEADER), *rows()):
        print(as_line(row))


def as_line(row: tuple[str, ...]) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(row)} |"


if __name__ == "__main__":
    run_main(main)
