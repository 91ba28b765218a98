"""The formula of paged attention, with no tiles and no running softmax: what every back end computes.

It is the specification, and it is slow: it holds all scores of a sequence and decodes every key in float64.
`lean.kernels.reference` computes the same in bounded memory and is held to it by the tests.
"""

import torch

from lean.kernels.call import AttentionCall
from lean.kernels.layout import KVLayout
from lean.kernels.parts import read_slots
from lean.quant import rotate_back


def paged_attention(call: AttentionCall) -> torch.Tensor:
    """Computed in float64, returned as [num_tokens, num_q_heads, v_dim] in the query's dtype.

    Rows of no sequence, and rows that see no key, are zeros.
    """
    out = call.query.new_zeros(*call.query.shape[:2], call.v_dim)
    bounds = call.query_start_loc.tolist()
    for seq, seq_len in enumerate(call.seq_lens.tolist()):
        rows = slice(bounds[seq], bounds[seq + 1])
        if rows.start < rows.stop:
            out[rows] = _attend(call, seq, seq_len, rows).to(out.dtype)
    return out


def _attend(call: AttentionCall, seq: int, seq_len: int, rows: slice) -> torch.Tensor:
    """The output of one sequence's rows, float64 [rows, num_q_heads, v_dim]."""
    j = torch.arange(seq_len, device=call.query.device)[None]  # positions of the keys
    i = seq_len - rows.stop + torch.arange(rows.start, rows.stop, device=j.device)[:, None]  # and of the rows
    visible = j <= i
    if call.window:
        visible &= (i - j < call.window) | (j < call.num_sink_tokens)
    exact = torch.zeros_like(visible)  # read from the exact pool
    if call.residual_length:
        exact = (i - j < call.residual_length) | (j < call.num_exact_sinks)

    key, value = _keys_and_values(call, call.arena, call.block_tables[seq], call.layout, call.layer_offset, seq_len)
    exact_key, exact_value = key, value
    if call.exact_arena is not None and call.exact_block_tables is not None:
        table, offset = call.exact_block_tables[seq], call.exact_layer_offset
        exact_key, exact_value = _keys_and_values(call, call.exact_arena, table, call.exact_layout, offset, seq_len)

    query = call.query[rows].double()
    sink_query = query if call.query_sink is None else call.query_sink[rows].double()

    def dot(key: torch.Tensor) -> torch.Tensor:
        of_sinks, others = (torch.einsum("ihd,jhd->hij", q, key) for q in (sink_query, query))
        return torch.where(j < call.num_sink_tokens, of_sinks, others)

    scores = torch.where(exact, dot(exact_key), dot(key)) * call.scale
    if call.softcap:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    scores = scores.masked_fill(~visible, -torch.inf)
    if call.sink_logits is not None:
        logits = call.sink_logits.double()[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat((scores, logits), dim=2)
    # A row that sees no key has NaN until it is masked.
    p = torch.softmax(scores, dim=2)[..., :seq_len].masked_fill(~visible, 0)

    def weigh(mask: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        value = value.masked_fill(~mask.any(0)[:, None, None], 0)  # 0 x NaN is NaN: unread slots may hold anything
        return torch.einsum("hij,jhd->ihd", p * mask, value)

    return weigh(visible & ~exact, value) + weigh(visible & exact, exact_value)


def _keys_and_values(
    call: AttentionCall, arena: torch.Tensor, table: torch.Tensor, layout: KVLayout, offset: int, seq_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a sequence's tokens, float64 [seq_len, num_q_heads, dim], in the model's basis."""
    j = torch.arange(seq_len, device=arena.device)
    slots = table[j // layout.block_size].long() * layout.block_size + j % layout.block_size
    key, value = read_slots(arena, layout, offset, slots, torch.float64)
    key = rotate_back(key) if layout.k_format.rotate else key
    value = rotate_back(value, layout.v_rotation_size) if layout.v_format.rotate else value
    group = call.query.shape[1] // layout.num_kv_heads
    return key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
