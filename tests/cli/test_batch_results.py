"""A file of results holds whole lines only, and no file of another kind is touched."""

import fcntl
import os

import pytest
from batches import PARAMS, TEXTS, Engine, results, rows_of
from helpers import refusal

from lean.cli import batch
from lean.cli.batch import run_batch
from lean.cli.batch_results import read_done
from lean.errors import LeanError


def test_a_line_cut_anywhere_is_written_again_and_the_others_are_not(out, console):
    rows = rows_of("é", "b\n", "ccc")
    run_batch(Engine(1), rows, out, PARAMS, None, console)
    data, whole = out.read_bytes(), results(out)
    last = len(data.split(b"\n")[-2]) + 1
    assert list(whole) == [1, 2, 3]
    for cut in range(1, last + 1):
        for tail in (b"", b"\0" * 9) if cut < last else (b"",):
            out.write_bytes(data[:-cut] + tail)
            assert read_done(out) == {1, 2}
            assert out.read_bytes() == data[:-last]
            out.write_bytes(data[:-cut] + tail)
            engine = Engine(1)
            assert run_batch(engine, rows, out, PARAMS, None, console).skipped == 2
            assert engine.encoded == [("ccc", None)]
            assert out.read_bytes() == data
    out.write_bytes(data[:-last] + b'{"id": 3, no JSON\n')
    assert read_done(out) == {1, 2}


def test_half_a_line_is_taken_back_when_the_disk_is_full(out, console, monkeypatch):
    real = batch.ResultsWriter

    class Full:
        """A file that takes three lines and a half, slowly."""

        def __init__(self, file):
            self.file, self.left = file, 400

        def write(self, data):
            if not self.left:
                raise OSError(28, "No space left on device")
            count = self.file.write(data[: min(50, self.left)])
            self.left -= count
            return count

        def __getattr__(self, name):
            return getattr(self.file, name)

    monkeypatch.setattr(batch, "ResultsWriter", lambda file, out: real(Full(file), out))
    rows = rows_of(*TEXTS)
    with pytest.raises(LeanError, match="No space left on device") as caught:
        run_batch(Engine(1), rows, out, PARAMS, None, console)
    assert str(out) in str(caught.value)
    assert 2 <= len(results(out)) <= 4
    monkeypatch.undo()
    run_batch(Engine(1), rows, out, PARAMS, None, console)
    assert len(results(out)) == 8


GOOD = b'{"id": 1, "text": "x", "finish_reason": "stop"}\n'
DAMAGE = {
    "somebody's JSON": (b'{"a": 1}', 1, "damaged"),
    "somebody's text": (b"my thesis", 1, "damaged"),
    "prompts": (b'{"prompt": "x"}\n', 1, "not a result"),
    "rows without an answer": (b'{"id": 1, "prompt": "x"}\n', 1, "not a result"),
    "a cut line in the middle": (GOOD + b'{"id": 2, "te\n' + GOOD.replace(b"1", b"3"), 2, "damaged"),
    "zeros in the middle": (GOOD + b"\0\0\n" + GOOD.replace(b"1", b"3"), 2, "damaged"),
    "an empty line": (GOOD + b"\n" + GOOD.replace(b"1", b"3"), 2, "damaged"),
    "text after results": (GOOD + b"notes", 2, "damaged"),
    "not UTF-8": (b'{"id": 1, "text": "\xff"}\n' + GOOD, 1, "damaged"),
    "an id twice": (GOOD + GOOD, 2, "line 1"),
    "an id of no kind": (GOOD.replace(b"1", b"null"), 1, "not a result"),
    "a list": (b"[1]\n", 1, "damaged"),
}


@pytest.mark.parametrize(("data", "line", "word"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_or_one_that_lean_did_not_write_is_refused_and_left_alone(out, console, data, line, word):
    out.write_bytes(data)
    message = refusal(read_done, out)
    assert f"{out} line {line}" in message
    assert word in message
    assert refusal(run_batch, None, rows_of("a"), out, PARAMS, None, console) == message
    assert out.read_bytes() == data


def test_paths_that_cannot_be_a_file_of_results_are_refused(tmp_path, prompts, out):
    file = prompts({"prompt": "x"})
    before = file.read_bytes()
    (tmp_path / "soft").symlink_to(file)
    (tmp_path / "hard").hardlink_to(file)
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "there").symlink_to("back")
    (tmp_path / "back").symlink_to("there")
    (tmp_path / "nowhere").symlink_to(tmp_path / "no" / "out")
    (tmp_path / "new").symlink_to(out)
    os.mkfifo(tmp_path / "pipe")
    for place in (file, tmp_path / "." / file.name, tmp_path / "soft", tmp_path / "hard"):
        assert "holds the prompts" in refusal(read_done, place, file)
    assert "is a folder" in refusal(read_done, tmp_path, file)
    assert "make it first" in refusal(read_done, tmp_path / "no" / "out", file)
    assert "make it first" in refusal(read_done, file / "out", file)
    assert "not a regular file" in refusal(read_done, tmp_path / "pipe", file)
    assert "make it first" in refusal(read_done, tmp_path / "nowhere", file)
    for name in ("a\0b", "x" * 300, "loop", "there", "back", "loop/out"):
        for given in (file, None):
            assert "cannot write" in refusal(read_done, tmp_path / name, given)
    assert file.read_bytes() == before
    for place in (out, tmp_path / "new"):
        assert read_done(place, file) == set()
    assert not out.exists()


def test_a_read_only_place_is_refused_before_anything_is_computed(tmp_path, out, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *args: False)
    assert "read-only" in refusal(read_done, out)


def test_two_runs_do_not_write_to_one_file(out, console):
    out.write_bytes(GOOD[:-5])
    with out.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert "another run" in refusal(read_done, out)
        assert "another run" in refusal(run_batch, None, rows_of("a"), out, PARAMS, None, console)
        assert out.read_bytes() == GOOD[:-5]
    assert read_done(out) == set()
