"""A file that keeps one block of the cache: a header, and the bytes of the block as they lie in the arena.

The header says for which engine and which content the bytes are, and has a checksum of them. A file is written under
another name, synced, and renamed. So whoever reads a file sees all of it or a fault, and a fault is found before a byte
is used.
"""

import hashlib
import os
import secrets
import struct
from pathlib import Path
from typing import NamedTuple

MAGIC = b"lean KV\n"
VERSION = 1  # of this file, not of what the bytes mean: that is part of the fingerprint
PART = ".part"  # ends the name of a file that is being written

_FIELDS = struct.Struct("<8sIIQ32s32s32s")  # magic, version, pool, bytes, fingerprint, content, sha256 of the bytes
_SUM = 32
HEADER_BYTES = _FIELDS.size + _SUM


class Key(NamedTuple):
    """Names the block: the pool, and the hash of its content."""

    pool: int
    content: bytes

    @property
    def name(self) -> str:
        return f"{self.content.hex()}-{self.pool}"


class DamagedFile(Exception):
    """The file is not what its name says. The message says why."""


def write_block(file: Path, fingerprint: bytes, key: Key, payload: bytes | memoryview) -> int:
    """Write a block; returns the bytes of the file.

    Args:
        file: where it lies, in a folder that exists.
        fingerprint: 32 bytes that name the engine.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    payload = memoryview(payload).cast("B")
    fields = _FIELDS.pack(
        MAGIC, VERSION, key.pool, len(payload), fingerprint, key.content, hashlib.sha256(payload).digest()
    )
    part = file.with_name(f"{file.name}.{secrets.token_hex(8)}{PART}")
    try:
        with os.fdopen(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600), "wb") as stream:
            stream.write(fields + hashlib.sha256(fields).digest())
            stream.write(payload)
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(file)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return HEADER_BYTES + len(payload)


def read_block(file: Path, fingerprint: bytes, key: Key, into: memoryview) -> None:
    """Read a block into a buffer of its size.

    Raises:
        DamagedFile: a byte differs from what was written, or the file is for another engine, content or size.
        OSError: it cannot be read.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # a FIFO of that name must not block
    with os.fdopen(os.open(file, flags), "rb", buffering=0) as stream:
        checksum = _check_header(stream.read(HEADER_BYTES) or b"", fingerprint, key, len(into))
        if stream.readinto(into) != len(into) or stream.read(1):
            raise DamagedFile("its length differs from what its header says")
    if hashlib.sha256(into).digest() != checksum:
        raise DamagedFile("its checksum differs")


def check_block(file: Path, fingerprint: bytes, key: Key) -> None:
    """Raise DamagedFile or OSError unless `read_block` would read the file."""
    payload = bytearray(max(0, file.stat().st_size - HEADER_BYTES))
    read_block(file, fingerprint, key, memoryview(payload))


def _check_header(header: bytes, fingerprint: bytes, key: Key, size: int) -> bytes:
    """The checksum of the bytes that follow the header. Raises DamagedFile."""
    fields = header[: _FIELDS.size]
    if len(header) < HEADER_BYTES or hashlib.sha256(fields).digest() != header[_FIELDS.size :]:
        raise DamagedFile("its header is damaged")
    magic, version, pool, length, engine, content, checksum = _FIELDS.unpack(fields)
    if (magic, version) != (MAGIC, VERSION):
        raise DamagedFile(f"it is of version {version}, not {VERSION}")
    if (engine, pool, content) != (fingerprint, key.pool, key.content):
        raise DamagedFile("it holds another block than its name says")
    if length != size:
        raise DamagedFile(f"it holds {length:,} bytes, not {size:,}")
    return checksum
