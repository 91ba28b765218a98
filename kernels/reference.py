"""The ops in plain torch: they serve where no faster back end does, and every other back end is held to them.

The formula itself is in `lean.kernels.naive`; here attention is computed in bounded memory, tile by tile.

Row-invariant: keys are visited in tiles that start at multiples of KEY_TILE, and every product has a fixed shape of
ROW_TILE rows. So neither the chunk, nor the batch, nor a neighbour's length changes the order in which the numbers of a
row are added, as long as the BLAS treats the rows of one shape alike, which the tests check. A tile that a row does not
see leaves its state unchanged to the bit. (One exception: a non-finite V also reaches the rows before it in its chunk;
the engine stops such a request anyway.)

Memory: beside its output and the rotated query one call needs at most `workspace_bytes`, at any context length.
"""

import os
from collections.abc import Callable
from typing import NamedTuple

import torch

from lean.kernels.call import AttentionCall, EncodeCall, WriteCall
from lean.kernels.layout import KVLayout, first_in_window
from lean.kernels.parts import gather, k_parts, parts_of, v_of
from lean.quant import CHANNEL_TOKENS, decode, decode_channels, encode, encode_channels, rotate, rotate_back
from lean.quant.codecs import RAW_DTYPES

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


def kv_write(call: WriteCall) -> None:
    """Encode key [tokens, kv_heads, k_dim] and value [..., v_dim] into their slots; negative slots are skipped."""
    layout = call.layout
    parts = parts_of(call.arena, layout, call.layer_offset)
    key, value, slot_mapping = call.key, call.value, call.slot_mapping
    padding = slot_mapping < 0
    if padding.any():
        key, value, slot_mapping = (x[~padding] for x in (key, value, slot_mapping))
    block, slot = slot_mapping // call.block_size, slot_mapping % call.block_size
    encoded: tuple[torch.Tensor, ...]
    if layout.v_in_k:
        encoded = encode(key, layout.k_stored)
    elif layout.k_format.by_channel:
        encoded, parts = encode(value, layout.v_format), parts[2:]
    elif layout.k_format == layout.v_format and layout.k_dim == layout.v_dim:
        codes, scales = encode(torch.cat((key, value), dim=1), layout.k_format)
        (k_codes, v_codes), (k_scales, v_scales) = codes.chunk(2, dim=1), scales.chunk(2, dim=1)
        encoded = k_codes, k_scales, v_codes, v_scales
    else:
        encoded = *encode(key, layout.k_format), *encode(value, layout.v_format)
    for part, rows in zip(parts, encoded):
        if rows.numel():
            part[block, :, slot] = rows


