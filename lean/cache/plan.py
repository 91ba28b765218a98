"""Cache groups and their pools: which layers share a rule, and what a block of each pool holds."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from lean.cache.states import StateShape, bytes_of
from lean.config import EngineConfig
from lean.errors import ConfigError
from lean.kernels.layout import KVLayout, blocks_for
from lean.layer_formats import layer_formats
from lean.quant.formats import BF16, CHANNEL_TOKENS, KVFormat, describe


@dataclass(frozen=True)
class LayerShape:
    """The shape of one attention layer. window 0 is full attention.

    kv_layer: an earlier layer of the same shape and window whose K/V this layer reads; None: it has its own.
    v_in_k: V is the first v_dim numbers of K and is not stored a second time (latent attention).
    """

    num_q_heads: int
    num_kv_heads: int
    k_dim: int
    v_dim: int
    window: int = 0
    kv_layer: int | None = None
    v_in_k: bool = False


@dataclass(frozen=True)
class PoolSpec:
    """A block pool before it has a size: the layers that write it, in order, and which tokens it keeps."""

    layers: tuple[int, ...]
    layouts: tuple[KVLayout, ...]
    window: int
    num_sink_tokens: int
    exact: bool  # holds the exact copies beside a quantized pool

    @cached_property
    def block_bytes(self) -> int:
        return sum(layout.nbytes for layout in self.layouts)

    @cached_property
    def bytes_per_token(self) -> int:
        return sum(layout.bytes_per_token for layout in self.layouts)

    @cached_property
    def bytes_per_token_bf16(self) -> int:
        """Bytes of one token in this pool if it were bf16."""
        return sum(replace(layout, k_format=BF16, v_format=BF16).bytes_per_token for layout in self.layouts)

    def offset(self, layer: int) -> int:
        """Byte offset of ``layer``'s part in a block."""
        return sum(layout.nbytes for layout in self.layouts[: self.layers.index(layer)])

    def most_blocks(self, num_tokens: int, block_size: int) -> int:
        """The most blocks that a sequence of ``num_tokens`` holds in this pool while it decodes."""
        blocks = blocks_for(num_tokens, block_size)
        if not self.window:
            return blocks
        return min(blocks, blocks_for(self.num_sink_tokens, block_size) + _most_blocks_spanned(self.window, block_size))

    def tail_blocks(self, block_size: int) -> int:
        """The most blocks of a bounded pool that a hit of the prefix cache needs; 0 in an unbounded one."""
        if not self.window:
            return 0
        return blocks_for(self.num_sink_tokens, block_size) + blocks_for(self.window - 1, block_size)

    @cached_property
    def name(self) -> str:
        k, v = self.layouts[0].k_format, self.layouts[0].v_format
        return describe(replace(k, rotate=False), replace(v, rotate=False)) if self.exact else describe(k, v)


@dataclass(frozen=True)
class CacheGroup:
    """Layers that share window, sinks, formats and residual. They own one pool, or two with a residual.

    Attributes:
        layers: those that have K/V of their own.
        window: a token sees itself and the window - 1 tokens before it; 0: all.
        num_sink_tokens: number of initial tokens that stay visible beyond the window.
        residual_length, num_exact_sinks: numbers of recent and initial tokens read from the exact pool; 0 without one.
        pool_id, exact_pool_id: indices into the plan's pools.
    """

    layers: tuple[int, ...]
    window: int
    num_sink_tokens: int
    residual_length: int
    num_exact_sinks: int
    pool_id: int
    exact_pool_id: int | None


