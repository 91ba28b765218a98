"""A split GGUF model is read whole from its first part; whatever does not fit is refused, saying what to pass."""

import numpy as np
import pytest
import torch
from gguf_files import write_pairs
from helpers import refusal

from lean.store.gguf.file import part_files, read_gguf
from lean.store.gguf.tensors import dequantize


def part(folder, number, count, total, tensors, name="m", **pairs):
    file = folder / f"{name}-{number:05}-of-{count:05}.gguf"
    keys = {"split.no": number - 1, "split.count": count, "split.tensors.count": total, **pairs}
    write_pairs(file, "llama", keys, {key: np.full((2, 32), value, np.float32) for key, value in tensors.items()})
    return file


@pytest.fixture
def parts(tmp_path):
    return [part(tmp_path, index + 1, 3, 3, {f"t{index}": index}) for index in range(3)]


def test_the_first_part_reads_all_parts(parts):
    file = read_gguf(parts[0])
    assert (list(file.parts), list(file.tensors)) == (parts, ["t0", "t1", "t2"])
    assert file.nbytes <= sum(path.stat().st_size for path in parts)
    for index in range(3):
        assert bool((dequantize(file.tensors[f"t{index}"], torch.float32) == index).all())
    assert part_files(parts[0]) == parts


def test_another_part_names_the_first(parts):
    message = refusal(read_gguf, parts[1])
    assert "part 2 of 3" in message
    assert parts[0].name in message


def test_a_missing_part_is_named(parts):
    parts[2].unlink()
    assert f"{parts[2].name} of 3 not found" in refusal(read_gguf, parts[0])
    parts[1].unlink()
    assert f"{parts[1].name} and 1 more" in refusal(read_gguf, parts[0])


def test_a_cut_part_is_incomplete(parts):
    parts[1].write_bytes(parts[1].read_bytes()[:-64])
    message = refusal(read_gguf, parts[0])
    assert parts[1].name in message
    assert "incomplete" in message


def test_a_renamed_first_part_shows_the_names_that_it_needs(parts):
    other = parts[0].rename(parts[0].with_name("model.gguf"))
    assert "NAME-00001-of-00003.gguf" in refusal(read_gguf, other)


@pytest.mark.parametrize(
    ("number", "count", "total", "tensors", "pairs", "word"),
    [
        (2, 3, 3, {"t0": 0}, {}, "both hold"),
        (2, 3, 3, {}, {}, "3 tensors"),
        (2, 3, 3, {"t1": 0, "t5": 0}, {}, "3 tensors"),
        (2, 3, 3, {"t1": 0}, {"split.no": 2}, "part 3 of 3"),
        (2, 3, 3, {"t1": 0}, {"split.count": 4}, "part 2 of 4"),
        (2, 3, 3, {"t1": 0}, {"general.name": "other"}, "general.name"),
        (1, 3, 4, {"t0": 0}, {}, "4 tensors"),
        (1, 3, 3, {"t0": 0}, {"split.no": 7}, "part 8 of 3"),
        (1, 3, 3, {"t0": 0}, {"split.count": "three"}, "split.count"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(tmp_path, parts, number, count, total, tensors, pairs, word):
    for index in (2, 3):
        part(tmp_path, index, 3, 3, {f"t{index - 1}": 0}, **{"general.name": "Tiny"})
    part(tmp_path, 1, 3, 3, {"t0": 0}, **{"general.name": "Tiny"})
    part(tmp_path, number, count, total, tensors, **pairs)
    assert word in refusal(read_gguf, parts[0])


def test_a_file_that_was_merged_from_parts_is_whole(tmp_path):
    file = tmp_path / "merged.gguf"
    write_pairs(file, "llama", {"split.count": 0, "split.no": 0}, {"t": np.ones((2, 32), np.float32)})
    assert read_gguf(file).parts == (file,)


def test_parts_in_upper_case_are_read(parts):
    for path in parts:
        path.rename(path.with_name(path.name.upper()))
    assert len(read_gguf(parts[0].with_name(parts[0].name.upper())).tensors) == 3