def encode_keys(call: EncodeCall) -> None:
    """Encode K by channel of the groups of tokens that end at one of the slots; see `lean.kernels.ops.encode_keys`."""
    ends = (call.slot_mapping >= 0) & (call.slot_mapping % CHANNEL_TOKENS == CHANNEL_TOKENS - 1)
    slots, exact_slots = (own[ends] for own in (call.slot_mapping, call.exact_slot_mapping))
    source, _ = k_parts(call.exact_arena, call.exact_layout, call.exact_layer_offset)
    tokens = exact_slots[:, None] + torch.arange(1 - CHANNEL_TOKENS, 1, device=slots.device)
    copies = source[tokens // call.block_size, :, tokens % call.block_size].transpose(1, 2).contiguous()
    y = copies.view(RAW_DTYPES[call.exact_layout.k_format.name])  # [groups, kv_heads, CHANNEL_TOKENS, k_dim]
    encoded = encode_channels(y, call.layout.k_format)
    codes, channels = k_parts(call.arena, call.layout, call.layer_offset)
    block, group = slots // call.block_size, slots % call.block_size // CHANNEL_TOKENS
    codes.unflatten(2, (-1, CHANNEL_TOKENS))[block, :, group] = encoded[0]
    channels[block, :, group] = encoded[1]


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
        """K [seqs, kv_heads, KEY_TILE, k_dim], decoded, in the stored basis; the caller masks unwritten slots."""
        codes, scales = (gather(part, blocks) for part in self.parts[:2])
        if self.layout.k_format.by_channel:
            return decode_channels(codes, scales, self.layout.k_format, dtype)
        return decode(codes, scales, self.layout.k_stored, dtype)

    def load_v(self, blocks: torch.Tensor, dtype: torch.dtype, seen: torch.Tensor | None) -> torch.Tensor:
        """V [seqs, kv_heads, KEY_TILE, v_dim], decoded; zeros where no row of ``seen`` [seqs, tiles, rows, KEY_TILE]
        is True."""
        codes, scales = (gather(part, blocks) for part in self.parts[2:])
        if seen is not None:
            # Slots that no row sees may hold NaN, and 0 x NaN is NaN. Bits 0 are 0 in every format.
            bits = seen.flatten(1, 2).any(1).to(torch.uint8).neg_()[:, None, :, None]
            codes &= bits
            scales.view(torch.uint8).bitwise_and_(bits)
        return decode(*v_of(self.layout, codes, scales), self.layout.v_format, dtype)


def _row_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [seqs, heads, tiles, ROW_TILE, K] times b [seqs, heads, K, N], one fixed-shape product per head and tile.

    Columns are padded to whole vectors: MKL adds a remainder in another order when it splits a row over threads. For
    the same reason float64 multiplies tile by tile instead of in one batch.
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

    A single tile of fewer than ROW_TILE rows has a state for these rows only; the rest of its products is unused.
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
    """Where the key tiles start that hold the keys start .. end."""
    return set(range(start // KEY_TILE * KEY_TILE, end, KEY_TILE)) if end > start else set()


class _QueryTile(NamedTuple):
    """Tokens of one sequence that are attended together. ``first`` is the first row of the query, ``position`` its
    position in the sequence."""

    position: int
    seq: int
    first: int


class _Batch:
    """Query tiles of ``n`` tokens each, in the order of their positions, that are attended together."""

    def __init__(self, call: AttentionCall, main: _Source, exact: _Source, tiles: list[_QueryTile], n: int) -> None:
        device, group = call.query.device, call.query.shape[1] // call.num_kv_heads
        self.call, self.main, self.exact, self.n, self.group = call, main, exact, n, group
        self.dtype = _computed_in(call.query)
        self.positions = [tile.position for tile in tiles]
        self.seqs = torch.tensor([tile.seq for tile in tiles], device=device)
        tokens = torch.arange(n, device=device)
        self.rows = torch.tensor([tile.first for tile in tiles], device=device)[:, None] + tokens
        self.q = self._in_row_tiles(self._in_stored_basis(call.query[self.rows]))
        self.height = min(ROW_TILE, n * group)
        i = (torch.tensor(self.positions, device=device)[:, None] + tokens).repeat_interleave(group, dim=1)
        # Padding rows stand before every key.
        i = torch.nn.functional.pad(i.int(), (0, -n * group % self.height), value=-1)
        self.i = i.view(len(tiles), -1, self.height, 1)
        self.state = _Softmax.empty((*self.q.shape[:3], self.height), call.v_dim, self.q)

    def attend(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows of the query, int64 [tiles, n], and their output, [tiles, n, num_q_heads, v_dim]."""
        call = self.call
        if call.num_sink_tokens:
            self._add_sinks()
        self._add_tiles(self.q, self.main, self._main_tiles)
        if call.residual_length:
            self._add_tiles(self.q, self.exact, self._exact_tiles)
        logits = None
        if call.sink_logits is not None:
            logits = call.sink_logits.to(self.dtype).view(1, 1, -1, 1).expand(1, self.n, -1, 1)
            logits = self._in_row_tiles(logits)[..., : self.height, :]
        out = self.state.result(logits).flatten(2, 3)[:, :, : self.n * self.group]
        layout = self.main.layout
        out = rotate_back(out, layout.v_rotation_size) if layout.v_format.rotate else out
        out = out.unflatten(2, (self.n, self.group)).transpose(1, 2).flatten(2, 3)
        return self.rows, out.to(call.query.dtype)

    def _in_row_tiles(self, x: torch.Tensor) -> torch.Tensor:
        """[seqs, n, q_heads, dim] -> [seqs, kv_heads, tiles, ROW_TILE, dim]; token-major, the last tile padded."""
        x = x.unflatten(2, (self.call.num_kv_heads, self.group)).transpose(1, 2).flatten(2, 3)
        return torch.nn.functional.pad(x, (0, 0, 0, -x.shape[2] % ROW_TILE)).unflatten(2, (-1, ROW_TILE))

    def _in_stored_basis(self, x: torch.Tensor) -> torch.Tensor:
        return rotate(x.to(self.dtype)) if self.main.layout.k_format.rotate else x.to(self.dtype)

    def _add_sinks(self) -> None:
        """Add the sink keys, read with their own query."""
        call, q = self.call, self.q
        if call.query_sink is not None:
            q = self._in_row_tiles(self._in_stored_basis(call.query_sink[self.rows]))
        if not call.residual_length or call.num_exact_sinks < call.num_sink_tokens:
            self._add_tiles(q, self.main, self._sink_tiles, sinks=True)
        if call.residual_length:
            self._add_tiles(q, self.exact, self._sink_tiles, sinks=True)

    def _sink_tiles(self, position: int) -> set[int]:
        return _tiles(0, min(self.call.num_sink_tokens, position + self.n))

    def _main_tiles(self, position: int) -> set[int]:
        return _tiles(first_in_window(position, self.call.window), position + self.n - self.call.residual_length)

    def _exact_tiles(self, position: int) -> set[int]:
        left = first_in_window(position, self.call.window)
        recent = _tiles(max(left, position - self.call.residual_length + 1), position + self.n)
        return recent | _tiles(left, min(self.call.num_exact_sinks, position + self.n))

    def _add_tiles(
        self, q: torch.Tensor, source: _Source, starts: Callable[[int], set[int]], sinks: bool = False
    ) -> None:
        """Add the key tiles at ``starts(position)`` to every query tile. A query tile between two others that need a
        key tile takes part, masked."""
        wanted = [starts(position) for position in self.positions]
        for start in sorted(set().union(*wanted)):
            members = [index for index, own in enumerate(wanted) if start in own]
            self._add_tile(q, source, start, slice(members[0], members[-1] + 1), sinks)

    def _add_tile(self, q: torch.Tensor, source: _Source, start: int, part: slice, sinks: bool) -> None:
        """Add the keys of the tile at ``start`` to a part of the batch."""
        call = self.call
        blocks = source.blocks(self.seqs[part], start)
        scores = _row_product(q[part], source.load_k(blocks, self.dtype).transpose(2, 3)).mul_(call.scale)
        if call.softcap:
            scores.div_(call.softcap).tanh_().mul_(call.softcap)
        seen = self._seen(source, start, part, sinks)
        self.state.of(part).add(scores, seen, source.load_v(blocks, self.dtype, seen))

    def _seen(self, source: _Source, start: int, part: slice, sinks: bool) -> torch.Tensor | None:
        """Which keys of a tile the rows see in ``source``, bool [seqs, tiles, rows, KEY_TILE]; None: all of them."""
        call = self.call
        earliest, last = self.positions[part.start], self.positions[part.stop - 1] + self.n - 1
        # Inside the window, before the residual and behind all sinks every row sees the whole tile.
        behind_sinks = start >= max(call.num_sink_tokens, call.num_exact_sinks)
        inside = behind_sinks and (not call.window or last - start < call.window)
        if source is self.main and inside and start + KEY_TILE <= earliest + 1 - call.residual_length:
            return None
        j = torch.arange(start, start + KEY_TILE, dtype=torch.int32, device=self.i.device)
        distance = self.i[part] - j
        seen = distance >= 0
        if sinks:
            seen &= j < call.num_sink_tokens
        else:  # the keys inside the window but for the sinks, which are read with their own query
            if call.window:
                seen &= distance < call.window
            if call.num_sink_tokens:
                seen &= j >= call.num_sink_tokens
        if call.residual_length:
            is_exact = (distance < call.residual_length) | (j < call.num_exact_sinks)
            seen &= is_exact if source is self.exact else ~is_exact
        return seen


def _computed_in(query: torch.Tensor) -> torch.dtype:
    return torch.float64 if query.dtype is torch.float64 else torch.float32


def _query_tiles(call: AttentionCall) -> dict[int, list[_QueryTile]]:
    """All rows of all sequences in query tiles, by the number of tokens in a tile, in the order of their positions."""
    tiles: dict[int, list[_QueryTile]] = {}
    bounds = call.query_start_loc.tolist()
    for seq, length in enumerate(call.seq_lens.tolist()):
        begin, end = bounds[seq], bounds[seq + 1]
        for first in range(begin, end, QUERY_TILE):
            tile = _QueryTile(length - (end - first), seq, first)
            tiles.setdefault(min(QUERY_TILE, end - first), []).append(tile)
    return {n: sorted(alike) for n, alike in tiles.items()}


def paged_attention(call: AttentionCall) -> torch.Tensor:
    """See `lean.kernels.ops.paged_attention`, which checks the arguments, and `lean.kernels.naive`, the formula."""
    query = call.query
    main = exact = _Source(call.block_tables, call.layout, parts_of(call.arena, call.layout, call.layer_offset))
    if call.exact_arena is not None and call.exact_block_tables is not None:
        parts = parts_of(call.exact_arena, call.exact_layout, call.exact_layer_offset)
        exact = _Source(call.exact_block_tables, call.exact_layout, parts)
    heads = query.shape[1], call.num_kv_heads, query.shape[2], call.v_dim
    itemsize = _computed_in(query).itemsize
    out = query.new_zeros(*query.shape[:2], call.v_dim)
    for n, alike in _query_tiles(call).items():
        together = 1
        if n * (query.shape[1] // call.num_kv_heads) <= ROW_TILE:
            room = workspace_bytes(*heads, itemsize)
            together = max(1, room // _temporary_bytes(1, n, heads, itemsize))
        for first in range(0, len(alike), together):
            rows, values = _Batch(call, main, exact, alike[first : first + together], n).attend()
            out[rows] = values
    return out
