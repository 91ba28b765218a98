"""lean's attention function and mask function for transformers models, and the batch metadata they travel with."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface

from lean.cache.kv_cache import KVCache, LayerCache
from lean.errors import ModelError
from lean.kernels.ops import paged_attention, write_tokens
from lean.model.expansion import PromptRows, attend_expanded, pays
from lean.model.latent import LatentProjection
from lean.model.mixers import StateGroup
from lean.model.sink_turn import SinkTurn

NAME = "lean"

# Keyword arguments that transformers hands to every attention function and that change nothing here: positions are in
# the rotated query and key, and lean keeps its own cache.
_HARMLESS = {"position_ids", "use_cache", "cache_position", "is_causal", "position_embeddings", "output_attentions"}


@dataclass(frozen=True)
class AttentionBatch:
    """One step's packed sequences.

    Attributes:
        query_start_loc: int32 [num_seqs + 1], cumulative query lengths.
        seq_lens: int32 [num_seqs], tokens in the cache, this step's included.
        positions: int64 [num_tokens].
        slot_mapping: per pool, int64 [num_tokens], block id x block_size + slot, negative for padding.
        block_tables: per pool, int32 [num_seqs, max_blocks].
        sink_turn: turns queries back for the sink keys; None where no row has lost a token to the window.
        observer: called with every layer's inputs and outcome; what it returns takes the place of the outcome. None
            except in the self-test and in measurements.
        states: the rows as layers with states compute them; empty for a model without.
        prompts: sequences with many new tokens, for which latent attention may expand the vectors in the cache; empty
            where an engine does not (`lean.model.expansion.may_expand`).
        layer_runner: computes the layers (`lean.model.layer_calls.LayerRunner`); None: they compute themselves.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    positions: torch.Tensor
    slot_mapping: tuple[torch.Tensor, ...]
    block_tables: tuple[torch.Tensor, ...]
    sink_turn: SinkTurn | None = None
    observer: "Observer | None" = None
    states: tuple[StateGroup, ...] = ()
    prompts: tuple[PromptRows, ...] = ()
    layer_runner: Any = None

    def without(self, prompts: Sequence[PromptRows]) -> tuple["AttentionBatch", torch.Tensor]:
        """The same sequences, but these have no rows; and the rows that are left, int64 [rows]. For reading only."""
        starts, lengths = self.query_start_loc, self.query_start_loc.diff()
        kept = torch.ones_like(self.positions, dtype=torch.bool)
        for rows in prompts:
            lengths[rows.seq] = 0
            kept[rows.first : rows.first + rows.num_rows] = False
        starts = torch.cat((starts[:1], lengths.cumsum(0, dtype=starts.dtype)))
        return replace(self, query_start_loc=starts), kept.nonzero().squeeze(1)


class LayerInputs(NamedTuple):
    """The inputs of one layer's attention in one step, after RoPE, and its settings.

    query: [num_tokens, num_q_heads, k_dim]; key, value: [num_tokens, num_kv_heads, dim]; sink_logits: [num_q_heads].
    An observer gets the absorbed query of a latent layer (`lean.model.latent`).
    """

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    softcap: float
    sink_logits: torch.Tensor | None


# Takes a layer's inputs and outcome [num_tokens, num_q_heads, v_dim], returns the outcome that the model goes on with.
Observer = Callable[[LayerInputs, torch.Tensor], torch.Tensor]


def attend(inputs: LayerInputs, layer: LayerCache, batch: AttentionBatch) -> torch.Tensor:
    """Write a layer's new K/V into its cache, then attend to what the cache holds: [num_tokens, num_q_heads, v_dim].

    A layer that reads another layer's K/V writes nothing: that layer has run earlier in the same step.
    """
    _write(inputs, layer, batch)
    return _read(inputs, layer, batch)


def _write(inputs: LayerInputs, layer: LayerCache, batch: AttentionBatch) -> None:
    group = layer.group
    if layer.writes:
        exact_slots = None if group.exact_pool_id is None else batch.slot_mapping[group.exact_pool_id]
        slots = batch.slot_mapping[group.pool_id]
        write_tokens(layer.pool, inputs.key, inputs.value, slots, layer.exact, exact_slots)


