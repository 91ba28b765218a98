"""Block tables and slots of a step's sequences as arrays: the one place that turns positions into slots."""

from collections.abc import Sequence

import numpy

from lean.cache.block_manager import BlockManager


def block_table(manager: BlockManager, seq_ids: Sequence[int], pool_id: int) -> numpy.ndarray:
    """int32 [len(seq_ids), most blocks of a sequence]: block ids by position, 0 (the null block) behind the last."""
    tables = [numpy.frombuffer(manager.table(seq_id, pool_id), numpy.int32) for seq_id in seq_ids]
    out = numpy.zeros((len(tables), max(map(len, tables))), numpy.int32)
    for row, table in zip(out, tables):
        row[: len(table)] = table
    return out


def slots(table: numpy.ndarray, rows: numpy.ndarray, positions: numpy.ndarray, block_size: int) -> numpy.ndarray:
    """int64 [num_tokens]: where tokens lie in a pool, block id x block_size + slot in the block.

    Args:
        table: int32 [num_seqs, blocks], see `block_table`.
        rows: [num_tokens], the row of the table that each token's sequence has.
        positions: [num_tokens], of the tokens in their sequences.
    """
    return table[rows, positions // block_size].astype(numpy.int64) * block_size + positions % block_size
