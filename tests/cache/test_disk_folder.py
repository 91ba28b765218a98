"""The folder of the prefix cache: it is ours or refused, keeps its size, and forgets what was used longest ago."""

import os
import stat
import subprocess
import sys
import time

import pytest
from helpers import refusal

from lean.cache.block_file import PART, DamagedFile, Key
from lean.cache.disk_folder import ABOUT, MARKER, DiskFolder, EngineFolder

ENGINE = bytes(range(32))
PAYLOAD = bytes(1000)


def key(number: int, pool: int = 0) -> Key:
    return Key(pool, number.to_bytes(32, "big"))


def engine(path, limit=10**9, fingerprint=ENGINE) -> EngineFolder:
    return EngineFolder(DiskFolder.create(path, limit), fingerprint, {"model": "tiny"})


def test_a_new_or_an_empty_folder_becomes_a_cache_that_only_its_owner_sees(tmp_path):
    (tmp_path / "empty").mkdir(mode=0o755)
    for name in ("empty", "new/deeper"):
        folder = tmp_path / name
        engine(folder).write(key(1), memoryview(PAYLOAD))
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert {stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*") if path.is_dir()} == {0o700}
        DiskFolder.create(folder, 5)
        DiskFolder.existing(folder)


def test_a_folder_with_other_files_and_what_is_no_folder_are_refused_and_not_changed(tmp_path):
    foreign, file = tmp_path / "foreign", tmp_path / "file"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("mine")
    file.write_text("mine")
    assert "other files" in refusal(DiskFolder.create, foreign, 5)
    for path in (file, file / "below", tmp_path / ("x" * 300)):
        assert "prefix-cache-dir" in refusal(DiskFolder.create, path, 5)
    for path in (foreign, file, tmp_path / "missing"):
        assert "no prefix cache" in refusal(DiskFolder.existing, path)
    assert os.listdir(foreign) == ["thesis.txt"]


def test_a_block_is_found_by_its_key_alone_and_by_others_on_the_folder(tmp_path):
    one, other = engine(tmp_path), engine(tmp_path)
    one.write(key(1, 2), memoryview(PAYLOAD))
    into = bytearray(1000)
    other.read(key(1, 2), memoryview(into))
    assert key(1, 2) in other
    assert into == PAYLOAD
    assert key(1, 0) not in other
    assert key(2, 2) not in other
    assert key(1, 2) not in engine(tmp_path, fingerprint=bytes(32))


def test_a_damaged_block_is_removed_when_it_is_read(tmp_path):
    shelf = engine(tmp_path)
    shelf.write(key(1), memoryview(PAYLOAD))
    [file] = [stored.path for stored in shelf.folder.files(shelf.path)]
    os.truncate(file, 500)
    with pytest.raises(DamagedFile):
        shelf.read(key(1), memoryview(bytearray(1000)))
    assert key(1) not in shelf


def test_what_was_used_longest_ago_goes_where_the_folder_is_full_beginnings_last(tmp_path):
    shelf = engine(tmp_path, limit=10 * 1300)
    for number in range(10):
        shelf.write(key(number), memoryview(PAYLOAD))
        os.utime(shelf._file(key(number)), (number, number))
    shelf.used([key(number) for number in (2, 1, 0)])  # a prefix of blocks 0, 1, 2
    for number in range(10, 16):
        shelf.write(key(number), memoryview(PAYLOAD))
    left = [number for number in range(16) if key(number) in shelf]
    assert left[:3] == [0, 1, 2]
    assert left[3:] == list(range(left[3], 16))
    assert sum(stored.nbytes for stored in shelf.folder.files(shelf.path)) <= 10 * 1300
    order = sorted(shelf.folder.files(shelf.path))
    assert [stored.path.name for stored in order if stored.path.name in {key(i).name for i in range(3)}] == [
        key(number).name for number in (2, 1, 0)
    ]


def test_files_of_other_engines_count_and_go_too(tmp_path):
    old, new = engine(tmp_path, limit=6000), engine(tmp_path, limit=6000, fingerprint=bytes(32))
    for number in range(4):
        old.write(key(number), memoryview(PAYLOAD))
        os.utime(old._file(key(number)), (number, number))
    for number in range(4):
        new.write(key(number), memoryview(PAYLOAD))
    assert all(key(number) in new for number in range(4))
    assert sum(key(number) in old for number in range(4)) < 4


def test_what_killed_processes_left_is_removed_after_a_while(tmp_path):
    shelf = engine(tmp_path)
    shelf.write(key(1), memoryview(PAYLOAD))
    shelves = shelf._file(key(1)).parent
    old, fresh = (shelves / f"{key(2).name}.{number}{PART}" for number in (1, 2))
    for path in (old, fresh):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 3600,) * 2)
    assert len(list(shelf.folder.files(shelf.path))) == 1
    assert (old.exists(), fresh.exists()) == (False, True)


