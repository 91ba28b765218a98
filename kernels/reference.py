"""The two attention ops in plain torch: the specification every other backend is held against.

Row-invariant: keys are visited in tiles that start at multiples of KEY_TILE, and every product has a fixed shape of
ROW_TILE rows. So neither the chunk, nor the batch, nor a neighbour's length changes the order in which the numbers of a
row are added, as long as the BLAS treats the rows of one shape alike, which the tests check. A tile that a row does not
see leaves its state as it was, to the bit. (One exception: a non-finite V also reaches the rows before it in its own
chunk; such a request is stopped anyway.)

Memory: one call needs, beside its output and the rotated query, at most `workspace_bytes`, whatever the context.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from lean.kernels.layout import KVLayout, first_in_window
from lean.quant import KVFormat, decode, encode, rotate

ROW_TILE = 16  # rows (token x query head of the group) of one product
KEY_TILE = 256  # keys of one product
QUERY_TILE = 128  # tokens whose scores are held at once


def workspace_bytes(num_q_heads: int, num_kv_heads: int, k_dim: int, v_dim: int, itemsize: int = 4) -> int:
    """Upper bound of the temporary memory of `paged_attention`, in bytes."""
    group_rows = -(-QUERY_TILE * (num_q_heads // num_kv_heads) // ROW_TILE) * ROW_TILE
    rows = num_kv_heads * group_rows
    scores = 4 * rows * KEY_TILE  # scores, masked scores, probabilities, and one more inside an expression
    tile = 4 * num_kv_heads * KEY_TILE * (k_dim + v_dim + 16)  # gathered bytes, codes, scaled values, a padded copy
    masks = (8 + 2) * group_rows * KEY_TILE  # int64 distances and booleans
    return itemsize * (scores + tile + 2 * rows * k_dim + 3 * rows * (v_dim + 16)) + masks


def _parts(arena: torch.Tensor, layout: KVLayout, offset: int) -> tuple[torch.Tensor, ...]:
    """Views of the arena [num_blocks, block_bytes] as K codes, K scales, V codes, V scales.

    Codes: uint8 [num_blocks, kv_heads, block_size, row_bytes]; scales: fp16 [..., groups].
    """
    heads, slots, stride = layout.num_kv_heads, layout.block_size, arena.stride(0)

    def view(row_bytes: int, start: int) -> torch.Tensor:
        shape = (arena.shape[0], heads, slots, row_bytes)
        return arena.as_strided(
            shape, (stride, slots * row_bytes, row_bytes, 1), arena.storage_offset() + offset + start
        )

    k, v = layout.k_format, layout.v_format
    return (
        view(k.code_bytes(layout.k_dim), 0),
        view(k.scale_bytes(layout.k_dim), layout.k_scales_offset).view(torch.float16),
        view(v.code_bytes(layout.v_dim), layout.v_codes_offset),
        view(v.scale_bytes(layout.v_dim), layout.v_scales_offset).view(torch.float16),
    )


def kv_write(
    arena: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
    layer_offset: int,
    block_size: int,
    k_format: int,
    v_format: int,
) -> None:
    """Encode key [tokens, kv_heads, k_dim] and value [..., v_dim] into their slots; negative slots are skipped."""
    layout = KVLayout(
        KVFormat.from_code(k_format),
        KVFormat.from_code(v_format),
        key.shape[1],
        key.shape[2],
        value.shape[2],
        block_size,
    )
    parts = _parts(arena, layout, layer_offset)
    kept = slot_mapping >= 0
    slots = slot_mapping[kept].long()
    block, slot = slots // block_size, slots % block_size
    written = (*encode(key[kept], layout.k_format), *encode(value[kept], layout.v_format))
    for part, rows in zip(parts, written):
        if rows.numel():
            part[block, :, slot] = rows


def read_slots(
    arena: torch.Tensor, layout: KVLayout, offset: int, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """K [slots, kv_heads, k_dim] and V, float32 in the stored basis, of single slots: for looking, not for speed."""
    block, slot = slots // layout.block_size, slots % layout.block_size
    k_codes, k_scales, v_codes, v_scales = (part[block, :, slot] for part in _parts(arena, layout, offset))
    return decode(k_codes, k_scales, layout.k_format), decode(v_codes, v_scales, layout.v_format)


class _Source(NamedTuple):
    """Where keys are read from: one layer's part of a pool, as views, and the pool's block tables."""

    block_tables: torch.Tensor
    layout: KVLayout
    parts: tuple[torch.Tensor, ...]


def _load_tile(source: _Source, seq: int, start: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """K [kv_heads, KEY_TILE, k_dim] and V of the positions start .. start + KEY_TILE, decoded, in the stored basis.

    Blocks past the end of the table come from the null block; the caller masks them.
    """
    layout = source.layout
    first, count = start // layout.block_size, KEY_TILE // layout.block_size
    blocks = source.block_tables[seq, first : first + count].long()
    blocks = torch.nn.functional.pad(blocks, (0, count - blocks.numel()))
    # [count, heads, slots, x] -> [heads, count * slots, x]
    k_codes, k_scales, v_codes, v_scales = (part[blocks].transpose(0, 1).flatten(1, 2) for part in source.parts)
    return decode(k_codes, k_scales, layout.k_format, dtype), decode(v_codes, v_scales, layout.v_format, dtype)


def _row_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [heads, tiles, ROW_TILE, K] times b [heads, K, N], one fixed-shape product per head and tile.

    Columns are padded to whole vectors: MKL adds the rest of a row in another order when it splits it over threads.
    For the same reason float64 multiplies tile by tile instead of in one batch.
    """
    n = b.shape[-1]
    b = torch.nn.functional.pad(b, (0, -n % 16))
    if a.dtype is torch.float64:
        out = torch.stack([torch.stack([tile @ cols for tile in rows]) for rows, cols in zip(a, b)])
    else:
        out = torch.stack([torch.bmm(rows, cols.expand(rows.shape[0], -1, -1)) for rows, cols in zip(a, b)])
    return out[..., :n]


