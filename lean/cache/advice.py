"""What would fit where a cache does not: changes of the options, each tried before it is suggested."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lean.cache.plan import LayerShape, plan_cache
from lean.cache.size import CacheSize, size_cache
from lean.cache.states import StateShape
from lean.config import EngineConfig
from lean.errors import ConfigError
from lean.kernels.layout import blocks_for
from lean.quant.formats import KVFormat

_MIB = 2**20
_MARGIN = 0.98  # other programs take memory between a refusal and the next start
_SMALLER = ("int8", "k8v4", "k6v4", "int4")  # by bytes, most first
_WINDOWS = (4096, 2048, 1024, 512, 256, 128, 64, 32)
_MOST_NAMED = 4


@dataclass(frozen=True)
class Room:
    """What decides the size of a cache, beside the options.

    Attributes:
        layers: shapes of the model's layers. dtype_format: the raw format of its dtype.
        model_max_len: longest sequence that the model takes without a window.
        free_bytes: memory for the cache, the weights' taken off. share: the part of it that a cache takes by default.
        windows: whether the model's rotary positions allow a --window.
        states: of layers that keep no K/V.
    """

    layers: Sequence[LayerShape]
    dtype_format: KVFormat
    model_max_len: int
    free_bytes: int
    share: float
    windows: bool = True
    states: Sequence[StateShape] = ()

    def size(self, config: EngineConfig) -> CacheSize | None:
        """The size of the cache under these options; None where they are refused."""
        try:
            plan = plan_cache(self.layers, config, self.dtype_format, self.states)
            return size_cache(plan, config, self.model_max_len, int(self.free_bytes * _MARGIN), self.share)
        except ConfigError:
            return None


def what_fits(room: Room, config: EngineConfig, wanted: int | None) -> str:
    """Changes of the options that make a cache fit, as a sentence: flags with their values.

    Args:
        wanted: tokens that a sequence must be able to have; None: any number.
    """
    found = []
    for change in _changes(room, config, wanted):
        flags = " ".join(f"--{name.replace('_', '-')} {_written(name, value)}" for name, value in change.items())
        if flags not in found:
            found.append(flags)
    if not found:
        return "nothing else fits: free some memory, or use a smaller model"
    return f"what fits: {'; or '.join(found[:_MOST_NAMED])}"


def _written(name: str, value: Any) -> str:
    return f"{value // _MIB}MiB" if name == "kv_memory" else str(value)


def _changes(room: Room, config: EngineConfig, wanted: int | None) -> Iterator[dict[str, Any]]:
    """Changes of a few options with which the cache fits."""
    asked = config.max_model_len
    longer = {"max_model_len": wanted} if asked is not None and wanted is not None and asked < wanted else {}

    def fits(**change: Any) -> bool:
        try:
            size = room.size(replace(config, **change))
        except ConfigError:  # an impossible combination
            return False
        return size is not None and (wanted is None or size.max_model_len >= wanted)

    def longest_in(options: EngineConfig) -> int:
        most = options.max_model_len or 1
        return _most(lambda length: room.size(replace(options, max_model_len=length)) is not None, most)

    if longer and fits(**longer):
        yield longer
    if asked is not None and not longer and (length := longest_in(config)):
        yield {"max_model_len": length}
    if config.num_blocks is not None:
        least = max(1, blocks_for(wanted or 1, config.block_size))
        more = _most(lambda count: fits(num_blocks=least - 1 + count, **longer), max(1, config.num_blocks - least + 1))
        if more:
            yield {"num_blocks": least - 1 + more, **longer}
    else:
        most = int(room.free_bytes * _MARGIN) // _MIB
        if mebibytes := _least(lambda count: fits(kv_memory=count * _MIB, **longer), 1, most):
            yield {"kv_memory": mebibytes * _MIB, **longer}
    names = _smaller_than(config.kv_dtype)
    if smaller := next((name for name in names if fits(kv_dtype=name, **longer)), None):
        yield {"kv_dtype": smaller, **longer}
    elif names and asked is not None and not longer:
        smallest = replace(config, kv_dtype=names[-1])
        if (longest := longest_in(smallest)) > longest_in(config):
            yield {"kv_dtype": names[-1], "max_model_len": longest}
    if config.window is None and room.windows:
        limit = min(wanted or room.model_max_len, room.model_max_len)
        shorter = (window for window in _WINDOWS if window < limit)
        if widest := next((window for window in shorter if fits(window=window, **longer)), None):
            yield {"window": widest, **longer}
    if fewer := _most(lambda count: fits(max_num_seqs=count, **longer), config.max_num_seqs - 1):
        yield {"max_num_seqs": fewer, **longer}
    if fewer := _most(lambda count: fits(prefill_chunk=count, **longer), config.chunk_tokens - 1):
        yield {"prefill_chunk": fewer, **longer}
    if config.prefix_tail_memory and fits(prefix_tail_memory=0, **longer):
        yield {"prefix_tail_memory": 0, **longer}
    if fits(kv_residual_length=0, **longer):
        yield {"kv_residual_length": 0, **longer}


def _smaller_than(kv_dtype: str) -> tuple[str, ...]:
    return _SMALLER[_SMALLER.index(kv_dtype) + 1 :] if kv_dtype in _SMALLER else _SMALLER


def _most(fits: Callable[[int], bool], most: int) -> int:
    """The largest number from 1 to ``most`` that fits, where all smaller ones fit too; 0 where 1 does not fit."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _least(fits: Callable[[int], bool], least: int, most: int) -> int:
    """The smallest number from ``least`` to ``most`` that fits, where all larger ones fit too; 0 where none does."""
    low, high = least - 1, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high if high <= most else 0
