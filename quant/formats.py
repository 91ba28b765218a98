"""KV formats: how one vector of a K or V head is stored in bytes.

A format is data. Pool sizes, reports and kernel strides all read their byte counts from here.

Bytes of a vector of dim elements (dim a multiple of 8), codes in the order of the dims:

    int8   dim codes, two's complement                        one fp16 scale
    fp8    dim codes, e4m3fn                                  one fp16 scale
    int6   dim/2 bytes of bits 5..2, dim/4 bytes of bits 1..0    one byte per group of 64
    int5   dim/2 bytes of bits 4..1, dim/8 bytes of bit 0        one byte per group of 64
    int4   dim/2 bytes of bits 3..0                              one byte per group of 32
    int3   dim/4 bytes of bits 2..1, dim/8 bytes of bit 0        one byte per group of 64

The low-bit codes are two's complement and cut into *planes* of 4, 2 and 1 bits; `planes` lists them. A plane is cut
into units of 32 dims, the last one shorter. In a unit of n dims a plane of p bits has n p / 8 bytes, and byte k holds
the dims k, k + n p / 8, k + 2 n p / 8, ..., the first in its lowest bits. So the bits of four neighbouring dims lie at
one place of four neighbouring bytes, and a kernel moves them together, with one shift and one mask.

A scale byte is the upper byte of an fp16 without its sign, moved left by one: bits e4 .. e0 m2 m1 m0 (e5m3). 0 is the
scale of a group of zeros, 0xFF is NaN. The number of a code c is (c + 1/2) times the scale.
"""

from dataclasses import dataclass, replace
from enum import IntEnum

CODEC_VERSION = 2  # what the bytes of a block mean; another number where any format stores other bytes for a vector

UNIT = 32  # dims whose codes lie together in a plane


class Kind(IntEnum):
    """How a code is turned into a number."""

    RAW = 0  # an IEEE float without a scale
    INT = 1  # two's complement integer times an fp16 scale
    E4M3 = 2  # OCP e4m3fn times an fp16 scale (https://arxiv.org/abs/2209.05433)
    GRID = 3  # two's complement integer plus one half, times a one-byte scale


def rotation_size(dim: int) -> int:
    """Largest power of two that divides ``dim``: the width of the Hadamard blocks."""
    return dim & -dim