@dataclass(frozen=True)
class CachePlan:
    """All groups and pools of a model under one configuration.

    ``window`` is the user's, 0 where it bounds no layer. ``notes`` are lines that the user should see. ``states``: of
    layers that keep states in the place of K/V.
    """

    groups: tuple[CacheGroup, ...]
    pools: tuple[PoolSpec, ...]
    block_size: int
    window: int = 0
    notes: tuple[str, ...] = ()
    states: tuple[StateShape, ...] = ()

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of the states of one sequence, whatever its length."""
        return bytes_of(self.states)

    @cached_property
    def tail_bytes(self) -> int:
        """Bytes of a tail: what a hit of the prefix cache needs beside the blocks of unbounded pools."""
        blocks = sum(pool.tail_blocks(self.block_size) * pool.block_bytes for pool in self.pools)
        return blocks + self.state_bytes

    @property
    def bounded(self) -> bool:
        """Whether every layer has a window: the memory of a sequence then does not depend on its length."""
        return all(group.window for group in self.groups)

    @property
    def formats(self) -> tuple[tuple[KVFormat, ...], tuple[KVFormat, ...]]:
        """The K formats and the V formats in use, exact pools excluded."""
        layouts = [self.pools[group.pool_id].layouts[0] for group in self.groups]
        k, v = ([layout.k_format for layout in layouts], [layout.v_format for layout in layouts])
        return tuple(dict.fromkeys(k)), tuple(dict.fromkeys(v))

    @property
    def residual_length(self) -> int:
        return max(group.residual_length for group in self.groups)

    @property
    def num_exact_sinks(self) -> int:
        return max(group.num_exact_sinks for group in self.groups)

    @property
    def num_sink_tokens(self) -> int:
        return max(group.num_sink_tokens for group in self.groups)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all layers, exact pools excluded."""
        return sum(pool.bytes_per_token for pool in self.pools if not pool.exact)

    @property
    def bytes_per_token_bf16(self) -> int:
        return sum(pool.bytes_per_token_bf16 for pool in self.pools if not pool.exact)

    def bytes_at(self, num_tokens: int) -> int:
        """Bytes that one sequence of ``num_tokens`` occupies: its blocks, exact pools included, and its states."""
        return self.state_bytes + sum(
            pool.most_blocks(num_tokens, self.block_size) * pool.block_bytes for pool in self.pools
        )

    def bytes_at_bf16(self, num_tokens: int) -> int:
        """Bytes of the same tokens in bf16, without rounding to blocks, and of the states."""
        return self.state_bytes + sum(
            min(num_tokens, group.window + group.num_sink_tokens if group.window else num_tokens)
            * self.pools[group.pool_id].bytes_per_token_bf16
            for group in self.groups
        )


@dataclass(frozen=True)
class _Rule:
    """What layers must share to be one group."""

    window: int
    num_sink_tokens: int
    k_format: KVFormat
    v_format: KVFormat
    residual_length: int
    num_exact_sinks: int


def _layer_rules(
    layers: Sequence[LayerShape], config: EngineConfig, dtype_format: KVFormat
) -> tuple[list[_Rule], list[str]]:
    """The rule of every layer, and notes for the user. Raises ConfigError where a head_dim does not fit its format."""
    formats = layer_formats(len(layers), config.kv_dtype, config.kv_layers, config.kv_skip_layers, dtype_format)
    length, sinks = config.residual(any(fmt.quantized for pair in formats for fmt in pair))
    rules = []
    covered: set[int] = set()  # windows that the residual covers
    for index, (layer, (k, v)) in enumerate(zip(layers, formats)):
        if layer.v_in_k:
            v = k
            if not k.supports_prefix(layer.k_dim, layer.v_dim):
                raise ConfigError(
                    f"layer {index}: V is the first {layer.v_dim} numbers of a latent vector of {layer.k_dim}, which "
                    f"{k.name} cannot read alone: use --kv-dtype bf16 or fp8"
                )
        for name, fmt, dim in (("K", k, layer.k_dim), ("V", v, layer.v_dim)):
            if not fmt.supports(dim):
                raise ConfigError(
                    f"layer {index}: {name} head_dim {dim} does not fit {fmt.name}, which needs a multiple of "
                    f"{fmt.dim_multiple}: use --kv-dtype {'bf16 or fp32' if dim % 8 else 'int8 or bf16'}"
                )
        window = layer.window or config.window or 0
        seen = sinks if window and not layer.window else 0
        exact = length if k.quantized or v.quantized else 0
        if window and window <= exact:  # the residual covers the window: quantized copies would never be read
            k = v = dtype_format
            exact = 0
            covered.add(window)
        if k.by_channel:
            _check_groups(k, config.block_size, length)
        rules.append(_Rule(window, seen, k, v, exact, sinks if exact else 0))
    for index, layer in enumerate(layers):
        if layer.kv_layer is not None and rules[index] != rules[layer.kv_layer]:
            raise ConfigError(
                f"layer {index} reads the K/V of layer {layer.kv_layer}: give both the same format, in --kv-layers and "
                "--kv-skip-layers too"
            )
    notes = _latent_notes(layers, formats) + [
        f"layers with window {window} stay {dtype_format.name}: the residual of {length} tokens covers the window"
        for window in sorted(covered)
    ]
    return rules, notes


