"""A GGUF file that promises more than it holds is refused before any reader follows its numbers."""

import os
import struct

import pytest
import torch
from gguf import GGUFValueType, GGUFWriter
from helpers import refusal

from lean.store.gguf.file import read_gguf


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


def tensor(dims, rank=None, kind=0, offset=0, name=b"w"):
    rank = len(dims) if rank is None else rank
    return struct.pack(f"<Q1sI{len(dims)}QIQ", 1, name, rank, *dims, kind, offset)


def pair(kind, value):
    return struct.pack("<Q1sI", 1, b"k", kind) + value


CRAFTED = {
    "a million dimensions": ([], [tensor([1], rank=10**6)]),
    "product wraps to 0": ([], [tensor([2**32, 2**32])]),
    "bytes wrap to 0": ([], [tensor([2**62, 4])]),
    "padded size wraps": ([], [tensor([2**64 - 1])]),
    "offset wraps": ([], [tensor([1], offset=2**64 - 1)]),
    "offset between the steps of the alignment": ([], [tensor([1], offset=4)]),
    "one tensor inside another": ([], [tensor([32]), tensor([1], offset=32, name=b"v")]),
    "empty tensor": ([], [tensor([0])]),
    "part of a block": ([], [tensor([33], kind=2)]),
    "unknown encoding": ([], [tensor([1], kind=999)]),
    "same name twice": ([], [tensor([1]), tensor([1])]),
    "name is no text": ([], [b"\1\0\0\0\0\0\0\0\xff" + tensor([1])[9:]]),
    "key twice": ([pair(4, b"\0\0\0\0"), pair(4, b"\1\0\0\0")], []),
    "key is no text": ([struct.pack("<Q1sI", 1, b"\xff", 4) + b"\0\0\0\0"], []),
    "endless string": ([pair(8, struct.pack("<Q", 2**64 - 1))], []),
    "endless array": ([pair(9, struct.pack("<IQ", 0, 2**64 - 1))], []),
    "array of arrays": ([pair(9, struct.pack("<IQ", 9, 1))], []),
    "unknown type": ([pair(99, b"")], []),
    "alignment is text": ([struct.pack("<Q17sIQ1s", 17, b"general.alignment", 8, 1, b"8")], []),
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


def test_all_metadata_comes_back_as_python_values(tmp_path):
    writer = GGUFWriter(tmp_path / "tiny.gguf", "llama")
    values = {
        "u8": 255,
        "i64": -(2**60),
        "f64": 0.1,
        "yes": True,
        "text": "\u00e9\n",
        "words": ["", "a"],
        "flags": [True, False],
    }
    writer.add_uint8("u8", 255)
    writer.add_key_value("i64", -(2**60), GGUFValueType.INT64)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", values["text"])
    writer.add_array("words", values["words"])
    writer.add_array("flags", values["flags"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = read_gguf(tmp_path / "tiny.gguf")
    assert file.metadata == {"general.architecture": "llama", **values}
    assert not file.tensors


NOT_GGUF = {
    "empty": (b"", "empty"),
    "zip": (b"PK\3\4" + bytes(40), "zip archive"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid x\n", "LFS"),
    "page": (b"\n<!DOCTYPE html><html>", "web page"),
    "safetensors": (struct.pack("<Q", 20) + b'{"a":{}}' + bytes(40), "safetensors"),
    "GGML": (b"tjgg" + bytes(40), "GGML"),
    "JSON": (b'{"a": 1}', "JSON"),
    "other": (b"\x7fELF" + bytes(40), "ELF"),
}


@pytest.mark.parametrize(("content", "word"), NOT_GGUF.values(), ids=NOT_GGUF)
def test_a_file_of_another_kind_is_called_what_it_is(tmp_path, content, word):
    file = tmp_path / "tiny.gguf"
    file.write_bytes(content)
    assert word in refusal(read_gguf, file)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "tiny.gguf")
    assert "no file" in refusal(read_gguf, tmp_path / "tiny.gguf")


def test_a_big_endian_file_and_other_versions_are_named(tmp_path):
    file = tmp_path / "tiny.gguf"
    for version, word in [(struct.pack(">I", 3), "big-endian"), (struct.pack("<I", 1), "version 1")]:
        file.write_bytes(b"GGUF" + version + bytes(64))
        assert word in refusal(read_gguf, file)


def test_a_tensor_type_that_is_newer_than_the_reader_names_type_tensor_and_package(tmp_path):
    file = tmp_path / "tiny.gguf"
    file.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 1, 0) + tensor([32], kind=999) + bytes(256))
    message = refusal(read_gguf, file)
    assert all(word in message for word in ("999", "'w'", "gguf 0."))


def test_more_than_any_header_holds_is_refused_at_once(tmp_path):
    file = tmp_path / "tiny.gguf"
    with file.open("wb") as stream:
        stream.write(struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + pair(9, struct.pack("<IQ", 0, 1 << 32)))
        stream.truncate(1 << 33)
    assert "elements" in refusal(read_gguf, file)
    with file.open("wb") as stream:
        stream.write(struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + pair(8, struct.pack("<Q", 1 << 32)))
        stream.truncate(1 << 33)
    assert "longer" in refusal(read_gguf, file)
