"""The start-up check: does this KV format lose more accuracy on this model than on healthy models?

A short text runs through an exact cache and through the chosen format, without a residual, so that every key
and value is read from the quantized blocks; where keys are encoded in groups of tokens, with a residual as long as one
group, which they need. Per layer the attention output of the quantized cache is compared on the
*same* inputs: what a layer's own K/V lose shows there, and not what the layers before it lost. Models with enormous key
biases (Qwen2's first and last layers) fail this while their weights load and their text looks plausible.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from lean.cache.plan import plan_cache
from lean.cache.size import size_cache
from lean.config import EngineConfig
from lean.device import free_bytes
from lean.engine.parts import Parts, bind
from lean.engine.request import Request
from lean.engine.scheduler import Chunk
from lean.errors import LeanError, is_out_of_memory
from lean.kernels.layout import blocks_for
from lean.model.attention import LayerInputs, attend
from lean.quant import CHANNEL_TOKENS, FORMATS, raw_format
from lean.sampling_params import SamplingParams
from lean.store.home import NoHome, cache_dir, write_atomically
from lean.units import mib

if TYPE_CHECKING:
    from lean.llm import LLM

NUM_TOKENS = 288
_VERSION = 3  # of the text, the limits and what is stored
_SEQ_ID = 0
_MOST_NAMED = 6
_FAR = 10.0  # times the median layer


class _Band(NamedTuple):
    """Limits of healthy models without a residual. limit: a layer's error from its keys or its values alone. kld: the
    mean KLD. Errors below ``floor`` are never reported."""

    floor: float
    limit: float
    kld: float


# Those of int3, int5 and int6 are int4's, in proportion to their errors on Gaussian vectors (KLD: to the squares).
_BANDS = {
    "int8": _Band(0.01, 0.2, 0.05),
    "fp8": _Band(0.04, 0.3, 0.25),
    "int3": _Band(0.2, 2.0, 4.0),
    "int4": _Band(0.1, 1.0, 1.0),
    "int5": _Band(0.055, 0.55, 0.3),
    "int6": _Band(0.03, 0.3, 0.08),
}
_BANDS |= {f"pc{bits}": _BANDS[f"int{bits}"] for bits in (3, 4, 5)}  # their errors on Gaussian numbers are about equal

_TEXT = """\
The harbour office keeps two books. The first, bound in green cloth, lists every vessel that has entered since the wall
was rebuilt: its name, its tonnage, the hour of its arrival and the depth of water over the bar. The second is smaller
and is written in pencil. It holds what the pilots thought worth saying: that the eastern light was dim on a Tuesday in
March, that a sandbank had moved forty metres towards the mill, that the captain of a grain ship from Odense refused to
pay for a tow and ran aground within sight of the quay.

A clerk once tried to join the two into one table with seven columns. The numbers went in easily, 3,140 tons here, 6.2
metres there; the pencil notes did not. "A column for weather," he wrote to the board, "would be empty on nine days of
ten, and on the tenth it would need a page." The board answered that he should leave the books as they were, and buy a
better lamp.

def depth_over_bar(tide_cm: int, draught_cm: int) -> int:
    clearance = 310 + tide_cm - draught_cm
    return max(0, clearance)

What follows from this? First, that a record is made for a question, and that the question comes before the record.
Second, that most of what people know about a place is never asked for. Third, that a lamp is cheap.
"""


class LayerError(NamedTuple):
    """|attention output - exact| / |exact| over all tokens and heads of a layer: with its keys quantized, its values,
    and both."""

    keys: float
    values: float
    both: float


@dataclass(frozen=True)
class Verdict:
    """The probe's result. kld: mean KL divergence (natural logarithm) from the predictions of an exact cache."""

    layers: list[LayerError]
    kld: float
    warning: str | None


class NotProbed(LeanError):
    """There is too little memory for the check. The message says how much is free."""


