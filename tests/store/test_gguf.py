"""A GGUF file that promises more than it holds is refused before any reader follows its numbers."""

import struct

import pytest
import torch
from gguf import GGUFWriter
from helpers import refusal

from lean.store.gguf import read_gguf


@pytest.fixture
def gguf(tmp_path):
    writer = GGUFWriter(tmp_path / "tiny.gguf", "llama")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_array("tokenizer.ggml.scores", [1.0, 2.0])
    writer.add_tensor("token_embd.weight", torch.ones(2, 32).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "tiny.gguf"


def test_a_whole_gguf_file_passes_and_a_cut_one_does_not(gguf):
    read_gguf(gguf)
    data = gguf.read_bytes()
    for length in range(len(data) - 32):  # less than what the last tensor's padding hides
        gguf.write_bytes(data[:length])
        assert "tiny.gguf" in refusal(read_gguf, gguf)
    gguf.write_bytes(b"PK\3\4" + data[4:])
    assert "magic" in refusal(read_gguf, gguf)


def tensor(dims, rank=None, kind=0, offset=0):
    rank = len(dims) if rank is None else rank
    return struct.pack(f"<Q1sI{len(dims)}QIQ", 1, b"w", rank, *dims, kind, offset)


def pair(kind, value):
    return struct.pack("<Q1sI", 1, b"k", kind) + value


CRAFTED = {
    "a million dimensions": ([], [tensor([1], rank=10**6)]),
    "product wraps to 0": ([], [tensor([2**32, 2**32])]),
    "bytes wrap to 0": ([], [tensor([2**62, 4])]),
    "padded size wraps": ([], [tensor([2**64 - 1])]),
    "offset wraps": ([], [tensor([1], offset=2**64 - 1)]),
    "empty tensor": ([], [tensor([0])]),
    "part of a block": ([], [tensor([33], kind=2)]),
    "unknown encoding": ([], [tensor([1], kind=999)]),
    "endless string": ([pair(8, struct.pack("<Q", 2**64 - 1))], []),
    "endless array": ([pair(9, struct.pack("<IQ", 0, 2**64 - 1))], []),
    "array of arrays": ([pair(9, struct.pack("<IQ", 9, 1))], []),
    "unknown type": ([pair(99, b"")], []),
    "alignment 0": ([struct.pack("<Q17sII", 17, b"general.alignment", 4, 0)], []),
}


@pytest.mark.parametrize(("pairs", "tensors"), CRAFTED.values(), ids=CRAFTED)
def test_a_crafted_gguf_file_is_refused(tmp_path, pairs, tensors):
    file = tmp_path / "crafted.gguf"
    counts = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(pairs))
    file.write_bytes(counts + b"".join(pairs) + b"".join(tensors) + b"\0" * 256)
    assert "crafted.gguf" in refusal(read_gguf, file)


def test_counts_beyond_the_gguf_file_end_with_it(tmp_path):
    file = tmp_path / "crafted.gguf"
    for counts in [(2**64 - 1, 0), (0, 2**64 - 1)]:
        file.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, *counts) + b"\0" * 256)
        assert "crafted.gguf" in refusal(read_gguf, file)
