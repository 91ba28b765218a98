"""Where K and V of one layer lie inside a block of a pool, and which keys a token sees.

Both rules exist only here; the cache, the block accounting and every kernel import them. Nothing here needs torch.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from lean.quant.formats import CHANNEL_TOKENS, KVFormat, rotation_size

ALIGNMENT = 16  # bytes; every part starts at a multiple, so that vector loads and typed views are possible
BLOCK_SIZES = (8, 16, 32, 64, 128, 256)


def align(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class KVLayout:
    """One layer's part of a block: ``[K codes | K scales | V codes | V scales]``, each part aligned.

    Codes are ordered ``[kv_head][slot][row bytes]``, scales ``[kv_head][slot][group]`` (fp16 or one
    byte). A K format by channel has no scales of a slot: its scales and zeros are ordered ``[kv_head][group of
    CHANNEL_TOKENS slots][2 k_dim]``, in the place of the K scales.

    v_in_k: V is the first v_dim numbers of K, as stored, and the last two parts are empty (latent attention). The
    formats are then equal, see `k_stored`.
    """

    k_format: KVFormat
    v_format: KVFormat
    num_kv_heads: int
    k_dim: int
    v_dim: int
    block_size: int
    v_in_k: bool = False

    @property
    def fault(self) -> str | None:
        """Why no kernel can read this layout; None: they can."""
        k, v = self.k_format, self.v_format
        if self.block_size not in BLOCK_SIZES:
            return f"block_size must be one of {BLOCK_SIZES}, got {self.block_size}"
        if not (k.supports(self.k_dim) and v.supports(self.v_dim)):
            multiple = max(k.dim_multiple, v.dim_multiple)
            return f"head dims {self.k_dim}/{self.v_dim} must be divisible by {multiple} for this format"
        if self.v_in_k and not (k == v and k.supports_prefix(self.k_dim, self.v_dim)):
            return f"V cannot be the first {self.v_dim} of the {self.k_dim} numbers of K in {k.name}/{v.name}"
        if v.by_channel:
            return f"{v.name} is a format of K alone"
        if k.by_channel and self.block_size % CHANNEL_TOKENS:
            return f"{k.name} needs a block_size that is a multiple of {CHANNEL_TOKENS}, got {self.block_size}"
        return None

    @property
    def _rows(self) -> int:
        return self.num_kv_heads * self.block_size

    @cached_property
    def k_stored(self) -> KVFormat:
        """How K is encoded: where V lies in K, a format with one scale for a vector has one for V, one for the rest.

        The rest are rotated positions, whose size is another than that of the latent vector.
        """
        fmt = self.k_format
        whole = self.v_in_k and fmt.quantized and not fmt.group_size
        return replace(fmt, group_size=self.v_dim) if whole else fmt

    @cached_property
    def k_scales_offset(self) -> int:
        return align(self._rows * self.k_format.code_bytes(self.k_dim))

    @cached_property
    def _k_end(self) -> int:
        return self.k_scales_offset + align(self._rows * self.k_stored.scale_bytes(self.k_dim))

    @cached_property
    def v_codes_offset(self) -> int:
        return 0 if self.v_in_k else self._k_end

    @cached_property
    def v_scales_offset(self) -> int:
        if self.v_in_k:
            return self.k_scales_offset
        return self.v_codes_offset + align(self._rows * self.v_format.code_bytes(self.v_dim))

    @cached_property
    def offsets(self) -> tuple[int, int, int, int]:
        """Byte offsets of the four parts: K codes, K scales, V codes, V scales."""
        return 0, self.k_scales_offset, self.v_codes_offset, self.v_scales_offset

    @cached_property
    def groups(self) -> tuple[int, int]:
        """Dims that share a scale, in K and in V as they are stored."""
        k = self.k_stored.group_width(self.k_dim)
        return k, k if self.v_in_k else self.v_format.group_width(self.v_dim)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of this layer in one block, with padding."""
        if self.v_in_k:
            return self._k_end
        return self.v_scales_offset + align(self._rows * self.v_format.scale_bytes(self.v_dim))

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's K and V in this layer, with scales and without padding."""
        v_bytes = 0 if self.v_in_k else self.v_format.bytes_per_vector(self.v_dim)
        return self.num_kv_heads * (self.k_stored.bytes_per_vector(self.k_dim) + v_bytes)

    @cached_property
    def v_stored_dim(self) -> int:
        """Numbers of the stored vector that V is read from: its row, its scales and its rotation are of this width."""
        return self.k_dim if self.v_in_k else self.v_dim

    @cached_property
    def k_rotation_size(self) -> int:
        """Width of the blocks in which K is rotated; 0: it is not."""
        return rotation_size(self.k_dim) if self.k_format.rotate else 0

    @cached_property
    def v_rotation_size(self) -> int:
        """Likewise of V."""
        return rotation_size(self.v_stored_dim) if self.v_format.rotate else 0


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
