"""Tests that run once at load: a model that lean cannot serve fails there, not in the first request."""

from collections import Counter

import torch

from lean.cache.block_manager import BlockManager
from lean.cache.kv_cache import LayerCache
from lean.engine.request import Request
from lean.engine.runner import Runner
from lean.engine.scheduler import Chunk
from lean.errors import ModelError, is_out_of_memory, one_line
from lean.model.attention import LayerInputs
from lean.model.rotary import all_frequencies
from lean.model.shapes import other_calls
from lean.model.sink_turn import Pairing, SinkRotary, pairings
from lean.sampling_params import SamplingParams

_SEQ_ID = -1  # no request has it
_NUM_TOKENS = 2
_POSITION = 1000  # of queries that are turned back
_FEW_POSITIONS = 20  # the same where no rotation is known: positions may be learned, and few


class _CountedLayers(dict[int, LayerCache]):
    """Layers by index that count how often each is looked up."""

    def __init__(self, layers: dict[int, LayerCache]) -> None:
        super().__init__(layers)
        self.count: Counter[int] = Counter()

    def __getitem__(self, layer: int) -> LayerCache:
        self.count[layer] += 1
        return super().__getitem__(layer)


def try_layers(runner: Runner, manager: BlockManager) -> None:
    """Run two tokens. Raises ModelError.

    Every layer must call lean's attention exactly once: a second call would overwrite the K/V of the first.
    """
    probe = Request(_SEQ_ID, [0, 0], SamplingParams())
    name, layers = runner.model.info.source.name, runner.cache.layers
    calls = runner.cache.layers = _CountedLayers(layers)
    try:
        manager.append(probe.seq_id, 2)
        runner.logits(runner.run([Chunk(probe, 0, 2, True)]))
    except ModelError as error:
        raise ModelError(f"{name}: {error}") from None
    except (TypeError, ValueError, KeyError, AttributeError, IndexError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        raise ModelError(f"{name}: cannot run on lean's cache: {one_line(error)}") from error
    finally:
        runner.cache.layers = layers
        manager.free(probe.seq_id)
    for layer in layers:
        if calls.count[layer] != 1:
            raise ModelError(f"{name}: {other_calls(layer, calls.count[layer])}")


def try_rotation(runner: Runner, manager: BlockManager) -> SinkRotary:
    """The rotation that turns queries back for the sinks, found by trying every layer with full attention.

    Without attention's output a query depends on its position through its rotation only: the query at position p,
    turned back by e, must equal the query at p - e. Models with learned positions and unknown rotations fail this test.

    Raises:
        ModelError: this model cannot run with a window.
    """
    info = runner.model.info
    name, layers = info.source.name, [layer for layer, shape in enumerate(info.layers) if not shape.window]
    tables = all_frequencies(runner.model.module)
    nothing = torch.zeros(0, dtype=torch.float64)  # the frequencies of a model without positions
    position = min(_POSITION if tables else _FEW_POSITIONS, info.max_position_embeddings - 1)
    shift = 7 * position // 10
    there = _lone_queries(runner, manager, position)
    back = _lone_queries(runner, manager, position - shift)
    # Angles are exact; the model's norms and products round differently from position to position by a few units only.
    tolerance = max(2e-4, 16 * torch.finfo(info.dtype).eps)
    failure = (-1, 0.0)  # of the table that serves most layers
    for inv_freq in tables or [nothing]:
        found: dict[int, Pairing | None] = {}
        for layer in layers:
            errors = [
                (_turn_error(inv_freq, pairing, shift, there[layer], back[layer]), pairing)
                for pairing in pairings(inv_freq, there[layer].shape[-1])
            ]
            fitting = [pairing for error, pairing in errors if error <= tolerance]
            if not fitting:
                failure = max(failure, (layer, min(error for error, _ in errors)))
                break
            found[layer] = fitting[0]
        else:
            return SinkRotary(inv_freq, found)
    if not tables:
        raise ModelError(f"{name}: it has no rotary positions that lean can shift for the sinks: remove --window")
    raise ModelError(
        f"{name}: the position encoding of layer {failure[0]} is not a rotation that lean can turn back (relative "
        f"error {failure[1]:.2g}), so the model cannot run with --window"
    )


def _turn_error(
    inv_freq: torch.Tensor, pairing: Pairing | None, shift: int, there: torch.Tensor, want: torch.Tensor
) -> float:
    """How far queries, turned back, are from those of the earlier position, relative to the largest number."""
    turn = SinkRotary(inv_freq, {0: pairing}).back(torch.full((len(there),), shift), there.device)
    return float((turn(there, 0) - want).abs().max() / want.abs().max())


def _lone_queries(runner: Runner, manager: BlockManager, position: int) -> dict[int, torch.Tensor]:
    """Every layer's queries of a few tokens, each computed alone at ``position``: [tokens, num_q_heads, k_dim].

    Attention's output is replaced by zeros: it would bring positions into the hidden states.
    """
    found: dict[int, list[torch.Tensor]] = {}

    def observe(inputs: LayerInputs, outcome: torch.Tensor) -> torch.Tensor:
        found.setdefault(inputs.layer, []).append(inputs.query)
        return torch.zeros_like(outcome)

    runner.position_offset = position
    try:
        for part in range(_NUM_TOKENS):
            probe = Request(_SEQ_ID, [(part + 1) * runner.model.token_limit // (_NUM_TOKENS + 1)], SamplingParams())
            manager.append(probe.seq_id, 1)
            runner.run([Chunk(probe, 0, 1, True)], observe)
            manager.free(probe.seq_id)
    finally:
        runner.position_offset = 0
        manager.free(_SEQ_ID)
    return {layer: torch.cat(queries) for layer, queries in found.items()}