def _read(inputs: LayerInputs, layer: LayerCache, batch: AttentionBatch) -> torch.Tensor:
    group = layer.group
    turn = batch.sink_turn if group.num_sink_tokens else None
    return paged_attention(
        inputs.query,
        layer.pool,
        batch.block_tables[group.pool_id],
        batch.query_start_loc,
        batch.seq_lens,
        scale=inputs.scale,
        softcap=inputs.softcap,
        window=group.window,
        num_sink_tokens=group.num_sink_tokens,
        query_sink=None if turn is None else turn(inputs.query, inputs.layer),
        exact=layer.exact,
        exact_block_tables=None if group.exact_pool_id is None else batch.block_tables[group.exact_pool_id],
        residual_length=group.residual_length,
        num_exact_sinks=group.num_exact_sinks,
        sink_logits=inputs.sink_logits,
    )


def attend_latent(
    projection: LatentProjection, inputs: LayerInputs, layer: LayerCache, batch: AttentionBatch
) -> torch.Tensor:
    """`attend` for a latent layer: [num_tokens, num_q_heads, v_head_dim].

    inputs: with the heads' own query, [num_tokens, num_q_heads, nope + rope]. It is absorbed, except for rows whose
    keys are expanded. An observer sees all rows absorbed.
    """
    query = inputs.query
    expanded = [rows for rows in batch.prompts if pays(projection, rows, inputs.key.shape[2], layer.group)]
    if not expanded or batch.observer is not None:
        inputs = inputs._replace(query=projection.absorb(query))
        found = attend(inputs, layer, batch)
        return projection.expand(found if batch.observer is None else batch.observer(inputs, found))
    _write(inputs, layer, batch)
    out = query.new_empty(*query.shape[:2], projection.v_head_dim)
    for rows in expanded:
        own = slice(rows.first, rows.first + rows.num_rows)
        out[own] = attend_expanded(
            projection,
            query[own],
            rows,
            layer,
            batch.block_tables,
            scale=inputs.scale,
            softcap=inputs.softcap,
            sink_logits=inputs.sink_logits,
        )
    batch, others = batch.without(expanded)
    if len(others):
        absorbed = inputs._replace(query=projection.absorb(query[others]))
        out[others] = projection.expand(_read(absorbed, layer, batch))
    return out


def unsupported_arguments(
    arguments: Mapping[str, Any], attention_mask: torch.Tensor | None, dropout: float
) -> list[str]:
    """What transformers handed to an attention function and lean would have to drop, by name."""
    unknown = []
    for name in arguments:  # no comprehension: a frame per layer and token
        if arguments[name] is not None and name not in _HARMLESS:
            unknown.append(name)
    if "is_causal" in arguments and arguments["is_causal"] is False:
        unknown.append("is_causal=False")
    if attention_mask is not None:
        unknown.append("an attention mask")
    if dropout:
        unknown.append("dropout")
    return unknown


def lean_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    attention_batch: AttentionBatch,
    kv_cache: KVCache,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls: `attend`, with transformers' shapes.

    Args:
        query: [1, num_q_heads, num_tokens, k_dim]; key, value: [1, num_kv_heads, num_tokens, dim], after RoPE. Of a
            latent layer (`lean.model.latent`): the heads' own query, and the latent vectors as key and value.
        s_aux: [num_q_heads], sink logits (gpt-oss).

    Returns:
        [1, num_tokens, num_q_heads, v_dim], of a latent layer with the dims of its heads; and None for the weights,
        which are never formed.

    Raises:
        ModelError: the model passes something that would be dropped.
    """
    index, layer = kv_cache.find(module.layer_idx)  # type: ignore[arg-type]
    unknown = unsupported_arguments(kwargs, attention_mask, dropout)
    if unknown:
        raise ModelError(f"the model's attention uses {', '.join(unknown)}, which lean does not support")
    if sliding_window is not None and sliding_window != layer.own_window:  # None: a window may stand in the mask alone
        raise ModelError(f"layer {index} asks for window {sliding_window}, the cache has {layer.own_window}")
    q, k, v = query.squeeze(0).transpose(0, 1), key.squeeze(0).transpose(0, 1), value.squeeze(0).transpose(0, 1)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    inputs = LayerInputs(index, q, k, v, scale, softcap or 0.0, s_aux)
    if layer.pool.layout.v_in_k:
        out = attend_latent(module.kv_b_proj, inputs, layer, attention_batch)  # type: ignore[arg-type]
    else:
        out = attend(inputs, layer, attention_batch)
        if attention_batch.observer is not None:
            out = attention_batch.observer(inputs, out)
    return out.unsqueeze(0), None


def register() -> None:
    """Make ``attn_implementation="lean"`` known to transformers.

    It gets no mask function: the cache decides what is visible. transformers then builds no mask, and does not read
    the positions on the host to find packed sequences.
    """
    AttentionInterface.register(NAME, lean_attention)