class _Softmax:
    """Running softmax-weighted sum of V over key tiles (online softmax, arXiv:1805.02867)."""

    def __init__(self, rows: torch.Size, v_dim: int, like: torch.Tensor) -> None:
        self.max = like.new_full((*rows, 1), -torch.inf)
        self.sum = like.new_zeros((*rows, 1))
        self.acc = like.new_zeros((*rows, v_dim))

    def add(self, scores: torch.Tensor, seen: torch.Tensor | None, v: torch.Tensor) -> None:
        """scores [heads, tiles, ROW_TILE, keys]; seen [tiles, ROW_TILE, keys], None: all; v [heads, keys, v_dim]."""
        if seen is not None:
            scores = scores.masked_fill(~seen, -torch.inf)
            # 0 x NaN is NaN: V of slots that no row sees is whatever lies there.
            v = v.masked_fill(~seen.flatten(0, 1).any(0)[:, None], 0.0)
        new_max = torch.maximum(self.max, scores.amax(-1, keepdim=True))
        # A row that has seen nothing keeps -inf; subtracting 0 instead makes its weights exact zeros, not NaN.
        base = new_max.masked_fill(new_max == -torch.inf, 0.0)
        weights = torch.exp(scores.sub_(base))
        kept = torch.exp(self.max - base)
        self.sum = self.sum * kept + weights.sum(-1, keepdim=True)
        self.acc = self.acc * kept + _row_product(weights, v)
        self.max = new_max

    def result(self, sink_logits: torch.Tensor | None) -> torch.Tensor:
        """[heads, tiles, ROW_TILE, v_dim]; rows that saw no key are 0. sink_logits [heads, tiles, ROW_TILE, 1]."""
        if sink_logits is None:
            return self.acc / self.sum.masked_fill(self.sum == 0, 1.0)
        top = torch.maximum(self.max, sink_logits)
        kept = torch.exp(self.max - top)
        return self.acc * kept / (self.sum * kept + torch.exp(sink_logits - top))


