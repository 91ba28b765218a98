"""Codes of 4 and 8 bits in words of 32, lowest bits first."""

import torch

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # which code of an AWQ word belongs to each of its 8 columns
_ONES = 0x11111111


def columns(words: torch.Tensor, bits: int = 4, order: tuple[int, ...] = ()) -> torch.Tensor:
    """[rows, words] int32 -> [rows, words x 32 / bits] uint8, each row's codes one after another."""
    places = order or range(32 // bits)
    shifts = torch.tensor([bits * place for place in places], dtype=torch.int32)
    codes = (words[:, :, None] >> shifts) & (2**bits - 1)
    return codes.to(torch.uint8).flatten(1)


def rows(words: torch.Tensor) -> torch.Tensor:
    """[words, columns] int32 with 8 codes of one column each -> [columns, words x 8] uint8."""
    return columns(words.t())


def one_more(words: torch.Tensor) -> torch.Tensor:
    """Every code of 4 bits plus 1, as one sum of each word: it undoes the subtraction that the writers make."""
    wide = (words.to(torch.int64) + _ONES) & 0xFFFFFFFF
    return torch.where(wide >= 2**31, wide - 2**32, wide).to(torch.int32)
