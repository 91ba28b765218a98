"""One layer's part of a pool as tensors: views of the arena, and single slots decoded.

`lean.kernels.layout` says where the bytes lie.
"""

import torch

from lean.kernels.layout import KVLayout
from lean.quant import CHANNEL_TOKENS, Kind, KVFormat, decode, decode_channels


def _view(arena: torch.Tensor, layout: KVLayout, start: int, row_bytes: int, row_tokens: int = 1) -> torch.Tensor:
    """Rows of ``row_bytes`` from byte ``start`` of every block on, one for ``row_tokens`` slots: uint8 [num_blocks,
    kv_heads, rows, row_bytes]."""
    rows = layout.block_size // row_tokens
    shape = (arena.shape[0], layout.num_kv_heads, rows, row_bytes)
    strides = (arena.stride(0), rows * row_bytes, row_bytes, 1)
    return arena.as_strided(shape, strides, arena.storage_offset() + start)


def _scales(arena: torch.Tensor, layout: KVLayout, start: int, fmt: KVFormat, dim: int) -> torch.Tensor:
    """Scales [num_blocks, kv_heads, rows, ...] as `parts_of` gives them."""
    if fmt.by_channel:
        return _view(arena, layout, start, 2 * dim, CHANNEL_TOKENS)
    found = _view(arena, layout, start, fmt.scale_bytes(dim))
    return found if fmt.kind is Kind.GRID else found.view(torch.float16)


def k_parts(arena: torch.Tensor, layout: KVLayout, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first two of `parts_of`."""
    k = layout.k_stored
    codes = _view(arena, layout, offset, k.code_bytes(layout.k_dim))
    return codes, _scales(arena, layout, offset + layout.k_scales_offset, k, layout.k_dim)


def parts_of(arena: torch.Tensor, layout: KVLayout, offset: int) -> tuple[torch.Tensor, ...]:
    """Views of the arena [num_blocks, block_bytes] as K codes, K scales, V codes, V scales; V's are K's where V lies
    in K.

    Codes: uint8 [num_blocks, kv_heads, block_size, row_bytes]; scales: uint8 or fp16 [..., groups], of K by channel
    uint8 [num_blocks, kv_heads, block_size / CHANNEL_TOKENS, 2 k_dim].
    """
    v = layout.k_stored if layout.v_in_k else layout.v_format
    return (
        *k_parts(arena, layout, offset),
        _view(arena, layout, offset + layout.v_codes_offset, v.code_bytes(layout.v_stored_dim)),
        _scales(arena, layout, offset + layout.v_scales_offset, v, layout.v_stored_dim),
    )


def v_of(layout: KVLayout, codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The part of stored vectors that is V: all of them, or their beginnings where V lies in K."""
    if not layout.v_in_k:
        return codes, scales
    fmt = layout.v_format
    return codes[..., : fmt.code_bytes(layout.v_dim)], scales[..., : fmt.groups(layout.v_dim)]


def read_slots(
    arena: torch.Tensor, layout: KVLayout, offset: int, slots: torch.Tensor, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """K [slots, kv_heads, k_dim] and V of single slots, in ``dtype`` (float32 or float64) and in the stored basis.

    It serves inspection and tests, and is not fast.
    """
    block, slot = slots // layout.block_size, slots % layout.block_size
    parts = parts_of(arena, layout, offset)
    v_codes, v_scales = (part[block, :, slot] for part in parts[2:])
    value = decode(*v_of(layout, v_codes, v_scales), layout.v_format, dtype)
    k_codes = parts[0][block, :, slot]
    if layout.k_format.by_channel:
        channels = parts[1][block, :, slot // CHANNEL_TOKENS]
        return decode_channels(k_codes[..., None, :], channels[..., None, :], layout.k_format, dtype)[..., 0, :], value
    return decode(k_codes, parts[1][block, :, slot], layout.k_stored, dtype), value


def gather(part: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """[num_blocks, kv_heads, slots, x] -> the rows of blocks [seqs, count], [seqs, kv_heads, count * slots, x].

    Moved as 8-byte words, which the alignment of every part allows.
    """
    seqs, count = blocks.shape
    heads, slots, row = part.shape[1:]
    if not row:
        return part.new_empty(seqs, heads, count * slots, 0)
    words = part.flatten(2).view(torch.int64).index_select(0, blocks.flatten())
    words = words.unflatten(0, (seqs, count)).transpose(1, 2).flatten(2).contiguous()  # one word: a view
    return words.view(part.dtype).unflatten(2, (-1, row))