def _side(llm: LLM, config: EngineConfig, num_tokens: int) -> Parts:
    """The engine's model bound to a small second cache, with room for one sequence of ``num_tokens``.

    Raises NotProbed where the cache does not fit into the free memory.
    """
    model = llm.model
    plan = plan_cache(model.info.layers, config, raw_format(model.info.dtype), model.info.states)
    blocks = None if plan.bounded else blocks_for(num_tokens, config.block_size)
    config = replace(
        config, max_num_seqs=1, prefill_chunk=num_tokens, max_num_batched_tokens=None, max_model_len=num_tokens,
        num_blocks=blocks, kv_memory=None, prefix_tail_memory=0,
    )  # fmt: skip
    size = size_cache(plan, config, max(num_tokens, model.info.max_position_embeddings), 2**62)
    if size.nbytes > free_bytes(model.device):
        raise _not_probed(model.device)
    parts = bind(model, config, plan, size, llm.kernel_name)
    if plan.window and plan.num_sink_tokens:
        parts.runner.sink_rotary = llm.engine.runner.sink_rotary
    parts.manager.append(_SEQ_ID, num_tokens)
    return parts


def _not_probed(device: torch.device) -> NotProbed:
    return NotProbed(f"the KV format was not checked on this model: only {mib(free_bytes(device))} are free")


def layer_formats_of(llm: LLM) -> list[tuple[str, str]]:
    """(K, V) format names of every layer of the engine, without the sizes of groups."""
    formats = {}
    for group in llm.plan.groups:
        layout = llm.plan.pools[group.pool_id].layouts[0]
        k, v = (fmt.name.split("g")[0] for fmt in (layout.k_format, layout.v_format))
        formats.update(dict.fromkeys(group.layers, (k, v)))
    owners = (index if shape.kv_layer is None else shape.kv_layer for index, shape in enumerate(llm.model.info.layers))
    return [formats[owner] for owner in owners]


@dataclass(frozen=True)
class Probe:
    """Result for one text; see `Verdict`. klds: float64 [tokens]."""

    layers: list[LayerError]
    klds: torch.Tensor


@torch.inference_mode()
def probe_tokens(llm: LLM, token_ids: Sequence[int]) -> Probe:
    """Run tokens in one chunk through an exact cache and through one of the engine's formats without residual.

    Both caches lie beside the engine's. The exact run also gives each layer's inputs to caches that quantize keys,
    values or both.
    """
    count, raw = len(token_ids), raw_format(llm.model.info.dtype).name
    chunk = Chunk(Request(_SEQ_ID, list(token_ids), SamplingParams()), 0, count, True)
    formats = layer_formats_of(llm)

    def side(pairs: list[tuple[str, str]]) -> Parts:
        named = ",".join(f"{layer}:k={k},v={v}" for layer, (k, v) in enumerate(pairs))
        least = CHANNEL_TOKENS if any(FORMATS[k].by_channel for k, _ in pairs) else 0
        return _side(llm, replace(llm.config.exact(), kv_layers=named).without_residual(least), count)

    exact = _side(llm, llm.config.exact(), count)
    sides = [side([(k, raw) for k, _ in formats]), side([(raw, v) for _, v in formats]), side(formats)]
    batches = [side.runner.batch([chunk]) for side in sides]
    layers: dict[int, LayerError] = {}

    def observe(inputs: LayerInputs, outcome: torch.Tensor) -> torch.Tensor:
        norm = outcome.float().norm().clamp(min=1e-30)
        layers[inputs.layer] = LayerError(
            *(
                float((attend(inputs, side.cache.layers[inputs.layer], batch).float() - outcome.float()).norm() / norm)
                for side, batch in zip(sides, batches)
            )
        )
        return outcome

    wanted, found = exact.runner.run([chunk], observe), sides[-1].runner.run([chunk])
    klds = []
    for rows in llm.model.logit_slices(count):
        p, q = (llm.logits(hidden[rows])[:, : llm.model.token_limit].log_softmax(-1) for hidden in (wanted, found))
        klds.append((p.exp() * (p - q)).sum(-1).double().cpu())
    return Probe([layers[layer] for layer in sorted(layers)], torch.cat(klds))


def probe_text(llm: LLM) -> list[int]:
    """NUM_TOKENS tokens: a BOS where the tokenizer has one, then the built-in text."""
    tokenizer = llm.model.tokenizer
    ids: list[int] = tokenizer(_TEXT, add_special_tokens=False)["input_ids"]
    ids = [token for token in ids if token < llm.model.token_limit] or [0]
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    while len(ids) < NUM_TOKENS:
        ids = ids + ids
    return (bos + ids)[:NUM_TOKENS]