@dataclass(frozen=True)
class KVFormat:
    """One row of the format table.

    Attributes:
        name: what users write after ``--kv-dtype``.
        bits: bits per code.
        kind: how a code is read.
        group_size: dims along head_dim that share one scale; 0 means the whole vector. RAW has no scale.
        rotate: vectors are multiplied by the block Hadamard rotation, with its signs, before they are encoded.
    """

    name: str
    bits: int
    kind: Kind
    group_size: int = 0
    rotate: bool = False

    @property
    def quantized(self) -> bool:
        return self.kind is not Kind.RAW

    @property
    def code(self) -> int:
        """The format as one integer, for op arguments: twice the row in the table, plus one if rotated."""
        code = _CODES.get(self)
        if code is None:
            raise ValueError(f"{self} is not in the format table, so no kernel can read it")
        return code

    @staticmethod
    def from_code(code: int) -> "KVFormat":
        """The format that `code` numbers."""
        return _BY_CODE[code]

    @staticmethod
    def codes() -> range:
        """All numbers that `from_code` takes."""
        return range(len(_BY_CODE))

    @property
    def max_code(self) -> float:
        """The largest number of a group, over its scale. The smallest is its negative."""
        if self.kind is Kind.E4M3:
            return 448.0
        return 2.0 ** (self.bits - 1) - (0.5 if self.kind is Kind.GRID else 1.0)

    @property
    def planes(self) -> tuple[int, ...]:
        """Bits of the planes that the codes of a GRID format are cut into, the highest bits first."""
        return {3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2)}[self.bits]

    def group_width(self, dim: int) -> int:
        """Dims that share one scale; the last group of a vector may be shorter."""
        return self.group_size or dim

    def groups(self, dim: int) -> int:
        """Number of scales of a vector of ``dim`` elements."""
        if not self.quantized:
            return 0
        return -(-dim // self.group_width(dim))

    def code_bytes(self, dim: int) -> int:
        return dim * self.bits // 8

    def scale_bytes(self, dim: int) -> int:
        return (1 if self.kind is Kind.GRID else 2) * self.groups(dim)

    def bytes_per_vector(self, dim: int) -> int:
        """Bytes of one vector of ``dim`` elements, scales included."""
        return self.code_bytes(dim) + self.scale_bytes(dim)

    def supports_prefix(self, dim: int, prefix: int) -> bool:
        """Whether the first ``prefix`` numbers of a vector of ``dim`` can be read alone, with scales of their own.

        Their codes are then the first bytes, no group of the scales and no block of the rotation ends beyond them, and
        kernels decode up to 32 numbers at once.
        """
        whole = not self.quantized or prefix % (self.group_size or UNIT) == 0 == prefix % UNIT
        if self.kind is Kind.GRID and len(self.planes) > 1:
            return False
        return prefix <= dim and whole and not (self.rotate and prefix % rotation_size(dim))

    def supports(self, dim: int) -> bool:
        """A byte holds 8 dims of a plane of one bit, and the rotation needs 8 | dim; raw floats take any dim."""
        return dim > 0 and (dim % 8 == 0 or not (self.quantized or self.rotate))


GROUP_SIZES = (32, 64, 128)  # of GRID formats
_DEFAULT_GROUPS = {3: 64, 4: 32, 5: 64, 6: 64}  # by bits


def _grid(bits: int, group_size: int) -> KVFormat:
    name = f"int{bits}" if group_size == _DEFAULT_GROUPS[bits] else f"int{bits}g{group_size}"
    return KVFormat(name, bits, Kind.GRID, group_size, rotate=True)


_TABLE = (
    KVFormat("fp64", 64, Kind.RAW),
    KVFormat("fp32", 32, Kind.RAW),
    KVFormat("fp16", 16, Kind.RAW),
    KVFormat("bf16", 16, Kind.RAW),
    KVFormat("int8", 8, Kind.INT, rotate=True),
    KVFormat("fp8", 8, Kind.E4M3),
    *(_grid(bits, group_size) for bits in _DEFAULT_GROUPS for group_size in GROUP_SIZES),
)
_BY_CODE = [replace(fmt, rotate=rotate) for fmt in _TABLE for rotate in (False, True)]
_CODES = {fmt: code for code, fmt in enumerate(_BY_CODE)}
FORMATS = {fmt.name: fmt for fmt in _TABLE}
FP64, FP32, FP16, BF16, INT8, FP8 = _TABLE[:6]
INT3, INT4, INT5, INT6 = (FORMATS[f"int{bits}"] for bits in _DEFAULT_GROUPS)
INT4G64 = FORMATS["int4g64"]

_ALIASES = {"fp8_e4m3": "fp8", "float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_ALIASES |= {f"int{bits}g{group_size}": f"int{bits}" for bits, group_size in _DEFAULT_GROUPS.items()}
_PAIRS = {"k8v4": (INT8, INT4), "k6v4": (INT6, INT4G64), "k5v4": (INT5, INT4G64)}
NAMES = (*(fmt.name for fmt in _TABLE if fmt.group_size in (0, _DEFAULT_GROUPS.get(fmt.bits))), *_PAIRS)


def format_named(name: str) -> KVFormat:
    """The format called ``name``. Raises ValueError for an unknown name."""
    fmt = FORMATS.get(_ALIASES.get(name, name))
    if fmt is None:
        groups = ", ".join(f"g{size}" for size in GROUP_SIZES)
        raise ValueError(
            f"unknown KV format {name!r}: choose from {', '.join(NAMES)} or k=NAME,v=NAME; "
            f"int3 to int6 take a group size: {groups}, as in int4g64"
        )
    return fmt


def parse_kv_dtype(text: str) -> tuple[KVFormat, KVFormat]:
    """``--kv-dtype`` to (K format, V format): a name, a pair such as ``k8v4``, or ``k=NAME,v=NAME``. Raises
    ValueError."""
    text = text.strip().lower()
    if text in _PAIRS:
        return _PAIRS[text]
    if "=" not in text:
        return (format_named(text),) * 2
    parts = [part.strip().partition("=") for part in text.split(",")]
    named = {key.strip(): value.strip() for key, _, value in parts}
    if len(parts) != 2 or set(named) != {"k", "v"}:
        raise ValueError(f"cannot read KV format {text!r}: write a name or k=NAME,v=NAME")
    return format_named(named["k"]), format_named(named["v"])


def describe(k_format: KVFormat, v_format: KVFormat) -> str:
    """The shortest ``--kv-dtype`` spelling of a pair, with a note where a format's rotation is not the default."""

    def label(fmt: KVFormat) -> str:
        usual = FORMATS[fmt.name].rotate
        return fmt.name + ("" if fmt.rotate == usual else " rotated" if fmt.rotate else " not rotated")

    if k_format == v_format:
        return label(k_format)
    for name, pair in _PAIRS.items():
        if pair == (k_format, v_format):
            return name
    return f"k={label(k_format)},v={label(v_format)}"
