"""The two attention ops in plain torch: the specification every other backend is held against.

Row-invariant: keys are visited in tiles that start at multiples of KEY_TILE, and every product has a fixed shape of
ROW_TILE rows. So neither the chunk, nor the batch, nor a neighbour's length changes the order in which the numbers of a
row are added, as long as the BLAS treats the rows of one shape alike, which the tests check. A tile that a row does not
see leaves its state as it was, to the bit. (One exception: a non-finite V also reaches the rows before it in its own
chunk; such a request is stopped anyway.)

Memory: one call needs, beside its output and the rotated query, at most `workspace_bytes`, whatever the context.
"""

import os
from collections.abc import Callable
from typing import NamedTuple

import torch

from lean.kernels.layout import KVLayout, first_in_window
from lean.quant import KVFormat, decode, encode, rotate

ROW_TILE = 16  # rows (token x query head of the group) of one product
KEY_TILE = 256  # keys of one product
QUERY_TILE = 128  # tokens whose scores are held at once


def is_wanted() -> bool:
    """Whether ``LEAN_KERNELS=reference`` asks for this back end everywhere. Raises ValueError for another value."""
    wanted = os.environ.get("LEAN_KERNELS", "")
    if wanted not in ("", "reference"):
        raise ValueError(f"LEAN_KERNELS={wanted!r} is unknown: leave it empty or write 'reference'")
    return wanted == "reference"


