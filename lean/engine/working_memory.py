"""Memory that steps need beside the weights and the cache.

On a GPU it is measured before the cache gets the rest. The largest steps run once, on a small cache that is dropped
again. What they take at most stays free. They also load the kernels and make the workspaces that all later steps use:
these are no longer free when the cache is sized.

A CPU gives memory as it is needed, and most steps need little. What grows with the length of a sequence is counted: the
K and V that long prompt chunks of latent attention are expanded to.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from lean.cache.plan import CachePlan
from lean.cache.size import DoesNotFit, size_cache
from lean.config import EngineConfig
from lean.device import cache_share, free_bytes, peak_bytes
from lean.engine.decode_batch import FIRST_REACH
from lean.engine.parts import bind
from lean.engine.request import Request
from lean.engine.scheduler import Chunk
from lean.engine.selftest import try_layers
from lean.errors import ConfigError, is_out_of_memory
from lean.kernels.layout import blocks_for
from lean.model.expansion import PromptRows, expansion_bytes, may_expand
from lean.model.latent import LatentProjection
from lean.model.load import LoadedModel
from lean.sampling_params import SamplingParams
from lean.units import ENDLESS, mib

# For what these steps do not show: the launches of recorded steps, the workspace of the stream on which they are
# recorded (8 MiB for cuBLAS, 32 MiB on Hopper), kernels of the sampler, queries that are turned back for the sinks, and
# gaps between allocations.
RESERVE = 256 * 2**20


class Working(NamedTuple):
    """Bytes to keep free beside the cache.

    largest: for the largest step that is not recorded. recorded: for the largest recorded one; recorded steps keep
    their memory to themselves. reserve: for the rest.
    """

    largest: int = 0
    recorded: int = 0
    reserve: int = 0

    @property
    def total(self) -> int:
        return sum(self)


def working_bytes(model: LoadedModel, config: EngineConfig, plan: CachePlan, kernel_name: str, recorded: int) -> int:
    """Bytes to keep free beside the cache; on a CPU those of `expanded_bytes`.

    ``recorded``: sequences of the largest step that will be recorded, 0 for none.

    Raises:
        ConfigError: the largest step does not fit beside the weights.
    """
    device = model.device
    if device.type != "cuda":
        return expanded_bytes(model, config, plan)
    free = free_bytes(device)
    try:
        found = measure(model, config, plan, kernel_name, recorded, partial(peak_bytes, device))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(
            f"steps of {config.step_tokens} tokens do not fit into the {mib(free)} that are free beside the weights: "
            "lower --max-num-batched-tokens, --prefill-chunk or --max-num-seqs, or use a smaller model"
        ) from None
    torch.cuda.empty_cache()
    return found.total


def expanded_bytes(model: LoadedModel, config: EngineConfig, plan: CachePlan) -> int:
    """Bytes that the longest prompt's last chunk is expanded to, in the layer where they are most; see
    `lean.model.expansion`."""
    if not may_expand(model.info.is_latent, model.device, config.deterministic):
        return 0
    device, length = model.device, _limit(model, config, plan)
    with suppress(DoesNotFit):  # refused when the cache is sized
        room = free_bytes(device)
        length = size_cache(plan, config, model.info.max_position_embeddings, room, cache_share(device)).max_model_len
    rows = PromptRows(0, 0, min(config.chunk_tokens, length), length)
    dims = {layout.k_dim for pool in plan.pools for layout in pool.layouts if layout.v_in_k}
    found = [
        expansion_bytes(part, dim, len(part.key_weight), rows, group, plan.block_size, model.info.dtype)
        for part in model.module.modules()
        if isinstance(part, LatentProjection)
        for dim in dims
        for group in plan.groups
    ]
    return max(found, default=0)


def measure(
    model: LoadedModel,
    config: EngineConfig,
    plan: CachePlan,
    kernel_name: str,
    recorded: int,
    peak_of: Callable[[Callable[[], None]], int],
) -> Working:
    """Run the largest steps. ``peak_of``: runs a step and returns the bytes that it takes at most."""
    prompt = prompt_chunks(config, min(config.chunk_tokens, _limit(model, config, plan)))
    trial = _Trial(model, config, plan, kernel_name, prompt)

    def peak(lengths: list[int]) -> int:
        return peak_of(partial(trial.run, lengths)) if lengths else 0

    # The first step also makes what stays: workspaces of libraries.
    largest = max(peak(prompt), peak([1] * config.max_num_seqs))
    graphs = peak([1] * recorded)
    return Working(max(largest, graphs), graphs, RESERVE)


def prompt_chunks(config: EngineConfig, longest: int) -> list[int]:
    """Lengths of the chunks of the step with the most prompt tokens. ``longest``: tokens of a chunk at most."""
    most = min(config.step_tokens, config.max_num_seqs * longest)
    whole, rest = divmod(most, longest)
    return [longest] * whole + [rest] * (rest > 0)


def _limit(model: LoadedModel, config: EngineConfig, plan: CachePlan) -> int:
    """Tokens of the longest sequence that the model and the configuration allow."""
    return config.max_model_len or (ENDLESS if plan.bounded else model.info.max_position_embeddings)


class _Trial:
    """A model on a cache that holds one step."""

    def __init__(
        self, model: LoadedModel, config: EngineConfig, plan: CachePlan, kernel_name: str, prompt: list[int]
    ) -> None:
        """``prompt``: lengths of the chunks of the largest step, each at least as long as the one after it."""
        size, longest = config.block_size, prompt[0]
        # Memory depends on the width of the block tables, not on what they name.
        self._width = blocks_for(min(_limit(model, config, plan), FIRST_REACH), size)
        needed = max(config.max_num_seqs, sum(blocks_for(length, size) for length in prompt))
        blocks = None if plan.bounded else needed
        config = replace(config, max_model_len=longest, kv_memory=None, num_blocks=blocks, prefix_tail_memory=0)
        sizes = size_cache(plan, config, max(longest, model.info.max_position_embeddings), 2**62)
        self._parts = bind(model, config, plan, sizes, kernel_name)
        try_layers(self._parts.runner, self._parts.manager)

    @torch.inference_mode()
    def run(self, lengths: list[int]) -> None:
        """Compute a step of sequences that bring these numbers of tokens, and its logits.

        Single tokens are not the first of their sequences. The sequences take their slots in the other direction, so
        that layers with states copy the states of all of them.
        """
        manager, runner, model = self._parts.manager, self._parts.runner, self._parts.model
        starts = [int(length == 1) for length in lengths]
        chunks = [
            Chunk(Request(index, [0] * (start + length), SamplingParams()), start, start + length, True)
            for index, (start, length) in enumerate(zip(starts, lengths))
        ]
        for chunk in reversed(chunks):
            manager.append(chunk.request.seq_id, chunk.end)
        batch = runner.batch(chunks)
        wide = [torch.nn.functional.pad(table, (0, self._width - table.shape[1])) for table in batch.block_tables]
        hidden = runner.compute([0] * sum(lengths), replace(batch, block_tables=tuple(wide)))
        runner.logits(hidden[: max(len(lengths), model.logit_rows)])
        for index in range(len(lengths)):
            manager.free(index)
