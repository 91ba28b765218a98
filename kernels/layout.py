"""Where K and V of one layer lie inside a block of a pool, and which keys a token sees.

Both rules exist only here; the cache, the block accounting and every kernel import them. Nothing here needs torch.
"""

from dataclasses import dataclass
from functools import cached_property

from lean.quant.formats import KVFormat

ALIGNMENT = 16  # bytes; every part starts at a multiple, so that vector loads and typed views are possible
BLOCK_SIZES = (8, 16, 32, 64, 128, 256)


def align(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class KVLayout:
    """One layer's part of a block: ``[K codes | K scales | V codes | V scales]``, each part aligned.

    Codes are ordered ``[kv_head][slot][row bytes]``, scales ``[kv_head][slot][group]`` (fp16).
    """

    k_format: KVFormat
    v_format: KVFormat
    num_kv_heads: int
    k_dim: int
    v_dim: int
    block_size: int

    @property
    def _rows(self) -> int:
        return self.num_kv_heads * self.block_size

    @cached_property
    def k_scales_offset(self) -> int:
        return align(self._rows * self.k_format.code_bytes(self.k_dim))

    @cached_property
    def v_codes_offset(self) -> int:
        return self.k_scales_offset + align(self._rows * self.k_format.scale_bytes(self.k_dim))

    @cached_property
    def v_scales_offset(self) -> int:
        return self.v_codes_offset + align(self._rows * self.v_format.code_bytes(self.v_dim))

    @cached_property
    def offsets(self) -> tuple[int, int, int, int]:
        """Byte offsets of the four parts: K codes, K scales, V codes, V scales."""
        return 0, self.k_scales_offset, self.v_codes_offset, self.v_scales_offset

    @cached_property
    def nbytes(self) -> int:
        """Bytes of this layer in one block, with padding."""
        return self.v_scales_offset + align(self._rows * self.v_format.scale_bytes(self.v_dim))

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's K and V in this layer, with scales and without padding."""
        return self.num_kv_heads * (
            self.k_format.bytes_per_vector(self.k_dim) + self.v_format.bytes_per_vector(self.v_dim)
        )


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold the first ``num_tokens`` tokens of a sequence; the last one may be partly filled."""
    return -(-num_tokens // block_size)


def first_in_window(position: int, window: int) -> int:
    """First position that a token at ``position`` sees through a window of ``window`` tokens, itself included.

    ``window`` 0 is full attention. Key j is inside iff 0 <= position - j < window.
    """
    return max(0, position - window + 1) if window else 0


def sink_shift(position: int, window: int, num_sink_tokens: int) -> int:
    """Number of evicted positions between the sinks and the window of a token at ``position``.

    Its query for the sink keys is rotated back by this many positions. That gives StreamingLLM's in-cache positions
    (arXiv:2309.17453) without a change to stored keys.
    """
    return max(0, position - (window - 1) - num_sink_tokens) if window and num_sink_tokens else 0