def _temporary_bytes(seqs: int, tokens: int, heads: tuple[int, int, int, int], itemsize: int) -> int:
    """Upper bound for query tiles of ``tokens`` tokens of ``seqs`` sequences, attended together."""
    num_q_heads, num_kv_heads, k_dim, v_dim = heads
    group_rows = -(-tokens * (num_q_heads // num_kv_heads) // ROW_TILE) * ROW_TILE
    # Scores, which become the probabilities in place; queries and outputs with their copies in other orders and bases.
    rows = seqs * num_kv_heads * group_rows * (KEY_TILE + 3 * k_dim + 4 * (v_dim + 16))
    # K or V as gathered bytes, in order of heads, decoded, padded: never more than two of them decoded.
    tile = 2 * seqs * num_kv_heads * KEY_TILE * (max(k_dim, v_dim) + 16)
    masks = seqs * group_rows * KEY_TILE * (4 + 5)  # int32 distances and booleans
    return itemsize * (rows + tile) + masks


def workspace_bytes(num_q_heads: int, num_kv_heads: int, k_dim: int, v_dim: int, itemsize: int = 4) -> int:
    """Upper bound of the temporary memory of `paged_attention`, in bytes: that of one full query tile.

    Decode rows are attended in batches that fit into the same. ``itemsize`` is that of the computation (4, or 8 for
    float64 queries), or of the cache if that is wider.
    """
    return _temporary_bytes(1, QUERY_TILE, (num_q_heads, num_kv_heads, k_dim, v_dim), itemsize)


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
    padding = slot_mapping < 0
    if padding.any():
        key, value, slot_mapping = (x[~padding] for x in (key, value, slot_mapping))
    block, slot = slot_mapping // block_size, slot_mapping % block_size
    if layout.k_format == layout.v_format and layout.k_dim == layout.v_dim:
        codes, scales = encode(torch.cat((key, value), dim=1), layout.k_format)
        (k_codes, v_codes), (k_scales, v_scales) = codes.chunk(2, dim=1), scales.chunk(2, dim=1)
    else:
        k_codes, k_scales = encode(key, layout.k_format)
        v_codes, v_scales = encode(value, layout.v_format)
    for part, rows in zip(parts, (k_codes, k_scales, v_codes, v_scales)):
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

    def blocks(self, seqs: torch.Tensor, start: int) -> torch.Tensor:
        """Ids [seqs, KEY_TILE / block_size] of the blocks at start .. start + KEY_TILE; the null block past the end."""
        first, count = start // self.layout.block_size, KEY_TILE // self.layout.block_size
        ids = self.block_tables[seqs, first : first + count]
        return torch.nn.functional.pad(ids, (0, count - ids.shape[1]))

    def load_k(self, blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """K [seqs, kv_heads, KEY_TILE, k_dim], decoded, in the stored basis; the caller masks what nobody wrote."""
        codes, scales = (_gather(part, blocks) for part in self.parts[:2])
        return decode(codes, scales, self.layout.k_format, dtype)

    def load_v(self, blocks: torch.Tensor, dtype: torch.dtype, seen: torch.Tensor | None) -> torch.Tensor:
        """V [seqs, kv_heads, KEY_TILE, v_dim], decoded; zeros where no row of ``seen`` [seqs, tiles, rows, KEY_TILE]
        is True."""
        codes, scales = (_gather(part, blocks) for part in self.parts[2:])
        if seen is not None:
            # 0 x NaN is NaN: V of slots that no row sees is whatever lies there. Bits 0 are 0 in every format.
            bits = seen.flatten(1, 2).any(1).to(torch.uint8).neg_()[:, None, :, None]
            codes &= bits
            scales.view(torch.uint8).bitwise_and_(bits)
        return decode(codes, scales, self.layout.v_format, dtype)


def _gather(part: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """[num_blocks, kv_heads, slots, x] -> the rows of blocks [seqs, count], [seqs, kv_heads, count * slots, x].

    Moved as 8-byte words, which the alignment of every part allows.
    """
    seqs, count = blocks.shape
    heads, slots, row = part.shape[1:]
    if not row:
        return part.new_empty(seqs, heads, count * slots, 0)
    words = part.flatten(2).view(torch.int64).index_select(0, blocks.flatten())
    words = words.unflatten(0, (seqs, count)).transpose(1, 2).flatten(2)
    return words.view(part.dtype).unflatten(2, (-1, row))


def _row_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [seqs, heads, tiles, ROW_TILE, K] times b [seqs, heads, K, N], one fixed-shape product per head and tile.

    Columns are padded to whole vectors: MKL adds the rest of a row in another order when it splits it over threads.
    For the same reason float64 multiplies tile by tile instead of in one batch.
    """
    shape, tiles, n = a.shape[:-1], a.shape[2], b.shape[-1]
    a, b = a.flatten(0, 1), b.flatten(0, 1)
    if n % 16:
        b = torch.nn.functional.pad(b, (0, -n % 16))
    out = a.new_empty(a.shape[0], tiles, ROW_TILE, b.shape[-1])
    if a.dtype is torch.float64:
        for rows, cols, products in zip(a, b, out):
            for tile, product in zip(rows, products):
                torch.mm(tile, cols, out=product)
    elif tiles == 1:
        torch.bmm(a.squeeze(1), b, out=out.squeeze(1))
    else:
        for rows, cols, products in zip(a, b, out):
            torch.bmm(rows, cols.expand(tiles, -1, -1), out=products)
    return out[..., :n].view(*shape, n)


class _Softmax(NamedTuple):
    """Running softmax-weighted sum of V over key tiles (online softmax, arXiv:1805.02867).

    A lone tile of fewer than ROW_TILE rows has a state for these only: the rest of its products is never looked at.
    """

    max: torch.Tensor  # [seqs, heads, tiles, rows, 1]
    sum: torch.Tensor  # like max
    acc: torch.Tensor  # [seqs, heads, tiles, rows, v_dim]

    @classmethod
    def empty(cls, rows: tuple[int, ...], v_dim: int, like: torch.Tensor) -> "_Softmax":
        return cls(like.new_full((*rows, 1), -torch.inf), like.new_zeros((*rows, 1)), like.new_zeros((*rows, v_dim)))

    def of(self, seqs: slice) -> "_Softmax":
        """The same state, of some sequences."""
        return _Softmax(self.max[seqs], self.sum[seqs], self.acc[seqs])

    def add(self, scores: torch.Tensor, seen: torch.Tensor | None, v: torch.Tensor) -> None:
        """scores [seqs, heads, tiles, ROW_TILE, keys], overwritten; seen [seqs, tiles, rows, keys], None: all;
        v [seqs, heads, keys, v_dim]."""
        rows = self.max.shape[3]
        weights = scores[..., :rows, :]
        if seen is not None:
            weights.masked_fill_(~seen[:, None], -torch.inf)
        new_max = torch.maximum(self.max, weights.amax(-1, keepdim=True))
        # A row that has seen nothing keeps -inf; subtracting 0 instead makes its weights exact zeros, not NaN.
        base = new_max.masked_fill(new_max == -torch.inf, 0.0)
        weights.sub_(base).exp_()
        kept = torch.exp(self.max - base)
        self.sum.mul_(kept).add_(weights.sum(-1, keepdim=True))
        self.acc.mul_(kept).add_(_row_product(scores, v)[..., :rows, :])
        self.max.copy_(new_max)

    def result(self, sink_logits: torch.Tensor | None) -> torch.Tensor:
        """Like acc; rows that saw no key are 0. sink_logits: like max."""
        if sink_logits is None:
            return self.acc / self.sum.masked_fill(self.sum == 0, 1.0)
        top = torch.maximum(self.max, sink_logits)
        kept = torch.exp(self.max - top)
        return self.acc * kept / (self.sum * kept + torch.exp(sink_logits - top))


def _tiles(start: int, end: int) -> set[int]:
    return set(range(start // KEY_TILE * KEY_TILE, end, KEY_TILE)) if end > start else set()


class _QueryTile(NamedTuple):
    """Tokens of one sequence that are attended together, row ``first`` of the query at position ``position`` first."""

    position: int
    seq: int
    first: int


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
    device = query.device

    def source(arena: torch.Tensor, tables: torch.Tensor, offset: int, k_code: int, v_code: int) -> _Source:
        formats = KVFormat.from_code(k_code), KVFormat.from_code(v_code)
        layout = KVLayout(*formats, num_kv_heads, k_dim, v_dim, block_size)
        return _Source(tables, layout, _parts(arena, layout, offset))

    main = exact = source(arena, block_tables, layer_offset, k_format, v_format)
    if exact_arena is not None and exact_block_tables is not None:
        exact = source(exact_arena, exact_block_tables, exact_layer_offset, exact_k_format, exact_v_format)
    dtype = torch.float64 if query.dtype is torch.float64 else torch.float32

    def rows_of(x: torch.Tensor) -> torch.Tensor:
        """[seqs, n, q_heads, dim] -> [seqs, kv_heads, tiles, ROW_TILE, dim]; token-major, the last tile padded."""
        x = x.unflatten(2, (num_kv_heads, group)).transpose(1, 2).flatten(2, 3)
        return torch.nn.functional.pad(x, (0, 0, 0, -x.shape[2] % ROW_TILE)).unflatten(2, (-1, ROW_TILE))

    def basis(x: torch.Tensor) -> torch.Tensor:
        return rotate(x.to(dtype)) if main.layout.k_format.rotate else x.to(dtype)

    def attend(batch: list[_QueryTile], n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Query tiles of ``n`` tokens each, in the order of their positions. Returns their rows of the query, and the
        output of these."""
        positions = [tile.position for tile in batch]
        seqs = torch.tensor([tile.seq for tile in batch], device=device)
        tokens = torch.arange(n, device=device)
        rows = torch.tensor([tile.first for tile in batch], device=device)[:, None] + tokens
        q = rows_of(basis(query[rows]))
        i = (torch.tensor(positions, device=device)[:, None] + tokens).repeat_interleave(group, dim=1)
        height = min(ROW_TILE, n * group)
        # Padding rows stand before every key.
        i = torch.nn.functional.pad(i.int(), (0, -n * group % height), value=-1).view(len(batch), -1, height, 1)
        state = _Softmax.empty((*q.shape[:3], height), v_dim, q)

        def add_tile(q: torch.Tensor, source: _Source, start: int, part: slice, sinks: bool) -> None:
            """Add the keys of the tile at ``start`` to a part of the batch."""
            blocks = source.blocks(seqs[part], start)
            scores = _row_product(q[part], source.load_k(blocks, dtype).transpose(2, 3)).mul_(scale)
            if softcap:
                scores.div_(softcap).tanh_().mul_(softcap)
            seen = None
            earliest, last = positions[part.start], positions[part.stop - 1] + n - 1
            # Inside the window, before the residual and behind all sinks every row sees the whole tile.
            inside = start >= max(num_sink_tokens, num_exact_sinks) and (not window or last - start < window)
            if source is not main or not inside or start + KEY_TILE > earliest + 1 - residual_length:
                j = torch.arange(start, start + KEY_TILE, dtype=torch.int32, device=device)
                distance = i[part] - j
                seen = distance >= 0
                if sinks:
                    seen &= j < num_sink_tokens
                else:  # keys read with the plain query: those the window shows, less the sinks, which have their own
                    if window:
                        seen &= distance < window
                    if num_sink_tokens:
                        seen &= j >= num_sink_tokens
                if residual_length:
                    is_exact = (distance < residual_length) | (j < num_exact_sinks)
                    seen &= is_exact if source is exact else ~is_exact
            state.of(part).add(scores, seen, source.load_v(blocks, dtype, seen))

        def visit(q: torch.Tensor, source: _Source, starts: Callable[[int], set[int]], sinks: bool = False) -> None:
            """Add the tiles at ``starts(position)`` to every query tile; what lies between in the batch is masked."""
            wanted = [starts(position) for position in positions]
            for start in sorted(set().union(*wanted)):
                members = [index for index, own in enumerate(wanted) if start in own]
                add_tile(q, source, start, slice(members[0], members[-1] + 1), sinks)

        if num_sink_tokens:
            turned = q if query_sink is None else rows_of(basis(query_sink[rows]))

            def sink_tiles(position: int) -> set[int]:
                return _tiles(0, min(num_sink_tokens, position + n))

            if not residual_length or num_exact_sinks < num_sink_tokens:
                visit(turned, main, sink_tiles, sinks=True)
            if residual_length:
                visit(turned, exact, sink_tiles, sinks=True)

        def main_tiles(position: int) -> set[int]:
            return _tiles(first_in_window(position, window), position + n - residual_length)

        def exact_tiles(position: int) -> set[int]:
            left = first_in_window(position, window)
            recent = _tiles(max(left, position - residual_length + 1), position + n)
            return recent | _tiles(left, min(num_exact_sinks, position + n))

        visit(q, main, main_tiles)
        if residual_length:
            visit(q, exact, exact_tiles)

        logits = None
        if sink_logits is not None:
            logits = rows_of(sink_logits.to(dtype).view(1, 1, -1, 1).expand(1, n, -1, 1))[..., :height, :]
        out = state.result(logits).flatten(2, 3)[:, :, : n * group]
        out = rotate(out) if main.layout.v_format.rotate else out
        return rows, out.unflatten(2, (n, group)).transpose(1, 2).flatten(2, 3).to(query.dtype)

    tiles: dict[int, list[_QueryTile]] = {}  # by their number of tokens
    bounds = query_start_loc.tolist()
    for seq, length in enumerate(seq_lens.tolist()):
        begin, end = bounds[seq], bounds[seq + 1]
        for first in range(begin, end, QUERY_TILE):
            tile = _QueryTile(length - (end - first), seq, first)
            tiles.setdefault(min(QUERY_TILE, end - first), []).append(tile)

    heads = num_q_heads, num_kv_heads, k_dim, v_dim
    out = query.new_zeros(query.shape[0], num_q_heads, v_dim)
    for n, alike in tiles.items():
        alike.sort()
        together = 1
        if n * group <= ROW_TILE:
            room = workspace_bytes(*heads, dtype.itemsize)
            together = max(1, room // _temporary_bytes(1, n, heads, dtype.itemsize))
        for first in range(0, len(alike), together):
            rows, values = attend(alike[first : first + together], n)
            out[rows] = values
    return out