def _tiles(start: int, end: int) -> set[int]:
    return set(range(start // KEY_TILE * KEY_TILE, end, KEY_TILE)) if end > start else set()


def paged_attention(
    query: torch.Tensor,
    query_sink: torch.Tensor | None,
    arena: torch.Tensor,
    block_tables: torch.Tensor,
    exact_arena: torch.Tensor | None,
    exact_block_tables: torch.Tensor | None,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    sink_logits: torch.Tensor | None,
    layer_offset: int,
    exact_layer_offset: int,
    block_size: int,
    num_kv_heads: int,
    v_dim: int,
    k_format: int,
    v_format: int,
    exact_k_format: int,
    exact_v_format: int,
    scale: float,
    softcap: float,
    window: int,
    num_sink_tokens: int,
    residual_length: int,
    num_exact_sinks: int,
) -> torch.Tensor:
    """See `lean.kernels.ops.paged_attention`, which checks the arguments."""
    num_q_heads, k_dim = query.shape[1:]
    group = num_q_heads // num_kv_heads

    def source(arena: torch.Tensor, tables: torch.Tensor, offset: int, k_code: int, v_code: int) -> _Source:
        formats = KVFormat.from_code(k_code), KVFormat.from_code(v_code)
        layout = KVLayout(*formats, num_kv_heads, k_dim, v_dim, block_size)
        return _Source(tables, layout, _parts(arena, layout, offset))

    main = exact = source(arena, block_tables, layer_offset, k_format, v_format)
    if exact_arena is not None and exact_block_tables is not None:
        exact = source(exact_arena, exact_block_tables, exact_layer_offset, exact_k_format, exact_v_format)
    dtype = torch.float64 if query.dtype is torch.float64 else torch.float32

    def rows_of(x: torch.Tensor) -> torch.Tensor:
        """[tokens, q_heads, dim] -> [kv_heads, tiles, ROW_TILE, dim]; rows are token-major, the last tile padded."""
        x = x.unflatten(1, (num_kv_heads, group)).transpose(0, 1).flatten(1, 2)
        return torch.nn.functional.pad(x, (0, 0, 0, -x.shape[1] % ROW_TILE)).unflatten(1, (-1, ROW_TILE))

    def basis(x: torch.Tensor) -> torch.Tensor:
        return rotate(x.to(dtype)) if main.layout.k_format.rotate else x.to(dtype)

    def attend(tokens: slice, position: int, seq: int) -> torch.Tensor:
        """One query tile: its tokens stand at ``position``, ``position`` + 1, ... of sequence ``seq``."""
        n = tokens.stop - tokens.start
        last = position + n - 1
        q = rows_of(basis(query[tokens]))
        i = torch.arange(position, last + 1, device=query.device).repeat_interleave(group)
        # Padding rows stand before every key.
        i = torch.nn.functional.pad(i, (0, -i.numel() % ROW_TILE), value=-1).view(-1, ROW_TILE, 1)
        state = _Softmax(q.shape[:3], v_dim, q)

        def is_exact(j: torch.Tensor) -> torch.Tensor:
            return (i - j < residual_length) | (j < num_exact_sinks)

        def is_sink(j: torch.Tensor) -> torch.Tensor:
            return j < num_sink_tokens

        def in_window(j: torch.Tensor) -> torch.Tensor:
            """Keys read with the plain query: those the window shows, less the sinks, which have their own."""
            return ((i - j < window) if window else True) & (j >= num_sink_tokens)

        def visit(q: torch.Tensor, source: _Source, starts: set[int], part: Callable) -> None:
            for start in sorted(starts):
                k, v = _load_tile(source, seq, start, dtype)
                scores = _row_product(q, k.transpose(1, 2)).mul_(scale)
                if softcap:
                    scores = torch.tanh(scores.div_(softcap)).mul_(softcap)
                # Inside the window, before the residual and behind all sinks every row sees the whole tile.
                seen = None
                inside = start >= max(num_sink_tokens, num_exact_sinks) and (not window or last - start < window)
                if source is not main or not inside or start + KEY_TILE > position + 1 - residual_length:
                    j = torch.arange(start, start + KEY_TILE, device=query.device)
                    seen = (j <= i) & part(j)
                    if residual_length:
                        seen &= is_exact(j) if source is exact else ~is_exact(j)
                state.add(scores, seen, v)

        if num_sink_tokens:
            turned = q if query_sink is None else rows_of(basis(query_sink[tokens]))
            starts = _tiles(0, min(num_sink_tokens, last + 1))
            if not residual_length or num_exact_sinks < num_sink_tokens:
                visit(turned, main, starts, is_sink)
            if residual_length:
                visit(turned, exact, starts, is_sink)
        left = first_in_window(position, window)
        visit(q, main, _tiles(left, last + 1 - residual_length), in_window)
        if residual_length:
            starts = _tiles(max(left, position - residual_length + 1), last + 1)
            starts |= _tiles(left, min(num_exact_sinks, last + 1))
            visit(q, exact, starts, in_window)

        logits = None
        if sink_logits is not None:
            logits = rows_of(sink_logits.to(dtype).view(1, -1, 1).expand(n, -1, 1))
        out = state.result(logits).flatten(1, 2)[:, : n * group]
        out = rotate(out) if main.layout.v_format.rotate else out
        return out.unflatten(1, (n, group)).transpose(0, 1).flatten(1, 2).to(query.dtype)

    out = query.new_zeros(query.shape[0], num_q_heads, v_dim)
    bounds = query_start_loc.tolist()
    for seq, length in enumerate(seq_lens.tolist()):
        begin, end = bounds[seq], bounds[seq + 1]
        for t in range(begin, end, QUERY_TILE):
            tokens = slice(t, min(t + QUERY_TILE, end))
            out[tokens] = attend(tokens, length - (end - t), seq)
    return out
