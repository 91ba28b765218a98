"""Attention in float64 from the formulas alone, and caches to try the ops on.

`expected` knows positions and no blocks. It takes one function from lean, `quantize_dequantize`, the value of a vector
that went through a cache. It shares no code with `lean.kernels.naive`. `PagedCache` is the worst cache an engine may
have: block ids are shuffled, and unwritten slots, evicted blocks, the null block and other layers hold poison.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from lean.kernels.layout import KVLayout
from lean.kernels.ops import LayerPool, encode_keys, kv_write, paged_attention
from lean.quant import (
    CHANNEL_TOKENS,
    KVFormat,
    decode_channels,
    encode_channels,
    parse_kv_dtype,
    quantize_dequantize,
    raw_format,
    rotate,
    rotate_back,
)

KV_DTYPES = ("fp64", "fp32", "bf16", "fp16", "int8", "fp8", "int4", "k8v4", "k=int8,v=fp8", "k6v4", "k=int5,v=int3")
# 0xFF bytes are NaN in every float format, 0x7F in e4m3 and fp16 (huge in the others); 0x7E00 is the usual fp16 NaN.
FILLS = {"zeros": (0,), "0x7f": (0x7F,), "0xff": (0xFF,), "fp16 nan": (0x00, 0x7E)}


@dataclass(frozen=True)
class Rule:
    """Which keys a row sees, and which of them it reads exact; the names are those of `paged_attention`."""

    window: int = 0
    num_sink_tokens: int = 0
    residual_length: int = 0
    num_exact_sinks: int = 0
    softcap: float = 0.0
    scale: float = 0.25


RULES = {
    "full": Rule(),
    "window": Rule(window=70),
    "window, sinks": Rule(window=70, num_sink_tokens=5),
    "residual": Rule(residual_length=48, num_exact_sinks=4),
    "sliding layer, residual": Rule(window=70, residual_length=32, num_exact_sinks=40),
    "everything": Rule(90, num_sink_tokens=5, residual_length=48, num_exact_sinks=5, softcap=8.0),
}


@dataclass(frozen=True)
class Heads:
    """v_in_k: V is the first v_dim numbers of K, and only K is stored."""

    num_q_heads: int = 6
    num_kv_heads: int = 2
    k_dim: int = 32
    v_dim: int = 32
    v_in_k: bool = False


@dataclass(frozen=True)
class Tokens:
    """The inputs of one layer for the tokens of one sequence, each [tokens, heads, dim]."""

    query: torch.Tensor
    query_sink: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    @classmethod
    def random(cls, count: int, heads: Heads, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> "Tokens":
        """Queries large enough that attention is far from uniform; keys and values off centre, as real ones are."""
        generator = torch.Generator().manual_seed(seed)

        def normal(num_heads: int, dim: int) -> torch.Tensor:
            return torch.randn(count, num_heads, dim, generator=generator, dtype=torch.float64)

        query, query_sink = (1.5 * normal(heads.num_q_heads, heads.k_dim) for _ in range(2))
        key, value = (
            normal(heads.num_kv_heads, dim) + 2 * torch.randn(dim, generator=generator, dtype=torch.float64)
            for dim in (heads.k_dim, heads.v_dim)
        )
        value = key[..., : heads.v_dim] if heads.v_in_k else value
        return cls(query.to(dtype), query_sink.to(dtype), key.to(dtype), value.to(dtype))

    def __len__(self) -> int:
        return len(self.query)


def expected(
    tokens: Tokens,
    kv_dtype: str,
    rule: Rule,
    start: int = 0,
    stop: int | None = None,
    sink_logits: torch.Tensor | None = None,
    v_in_k: bool = False,
) -> torch.Tensor:
    """float64 [stop - start, num_q_heads, v_dim]: the rows at positions start .. stop, each over the keys it sees."""
    stop = len(tokens) if stop is None else stop
    i, j = torch.arange(start, stop)[:, None], torch.arange(stop)[None]
    visible = j <= i
    if rule.window:
        visible = visible & ((i - j < rule.window) | (j < rule.num_sink_tokens))
    exact = torch.zeros_like(visible)
    if rule.residual_length:
        exact = (i - j < rule.residual_length) | (j < rule.num_exact_sinks)

    def cached(formats: Sequence[KVFormat]) -> list[torch.Tensor]:
        if v_in_k:
            key = latent_through_cache(tokens.key[:stop].double(), tokens.value.shape[2], formats[0])
            return [key, key[..., : tokens.value.shape[2]]]
        if formats[0].by_channel:
            return [
                by_channel(tokens.key[:stop], formats[0]),
                quantize_dequantize(tokens.value[:stop].double(), formats[1]),
            ]
        return [quantize_dequantize(x[:stop].double(), f) for x, f in zip((tokens.key, tokens.value), formats)]

    formats = parse_kv_dtype(kv_dtype)
    key, value = cached(formats)
    exact_key, exact_value = cached(exact_formats(formats, tokens.key.dtype))
    group = tokens.query.shape[1] // tokens.key.shape[1]
    rows = []
    for head in range(tokens.query.shape[1]):
        kv_head = head // group
        query, query_sink = (x[start:stop, head].double() for x in (tokens.query, tokens.query_sink))
        by_part = [
            torch.where(j < rule.num_sink_tokens, query_sink @ k[:, kv_head].T, query @ k[:, kv_head].T)
            for k in (key, exact_key)
        ]
        scores = torch.where(exact, by_part[1], by_part[0]) * rule.scale
        if rule.softcap:
            scores = rule.softcap * torch.tanh(scores / rule.softcap)
        scores = scores.masked_fill(~visible, -torch.inf)
        if sink_logits is not None:
            scores = torch.cat((scores, sink_logits[head].double().expand(len(scores), 1)), dim=1)
        p = torch.softmax(scores, dim=1)[:, :stop]
        rows.append((p * ~exact) @ value[:, kv_head] + (p * exact) @ exact_value[:, kv_head])
    return torch.stack(rows, dim=1)


def by_channel(key: torch.Tensor, fmt: KVFormat) -> torch.Tensor:
    """float64 keys [tokens, heads, dim] that went through a cache by channel; NaN in the group that is not complete."""
    groups = quantize_channels(key[: len(key) // CHANNEL_TOKENS * CHANNEL_TOKENS], fmt)
    return torch.cat((groups, torch.full_like(key[len(groups) :], torch.nan, dtype=torch.float64)))


def quantize_channels(key: torch.Tensor, fmt: KVFormat) -> torch.Tensor:
    """Keys of whole groups, encoded from exact copies in their own dtype and decoded, in float64."""
    copies = rotate(key if key.dtype is torch.float64 else key.float()).to(key.dtype)
    groups = copies.unflatten(0, (-1, CHANNEL_TOKENS)).transpose(1, 2)  # [groups, heads, CHANNEL_TOKENS, dim]
    codes, channels = encode_channels(groups, fmt)
    values = decode_channels(codes, channels[..., None, :], fmt, torch.float64)
    return rotate_back(values.transpose(1, 2).flatten(0, 1).contiguous())


def latent_through_cache(key: torch.Tensor, v_dim: int, fmt: KVFormat) -> torch.Tensor:
    """float64 keys that went through a cache in which V lies in K: V and the rest are two vectors, rotated as one."""
    plain = replace(fmt, rotate=False)
    y = rotate(key.float()).double() if fmt.rotate else key  # the recipe rotates in float32
    y = torch.cat([quantize_dequantize(part, plain) for part in (y[..., :v_dim], y[..., v_dim:])], dim=-1)
    return rotate_back(y) if fmt.rotate else y


def exact_formats(formats: Sequence[KVFormat], dtype: torch.dtype) -> tuple[KVFormat, KVFormat]:
    """Formats of the exact pool beside a pool of ``formats``: the model's dtype in the same basis."""
    k_format, v_format = (replace(raw_format(dtype), rotate=f.rotate) for f in formats)
    return k_format, v_format


