"""A block's file is read back as it was written, or not at all."""

import os
import stat

import pytest

from lean.cache.block_file import HEADER_BYTES, DamagedFile, Key, check_block, read_block, write_block

ENGINE, KEY = bytes(range(32)), Key(3, bytes(range(100, 132)))
PAYLOAD = bytes(i * 7 % 256 for i in range(1000))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / KEY.name
    assert write_block(path, ENGINE, KEY, PAYLOAD) == HEADER_BYTES + len(PAYLOAD) == path.stat().st_size
    return path


def read(path, engine=ENGINE, key=KEY, size=1000):
    into = bytearray(size)
    read_block(path, engine, key, memoryview(into))
    return bytes(into)


def test_a_block_is_read_back_as_it_was_written_and_nobody_else_may_read_it(file):
    assert read(file) == PAYLOAD
    check_block(file, ENGINE, KEY)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert os.listdir(file.parent) == [file.name]


def test_a_flipped_bit_is_found_wherever_it_is(file):
    whole = file.read_bytes()
    for place in [*range(HEADER_BYTES), *range(HEADER_BYTES, len(whole), 37), len(whole) - 1]:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        file.write_bytes(damaged)
        with pytest.raises(DamagedFile):
            read(file)
        with pytest.raises(DamagedFile):
            check_block(file, ENGINE, KEY)
    file.write_bytes(whole)
    assert read(file) == PAYLOAD


@pytest.mark.parametrize("size", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1, HEADER_BYTES + 999, 10_000])
def test_a_file_of_another_length_is_found(file, size):
    os.truncate(file, size)
    with pytest.raises(DamagedFile):
        read(file)
    with pytest.raises(DamagedFile):
        check_block(file, ENGINE, KEY)


def test_a_file_for_another_engine_pool_content_or_size_is_not_read(file):
    others = [
        {"engine": bytes(32)},
        {"key": Key(2, KEY.content)},
        {"key": Key(3, bytes(32))},
        {"size": 999},
        {"size": 1001},
    ]
    for other in others:
        with pytest.raises(DamagedFile):
            read(file, **other)


def test_what_is_no_file_of_ours_is_not_followed_and_does_not_block(tmp_path, file):
    link, fifo, folder = (tmp_path / name for name in ("link", "fifo", "folder"))
    link.symlink_to(file)
    os.mkfifo(fifo)
    folder.mkdir()
    for path in (link, fifo, folder, tmp_path / "missing"):
        with pytest.raises((OSError, DamagedFile)):
            read(path)


def test_a_write_that_fails_leaves_nothing_and_keeps_the_old_file(file, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_block(file, ENGINE, KEY, PAYLOAD[::-1])
    assert os.listdir(file.parent) == [file.name]
    assert read(file) == PAYLOAD