def _check_groups(k_format: KVFormat, block_size: int, residual_length: int) -> None:
    """Check the options of a K format whose tokens are encoded together. Raises ConfigError.

    The residual keeps every token exact until its group is complete, and the exact pool keeps the block of an
    incomplete group.
    """
    why = f"{k_format.name} encodes the keys of {CHANNEL_TOKENS} tokens together"
    if block_size % CHANNEL_TOKENS:
        raise ConfigError(f"{why}: use a --block-size that is a multiple of {CHANNEL_TOKENS}, not {block_size}")
    if residual_length < CHANNEL_TOKENS:
        raise ConfigError(
            f"{why} and reads these tokens unquantized before: use a --kv-residual-length of at least "
            f"{CHANNEL_TOKENS}, not {residual_length}"
        )


def _latent_notes(layers: Sequence[LayerShape], formats: Sequence[tuple[KVFormat, KVFormat]]) -> list[str]:
    """One line where a V format was chosen for layers that store no V."""
    pairs = {pair for layer, pair in zip(layers, formats) if layer.v_in_k and pair[0] != pair[1]}
    return [
        f"latent vectors hold K and V in one format: {describe(*pair)} is {pair[0].name} there"
        for pair in sorted(pairs, key=str)
    ]


def plan_cache(
    layers: Sequence[LayerShape], config: EngineConfig, dtype_format: KVFormat, states: Sequence[StateShape] = ()
) -> CachePlan:
    """Group the layers of a model.

    Args:
        layers: its attention layers. states: of its other layers.
        dtype_format: the raw format of the model's dtype.

    Raises:
        ConfigError: the options do not fit the layers.
    """
    rules, notes = _layer_rules(layers, config, dtype_format)
    groups: list[CacheGroup] = []
    pools: list[PoolSpec] = []

    def add_pool(members: tuple[int, ...], k: KVFormat, v: KVFormat, window: int, sinks: int, exact: bool) -> int:
        layouts = tuple(
            KVLayout(
                k, v, layers[i].num_kv_heads, layers[i].k_dim, layers[i].v_dim, config.block_size, layers[i].v_in_k
            )
            for i in members
        )
        pools.append(PoolSpec(members, layouts, window, sinks, exact))
        return len(pools) - 1

    # Full attention first, then by window; equal windows in the order of the layers.
    for rule in sorted(dict.fromkeys(rules), key=lambda rule: rule.window):
        members = tuple(i for i, own in enumerate(rules) if own == rule and layers[i].kv_layer is None)
        # Sinks that are read exact need not stay in the quantized pool.
        kept_sinks = 0 if rule.num_exact_sinks >= rule.num_sink_tokens else rule.num_sink_tokens
        pool = add_pool(members, rule.k_format, rule.v_format, rule.window, kept_sinks, exact=False)
        exact_pool = None
        if rule.residual_length:
            # Exact copies are stored in the rotated basis, so that both pools share one query and one accumulator.
            k_exact = replace(dtype_format, rotate=rule.k_format.rotate)
            v_exact = replace(dtype_format, rotate=rule.v_format.rotate)
            exact_pool = add_pool(members, k_exact, v_exact, rule.residual_length, rule.num_exact_sinks, exact=True)
        groups.append(
            CacheGroup(
                members,
                rule.window,
                rule.num_sink_tokens,
                rule.residual_length,
                rule.num_exact_sinks,
                pool,
                exact_pool,
            )
        )
    window = config.window if config.window and any(not layer.window for layer in layers) else 0
    if config.window and not window:
        notes.append(f"--window {config.window} has no effect: every layer of this model already has a window")
    return CachePlan(tuple(groups), tuple(pools), config.block_size, window, tuple(notes), tuple(states))


def _most_blocks_spanned(num_tokens: int, block_size: int) -> int:
    """The most blocks that ``num_tokens`` consecutive tokens can touch, at any start."""
    return (num_tokens + block_size - 2) // block_size + 1