def filled(shape: tuple[int, int], fill: str) -> torch.Tensor:
    """A uint8 arena that holds ``fill`` everywhere."""
    pattern = torch.tensor(FILLS[fill], dtype=torch.uint8)
    return pattern.repeat(shape[0], shape[1] // len(pattern))


def shuffled_tables(capacities: Sequence[int], block_size: int, seed: int) -> tuple[torch.Tensor, int]:
    """int32 block tables for sequences of these capacities, in no order and with unused blocks, and the block count."""
    counts = [-(-capacity // block_size) for capacity in capacities]
    ids = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(seed)).int() + 1
    tables = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    for row, own in zip(tables, ids.split([*counts, 3])):
        row[: len(own)] = own
    return tables, len(ids) + 1


Part = tuple[int, Tokens, int, int]  # sequence, its tokens, and start .. stop, the positions of one step


class PagedCache:
    """The pools of one layer, which lies in the middle of three, for sequences of given capacities."""

    def __init__(
        self,
        heads: Heads,
        kv_dtype: str,
        capacities: Sequence[int],
        *,
        block_size: int = 16,
        exact_dtype: torch.dtype | None = None,
        fill: str = "0xff",
        seed: int = 0,
    ) -> None:
        self.fill = fill
        formats = [parse_kv_dtype(kv_dtype)]
        if exact_dtype is not None:
            formats.append(exact_formats(formats[0], exact_dtype))
        self.pools: list[LayerPool] = []
        self.tables: list[torch.Tensor] = []
        for offset, pair in enumerate(formats):
            tables, num_blocks = shuffled_tables(capacities, block_size, seed + offset)
            layout = KVLayout(*pair, heads.num_kv_heads, heads.k_dim, heads.v_dim, block_size, heads.v_in_k)
            self.pools.append(LayerPool(filled((num_blocks, 3 * layout.nbytes), fill), layout, layout.nbytes))
            self.tables.append(tables)

    def write(self, parts: Sequence[Part]) -> None:
        """Write K and V of every part into all pools, in one call each."""
        key, value = (
            torch.cat([getattr(t, name)[start:stop] for _, t, start, stop in parts]) for name in ("key", "value")
        )
        positions = [(sequence, torch.arange(start, stop)) for sequence, _, start, stop in parts]
        written = []
        for pool, tables in zip(self.pools, self.tables):
            size = pool.layout.block_size
            slots = [tables[sequence, i // size].long() * size + i % size for sequence, i in positions]
            written.append(torch.cat(slots))
            kv_write(pool, key, value, written[-1])
        if self.pools[0].layout.k_format.by_channel:
            encode_keys(*self.pools, *written)

    def attend(self, parts: Sequence[Part], rule: Rule, sink_logits: torch.Tensor | None = None) -> list[torch.Tensor]:
        """The rows of every part, from one call."""
        query, query_sink = (
            torch.cat([getattr(t, name)[start:stop] for _, t, start, stop in parts]) for name in ("query", "query_sink")
        )
        rows = [stop - start for _, _, start, stop in parts]
        sequences, seq_lens = [part[0] for part in parts], [part[3] for part in parts]
        return list(self.attend_packed(query, query_sink, sequences, rows, seq_lens, rule, sink_logits).split(rows))

    def attend_packed(
        self,
        query: torch.Tensor,
        query_sink: torch.Tensor | None,
        sequences: list[int],
        query_lens: list[int],
        seq_lens: list[int],
        rule: Rule,
        sink_logits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        exact = len(self.pools) > 1 and rule.residual_length > 0
        optional = {"exact": self.pools[1], "exact_block_tables": self.tables[1][sequences]} if exact else {}
        starts = torch.tensor([0, *query_lens]).cumsum(0).int()
        lengths = torch.tensor(seq_lens, dtype=torch.int32)
        optional |= {"query_sink": query_sink, "sink_logits": sink_logits, **vars(rule)}
        return paged_attention(query, self.pools[0], self.tables[0][sequences], starts, lengths, **optional)

    def step(self, parts: Sequence[Part], rule: Rule, sink_logits: torch.Tensor | None = None) -> list[torch.Tensor]:
        """One step of an engine."""
        self.write(parts)
        return self.attend(parts, rule, sink_logits)

    def run(self, tokens: Tokens, rule: Rule, chunk: int, *, start: int = 0, evict: bool = False) -> torch.Tensor:
        """The rows of the first sequence from ``start`` on, ``chunk`` tokens at a time."""
        rows = []
        for first in range(start, len(tokens), chunk):
            if evict:
                self.evict(first, rule)
            rows += self.step([(0, tokens, first, min(first + chunk, len(tokens)))], rule)
        return torch.cat(rows)

    def evict(self, position: int, rule: Rule) -> None:
        """Give up the first sequence's blocks that no row from ``position`` on may read: table entries become the null
        block, bytes poison."""
        kept = [(rule.window, rule.num_sink_tokens), (rule.residual_length, rule.num_exact_sinks)]
        for pool, tables, (window, sinks) in zip(self.pools, self.tables, kept):
            size = pool.layout.block_size
            for block in range(tables.shape[1] if window else 0):
                if block * size + size - 1 <= position - window and block * size >= sinks:
                    pool.arena[tables[0, block]] = filled((1, pool.arena.shape[1]), self.fill)
                    tables[0, block] = 0


def error(actual: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference, relative to the largest number wanted. NaN if any number is NaN."""
    return ((actual.double() - wanted).abs().max() / wanted.abs().max()).item()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal to the bit, the sign of zeros included; NaN is never right."""
    if a.shape != b.shape or a.dtype != b.dtype or bool(a.isnan().any()):
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
