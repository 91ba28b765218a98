"""The prefix cache on disk: no fault of a file, of the disk or of another process changes an answer."""

import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from desk import ask
from disk_cache import files, read_tokens, said, written
from engine_state import nothing_left, scheduler
from tiny import tokens

from lean.cache import disk_queues
from lean.cache.disk_tier import DiskTier

LEARN = DiskTier.computed


def test_damaged_and_missing_files_are_a_miss_said_once_and_written_anew(begin, caplog):
    one, prompt = begin(), tokens(83)
    first = said(one, prompt)
    written(one)
    for number, file in enumerate(sorted(files(one))):
        if number % 3 == 0:
            data = bytearray(file.read_bytes())
            data[number * 97 % len(data)] ^= 1
            file.write_bytes(data)
        elif number % 3 == 1:
            os.truncate(file, number * 31)
    with caplog.at_level(logging.WARNING):
        two = begin()
        assert said(two, prompt) == (0, first[1])
    assert two.stats().disk.damaged == 1
    assert len([record for record in caplog.records if "damaged" in record.getMessage()]) == 1
    written(two)
    three = begin()
    assert said(three, prompt) == (80, first[1])
    written(three)


@pytest.mark.parametrize("error", [28, 30, 122, 5])
def test_a_disk_that_is_full_or_read_only_changes_no_answer_and_is_said_once(begin, monkeypatch, caplog, error):
    def refuse(*_, **__):
        raise OSError(error, os.strerror(error))

    prompt = tokens(60)
    plain = said(begin(prefix_cache_dir=None), prompt)
    one = begin()
    monkeypatch.setattr("os.fsync", refuse)
    with caplog.at_level(logging.WARNING):
        assert said(one, prompt) == plain
        assert said(one, [*prompt, *tokens(40, 2)])[0] == 48
        scheduler(one).disk.flush()
    assert one.stats().disk.blocks_written == 0
    assert one.stats().disk.blocks_dropped > 0
    assert len([record for record in caplog.records if os.strerror(error) in record.getMessage()]) == 1
    monkeypatch.undo()
    monkeypatch.setattr(disk_queues, "PAUSE_S", 0.0)
    written(one)


def test_a_full_queue_drops_blocks_and_the_next_request_writes_them(begin, monkeypatch):
    prompt, held = tokens(100), threading.Event()
    one = begin(form="fp32")
    write = disk_queues.EngineFolder.write
    monkeypatch.setattr(disk_queues.EngineFolder, "write", lambda *args: held.wait() and write(*args))
    monkeypatch.setattr(disk_queues, "QUEUE_BYTES", 3 * one.cache.block_bytes[0])
    first = said(one, prompt)
    assert one.stats().disk.blocks_dropped == 6  # three at the end of the prompt, and again at that of the answer
    held.set()
    scheduler(one).disk.flush()
    assert len(files(one)) == 3
    said(one, prompt)
    written(one)
    assert len(files(one)) == 6
    two = begin(form="fp32")
    assert said(two, prompt) == (96, first[1])
    written(two)


def test_a_prefix_that_is_slower_to_read_than_to_compute_is_computed(begin):
    one, prompt, other = begin(), tokens(60), tokens(60, 2)
    first = said(one, prompt)
    said(one, other)
    written(one)
    two = begin()
    assert said(two, other)[0] == 48  # the speed of the disk is known now
    LEARN(scheduler(two).disk, 1000, 1e-9)  # 1e12 tokens a second
    assert said(two, prompt) == (0, first[1])
    assert two.stats().disk.slower == 1
    written(two)


def test_a_disk_that_does_not_answer_is_left_once_computing_would_be_faster(begin, monkeypatch):
    one, prompt = begin(), tokens(60)
    first = said(one, prompt)
    written(one)
    two, held = begin(), threading.Event()
    read = disk_queues.EngineFolder.read
    monkeypatch.setattr(disk_queues.EngineFolder, "read", lambda *args: held.wait() and read(*args))
    LEARN(scheduler(two).disk, 1000, 0.1)
    assert said(two, prompt) == (0, first[1])
    assert two.stats().disk.slower == 1
    held.set()
    written(two)


def test_requests_with_the_same_prefix_read_it_once(begin):
    one, prompt = begin(), tokens(60)
    said(one, prompt)
    written(one)
    two = begin()
    outputs = two.generate([[*prompt, seed] for seed in range(6)], ask(2))
    assert [out.cached_tokens for out in outputs] == [48] * 6
    assert two.stats().disk.blocks_read == 5  # three quantized blocks, and two exact ones
    written(two)


@pytest.mark.parametrize("call", ["read_blocks", "write_blocks"])
def test_a_copy_that_fails_costs_the_files_and_nothing_else(begin, monkeypatch, caplog, call):
    one, prompt = begin(), tokens(60)
    first = said(one, prompt)
    written(one)

    def fail(*_):
        raise RuntimeError("CUDA out of memory")

    two = begin()
    monkeypatch.setattr(two.cache, call, fail)
    with caplog.at_level(logging.WARNING):
        assert said(two, prompt)[1] == first[1]
        assert said(two, tokens(60, 3))[0] == 0
    assert len([record for record in caplog.records if "out of memory" in record.getMessage()]) == 1
    written(two)


