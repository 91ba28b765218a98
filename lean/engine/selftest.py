"""Tests that run once at load: a model that lean cannot serve fails there, not in the first request."""

from collections import Counter

import torch

from lean.cache.block_manager import BlockManager
from lean.cache.kv_cache import LayerCache
from lean.engine.request import Request
from lean.engine.runner import Runner
from lean.engine.scheduler import Chunk
from lean.errors import ModelError, one_line
from lean.model.attention import LayerInputs
from lean.model.rotary import SinkRotary
from lean.sampling_params import SamplingParams

_SEQ_ID = -1  # no request has it
_NUM_TOKENS = 2
_POSITION, _SHIFT = 1000, 700


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
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise ModelError(f"{name}: cannot run on lean's cache: {one_line(error)}") from error
    finally:
        runner.cache.layers = layers
        manager.free(probe.seq_id)
    for layer in layers:
        if calls.count[layer] != 1:
            raise ModelError(
                f"{name}: layer {layer} calls attention {calls.count[layer]} times per step; lean supports one call"
            )


def try_rotation(runner: Runner, manager: BlockManager) -> SinkRotary:
    """The rotation that turns queries back for the sinks, tested on every full-attention layer.

    Without attention's output a query depends on its position through its rotation only: the query at position p,
    turned back by e, must equal the query at p - e. Models with learned positions, layers without rotation and unknown
    pairings of dims fail this test.

    Raises:
        ModelError: this model cannot run with a window.
    """
    info = runner.model.info
    rotation = SinkRotary.of(runner.model.module, info.source.name)
    there = _lone_queries(runner, manager, _POSITION)
    back = _lone_queries(runner, manager, _POSITION - _SHIFT)
    # Angles are exact; the model's norms and products round differently from position to position by a few units only.
    tolerance = max(2e-4, 16 * torch.finfo(info.dtype).eps)
    for layer, shape in enumerate(info.layers):
        found, want = (
            rotation.back(torch.full((len(there[layer]),), _SHIFT), there[layer].device)(there[layer]),
            back[layer],
        )
        error = float((found - want).abs().max() / want.abs().max())
        if not shape.window and not error <= tolerance:
            raise ModelError(
                f"{info.source.name}: the position encoding of layer {layer} is not a rotation that lean can turn back "
                f"(relative error {error:.2g}), so the model cannot run with --window"
            )
    return rotation


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