def probe(llm: LLM, *, keep: bool = True) -> Verdict | None:
    """Check that the engine's KV format suits its model; None where no layer is quantized.

    ``keep``: read an earlier verdict for the same model, formats and kernels from lean's folder, and write a new one
    there. Raises NotProbed where a GPU has too little memory beside the engine.
    """
    formats = layer_formats_of(llm)
    if not any(FORMATS[name].quantized for pair in formats for name in pair):
        return None
    file = _kept_verdict(llm) if keep else None
    if file is not None:
        with suppress(OSError, ValueError, TypeError, KeyError):
            found = json.loads(file.read_text(encoding="utf-8"))
            return Verdict([LayerError(*layer) for layer in found["layers"]], found["kld"], found["warning"])
    try:
        result = probe_tokens(llm, probe_text(llm))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise _not_probed(llm.model.device) from None
    kld = float(result.klds.mean())
    verdict = Verdict(result.layers, kld, _warning(llm.config.kv_dtype, formats, result.layers, kld))
    if file is not None:
        with suppress(OSError, ValueError):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, json.dumps(asdict(verdict), allow_nan=False).encode())
    return verdict


def _kept_verdict(llm: LLM) -> Path | None:
    """The file of an earlier verdict, whether or not it exists; None for a user without a home folder."""
    try:
        return cache_dir() / "probes" / f"{_key(llm)}.json"
    except NoHome:
        return None


def _outliers(names: Sequence[str], errors: Sequence[float]) -> set[int]:
    """Layers with an error above their format's limit, or above its floor and far above the format's median layer."""
    found = set()
    for name in set(names) & set(_BANDS):
        band = _BANDS[name]
        members = [layer for layer, own in enumerate(names) if own == name]
        usual = statistics.median(errors[layer] for layer in members)
        for layer in members:
            error = errors[layer]
            if not error <= band.limit or (error > band.floor and error > _FAR * usual):
                found.add(layer)
    return found


def _warning(name: str, formats: list[tuple[str, str]], layers: list[LayerError], kld: float) -> str | None:
    """One line that names the worst layers and what to do; None where all errors are as usual."""
    keys = _outliers([k for k, _ in formats], [layer.keys for layer in layers])
    values = _outliers([v for _, v in formats], [layer.values for layer in layers])
    bad = sorted(keys | values, key=lambda layer: -layers[layer].both)
    names = {name for pair in formats for name in pair if name in _BANDS}
    finer = f"try --kv-dtype {'bf16' if names <= {'int8', 'fp8'} else 'int8'}"
    usual = max(_BANDS[name].kld for name in names)
    if not bad and kld <= usual:
        return None
    if not bad:
        return (
            f"{name} KV changes this model's predictions more than usual (KLD {kld:.2g} without a residual, usual: up "
            f"to {usual:g}): {finer}"
        )
    what = " and ".join(["keys"] * bool(keys) + ["values"] * bool(values))
    named = ", ".join(f"{layer} (attention output off by {layers[layer].both:.0%})" for layer in bad[:_MOST_NAMED])
    named += f" and {len(bad) - _MOST_NAMED} more" if len(bad) > _MOST_NAMED else ""
    few = len(bad) <= max(2, len(formats) // 3)
    what_to_do = f"--kv-skip-layers {','.join(map(str, sorted(bad)))} keeps them exact" if few else finer
    return f"{name} KV loses far more than usual in the {what} of layer{'s' * (len(bad) > 1)} {named}: {what_to_do}"


def _key(llm: LLM) -> str:
    """A digest of the model's files as they are now, and of everything else that the verdict depends on."""
    files = llm.model.info.source.weight_files()
    stamps = [(str(file.resolve()), size, changed) for file, size, changed in files]
    config = llm.config
    parts = (
        _VERSION, stamps, str(llm.model.info.dtype), config.kv_dtype, config.kv_layers, config.kv_skip_layers,
        config.window, config.sinks, llm.plan.residual_length, llm.kernel_name, llm.model.weights,
    )  # fmt: skip
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