def test_an_engine_that_was_closed_goes_on_without_the_folder(begin):
    one, prompt = begin(), tokens(60)
    first = said(one, prompt)
    written(one)
    kept = len(files(one))
    assert said(one, prompt) == (48, first[1])
    scheduler(one).prefix.reset()
    assert said(one, prompt) == first
    assert said(one, tokens(60, 2))[0] == 0
    assert len(files(one)) == kept
    one.reset_prefix_cache()
    assert files(one) == []
    assert said(one, prompt) == first
    written(one)


def test_after_a_removal_that_failed_nothing_is_read(begin, monkeypatch, caplog):
    def refuse(*_, **__):
        raise OSError(30, "Read-only file system")

    one, prompt = begin(), tokens(60)
    first = said(one, prompt)
    scheduler(one).disk.flush()
    monkeypatch.setattr("pathlib.Path.unlink", refuse)
    with caplog.at_level(logging.WARNING):
        one.reset_prefix_cache()
        scheduler(one).disk.flush()
        assert said(one, prompt) == first
    assert one.stats().disk.blocks_read == 0
    assert any("not read any more" in record.getMessage() for record in caplog.records)
    monkeypatch.undo()
    written(one)


def test_a_prefix_that_memory_gives_all_day_stays_on_disk(begin):
    one, prompt = begin(form="fp32", prefix_cache_size=60_000), tokens(60)
    said(one, prompt)
    for seed in range(1, 13):
        said(one, tokens(100, seed))
        assert said(one, [*prompt, seed])[0] == 48
        scheduler(one).disk.flush()
    written(one)
    two = begin(form="fp32")
    assert said(two, prompt)[0] == 48
    written(two)


def test_others_run_while_a_prefix_is_read_and_an_abort_ends_the_reading(begin, monkeypatch):
    one, prompt = begin(), tokens(60)
    said(one, prompt)
    written(one)
    two, held = begin(), threading.Event()
    read = disk_queues.EngineFolder.read
    monkeypatch.setattr(disk_queues.EngineFolder, "read", lambda *args: held.wait() and read(*args))
    waits, gone = (two.add_request(prompt, ask(3)) for _ in range(2))
    runs = two.add_request(tokens(20, 3), ask(3))
    ended = set()
    while runs not in ended:
        ended |= {out.request_id for out in two.step() if out.finish_reason}
    assert ended == {runs}
    two.step()  # nothing runs: the step waits a moment and computes nothing
    two.abort(gone)
    held.set()
    outputs = []
    while two.has_work:
        outputs += two.step()
    assert [out.cached_tokens for out in outputs if out.request_id == waits] == [48] * 3
    assert [out.finish_reason for out in outputs if out.request_id == gone] == ["abort"]
    written(two)


def test_a_reset_empties_the_folder_too_and_a_bad_block_is_not_kept(begin):
    one, prompt = begin(form="fp32"), tokens(60)
    first = said(one, prompt)
    one.reset_prefix_cache()
    scheduler(one).disk.flush()
    assert files(one) == []
    assert said(one, prompt) == first
    scheduler(one).disk.flush()
    kept = len(files(one))
    assert kept == 4  # three of the prompt, one of its end
    one.cache.arenas[0].fill_(255)  # NaN
    [bad] = one.generate([prompt], ask(2))
    assert (bad.cached_tokens, bad.finish_reason) == (48, "error")
    scheduler(one).disk.flush()
    assert len(files(one)) == kept - 3
    assert said(one, prompt) == first
    written(one)


def test_two_engines_on_one_folder_find_what_the_other_has_written(begin):
    one, two, prompt = begin(), begin(), tokens(60)
    first = said(one, prompt)
    scheduler(one).disk.flush()
    assert said(two, prompt) == (48, first[1])
    assert read_tokens(two) == 48
    for llm in (one, two):
        written(llm)


def test_the_folder_keeps_its_size(begin):
    one = begin(form="fp32", prefix_cache_size=60_000)
    for seed in range(12):
        said(one, tokens(100, seed))
        scheduler(one).disk.flush()
    written(one)
    assert 0 < sum(file.stat().st_size for file in files(one)) <= 60_000


ENGINE = """
import sys
from disk_cache import engine, said
from tiny import tokens
llm = engine(sys.argv[1], sys.argv[2], "int8 with residual")
print("started", flush=True)
for seed in range(10**6):
    said(llm, tokens(100, seed))
"""


@pytest.mark.slow
def test_after_engines_were_killed_while_they_wrote_answers_are_those_of_a_cold_engine(begin, model_path, tmp_path):
    """LEAN_KILLS=100 kills more."""
    cold = [said(llm := begin(prefix_cache_dir=None), tokens(100, seed))[1] for seed in range(3)]
    nothing_left(llm)
    support = Path(__file__).parents[1] / "support"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(support), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-P", "-c", ENGINE, model_path("llama"), str(tmp_path / "cache")]
    found = 0
    for number in range(int(os.environ.get("LEAN_KILLS", "3"))):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)
        assert process.stdout.readline() == b"started\n"
        time.sleep(0.02 + 0.013 * (number % 30))
        process.kill()
        process.communicate()
        llm = begin()
        answers = [said(llm, tokens(100, seed)) for seed in range(3)]
        assert [answer for _, answer in answers] == cold
        assert llm.stats().disk.damaged == 0
        found += sum(cached for cached, _ in answers)
        if number % 2:  # the next process begins with an empty folder again
            llm.reset_prefix_cache()
        written(llm)
    assert found