def test_kinds_are_listed_checked_and_removed_whatever_lies_between_them(tmp_path):
    shelf, other = engine(tmp_path), engine(tmp_path, fingerprint=bytes(32))
    for number in range(5):
        shelf.write(key(number), memoryview(PAYLOAD))
    other.write(key(1), memoryview(PAYLOAD))
    (tmp_path / "notes.txt").write_text("mine")
    (shelf.path / ABOUT).write_text("[1, 2")
    (tmp_path / ("a" * 64)).symlink_to(tmp_path)
    folder = DiskFolder.existing(tmp_path)
    kinds = {kind.fingerprint: kind for kind in folder.kinds()}
    assert {name: kind.num_files for name, kind in kinds.items()} == {ENGINE.hex(): 5, bytes(32).hex(): 1}
    assert kinds[ENGINE.hex()].about == {}
    assert kinds[bytes(32).hex()].about == {"model": "tiny"}
    [file] = [stored.path for stored in folder.files(other.path)]
    os.truncate(file, 400)
    assert [fault for _, fault in folder.check(ENGINE.hex())] == [None] * 5
    [(path, fault)] = folder.check(bytes(32).hex())
    assert path == file
    assert fault
    freed = folder.remove(ENGINE.hex())
    assert freed == kinds[ENGINE.hex()].nbytes
    assert not shelf.path.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([MARKER, "notes.txt", "a" * 64, bytes(32).hex()])
    shelf.write(key(7), memoryview(PAYLOAD))
    assert key(7) in shelf


def test_a_read_only_folder_is_read_and_a_full_disk_is_an_error_of_the_write(tmp_path, monkeypatch):
    shelf = engine(tmp_path)
    shelf.write(key(1), memoryview(PAYLOAD))

    def refuse(*_, **__):
        raise OSError(30, "Read-only file system")

    for name in ("os.utime", "os.fsync"):
        monkeypatch.setattr(name, refuse)
    shelf.used([key(1)])
    shelf.read(key(1), memoryview(bytearray(1000)))
    with pytest.raises(OSError, match="Read-only"):
        shelf.write(key(2), memoryview(PAYLOAD))


WRITER = """
import sys
from pathlib import Path
from lean.cache.block_file import Key
from lean.cache.disk_folder import DiskFolder, EngineFolder
folder = EngineFolder(DiskFolder.create(Path(sys.argv[1]), 60_000), bytes(range(32)), {})
print("started", flush=True)
for number in range(10**6):
    folder.write(Key(0, number.to_bytes(32, "big")), memoryview(bytes([number % 256]) * 3000))
"""


def wait_for_a_block(folder):
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if any(kind.num_files for kind in DiskFolder.existing(folder).kinds()):
            return
        time.sleep(0.01)


def test_writers_that_are_killed_at_any_moment_leave_no_damaged_block(tmp_path):
    """LEAN_KILLS=100 kills more. Two processes write into one folder that is too small for what they write."""
    kills, checked = int(os.environ.get("LEAN_KILLS", "6")), 0
    for number in range(kills):
        command = [sys.executable, "-P", "-c", WRITER, str(tmp_path / "cache")]
        writers = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
        for writer in writers:
            assert writer.stdout.readline() == b"started\n"
        if number % 3 == 0:  # some are killed before their first block is there
            wait_for_a_block(tmp_path / "cache")
        time.sleep(0.002 * (number % 25))
        for writer in writers:
            writer.kill()
            writer.communicate()
        folder = DiskFolder.existing(tmp_path / "cache")
        faults = [fault for kind in folder.kinds() for _, fault in folder.check(kind.fingerprint)]
        assert not any(faults)
        checked += len(faults)
    assert checked
