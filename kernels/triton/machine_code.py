"""Reads compiled kernels: registers, spills, loops and loads, from NVIDIA's SASS and from AMD's assembly."""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import triton

_MATRIX = re.compile(r"(HMMA|HGMMA|QGMMA|UTCHMMA|v_mfma|v_wmma)")
_LOAD = re.compile(r"(?:LDGSTS|LDG)\.E(?:\.\w+)*?(?:\.(64|128|U16|U8|S8|S16))?(?:\.\w+)* ")


class NvidiaCode(NamedTuple):
    """code: (address, instruction without its predicate) in order. registers and spill_bytes: of a thread."""

    code: list[tuple[int, str]]
    registers: int
    spill_bytes: int

    @property
    def matrix_instructions(self) -> int:
        return sum(bool(_MATRIX.match(text)) for _, text in self.code)

    def main_loop(self) -> list[str]:
        """The body with the most matrix instructions; where there are none, the longest."""
        return max(self.loops(), key=lambda body: (sum(bool(_MATRIX.match(text)) for text in body), len(body)))

    def loops(self) -> Iterator[list[str]]:
        """Bodies of innermost loops: what lies between a backward branch and its target, without another such pair.
        Code that an assembler moves to the end of a kernel jumps back over whole loops."""
        spans = set(self._backward_branches())
        for first, last in sorted(spans):
            if not any(first <= start and end <= last for start, end in spans - {(first, last)}):
                yield [body for at, body in self.code if first <= at <= last]

    def _backward_branches(self) -> Iterator[tuple[int, int]]:
        for address, text in self.code:
            jump = re.match(r"BRA(?:\.\S+)* .*?0x([0-9a-f]+)", text)
            if jump and int(jump[1], 16) < address:
                yield int(jump[1], 16), address


class AmdCode(NamedTuple):
    """registers: vector registers of a thread. widest_load: bytes a thread loads at once."""

    registers: int
    spill_bytes: int
    widest_load: int
    matrix_instructions: int


@cache
def _cuobjdump() -> str:
    found = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not found.exists():
        raise FileNotFoundError(f"this Triton has no cuobjdump at {found}")
    return str(found)


def sass_of(cubin: bytes) -> str:
    """The disassembly of a cubin, with its resource usage."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        dump = [_cuobjdump(), "-sass", "-res-usage", file.name]
        return subprocess.run(dump, check=True, capture_output=True, text=True).stdout


def read_nvidia(cubin: bytes) -> NvidiaCode:
    sass = sass_of(cubin)
    found = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", sass, re.MULTILINE)
    code = [(int(address, 16), re.sub(r"^@!?U?P\w+ ", "", text.strip())) for address, text in found]
    usage = re.search(r"REG:(\d+) STACK:(\d+)", sass)
    assert usage is not None
    return NvidiaCode(code, int(usage[1]), int(usage[2]))


def read_amd(assembly: str) -> AmdCode:
    def number(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", assembly)
        return int(found[1]) if found else 0

    spills = 4 * number("vgpr_spill_count")  # scalar registers spill into vector registers
    # CDNA counts words (dwordx4), RDNA bits (b128).
    loads = re.findall(r"(?:global|buffer)_load_(?:dword(?:x(\d))?|b(\d+))\b", assembly)
    wide = [int(bits) // 8 if bits else 4 * int(words or 1) for words, bits in loads]
    return AmdCode(number("vgpr_count"), spills, max(wide, default=0), len(_MATRIX.findall(assembly)))


def load_width(body: list[str], code_bytes: int, threads: int) -> int:
    """Bytes a thread moves at once in the narrowest of the widest loads that together bring ``code_bytes``."""
    widths = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1, None: 4}
    loads = [_LOAD.match(text + " ") for text in body]
    found = sorted((widths[_width(match[0])] for match in loads if match), reverse=True)
    arrived = 0
    for width in found:
        arrived += width * threads
        if arrived >= code_bytes:
            return width
    return found[-1] if found else 0


def _width(load: str) -> str | None:
    return next((part for part in ("128", "64", "U16", "S16", "U8", "S8") if f".{part}" in load), None)
