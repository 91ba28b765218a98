"""KV formats: how one vector of a K or V head is stored in bytes.

A format is data. Pool sizes, reports and kernel strides all read their byte counts from here.

Bytes of a vector of dim elements (dim a multiple of 8), codes in the order of the dims:

    int8   dim codes, two's complement                        one fp16 scale
    fp8    dim codes, e4m3fn                                  one fp16 scale
    int6   dim/2 bytes of bits 5..2, dim/4 bytes of bits 1..0    one byte per group of 64
    int5   dim/2 bytes of bits 4..1, dim/8 bytes of bit 0        one byte per group of 64
    int4   dim/2 bytes of bits 3..0                              one byte per group of 32
    int3   dim/4 bytes of bits 2..1, dim/8 bytes of bit 0        one byte per group of 64
    pc3, pc4, pc5   as int3, int4, int5                          two bytes per channel of 32 tokens

The low-bit codes are two's complement and cut into *planes* of 4, 2 and 1 bits; `planes` lists them. A plane is cut
into units of 32 dims, the last one shorter. In a unit of n dims a plane of p bits has n p / 8 bytes, and byte k holds
the dims k, k + n p / 8, k + 2 n p / 8, ..., the first in its lowest bits. So the bits of four neighbouring dims lie at
one place of four neighbouring bytes, and a kernel moves them together, with one shift and one mask.

A scale byte is the upper byte of an fp16 without its sign, moved left by one: bits e4 .. e0 m2 m1 m0 (e5m3). 0 is the
scale of a group of zeros, 0xFF is NaN. The number of a code c is (c + 1/2) times the scale.

pc3 to pc5 are for K. They give every channel, an element of the rotated vector, a scale and a zero for 32 tokens of a
sequence, the positions 32 i .. 32 i + 31. A group of tokens has 2 dim bytes beside its codes: the scale bytes of all
channels, then their zeros, two's complement. The number of a code c is (c + zero) times the scale. A group is encoded
once, when its last token is written, from the exact copies of the residual. So a residual of at least 32 tokens is
needed, and no token of a group is read from it before.
"""

from dataclasses import dataclass, replace
from enum import IntEnum

CODEC_VERSION = 2  # what the bytes of a block mean; another number where any format stores other bytes for a vector

UNIT = 32  # dims whose codes lie together in a plane
CHANNEL_TOKENS = 32  # tokens that share a scale and a zero for each channel


class Kind(IntEnum):
    """How a code is turned into a number."""

    RAW = 0  # an IEEE float without a scale
    INT = 1  # two's complement integer times an fp16 scale
    E4M3 = 2  # OCP e4m3fn times an fp16 scale (https://arxiv.org/abs/2209.05433)
    GRID = 3  # two's complement integer plus one half, times a one-byte scale
    CHANNEL = 4  # two's complement integer plus a zero, times a one-byte scale, both of one channel of several tokens


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
        group_size: dims along head_dim that share one scale; 0 means the whole vector. RAW has no scale, CHANNEL none
            of a vector.
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
    def by_channel(self) -> bool:
        """Whether `CHANNEL_TOKENS` tokens are encoded together. Such a format is for K."""
        return self.kind is Kind.CHANNEL

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
        """Bits of the planes that the codes of a GRID or CHANNEL format are cut into, the highest bits first."""
        return {3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2)}[self.bits]

    def group_width(self, dim: int) -> int:
        """Dims that share one scale; the last group of a vector may be shorter."""
        return self.group_size or dim

    def groups(self, dim: int) -> int:
        """Number of scales of a vector of ``dim`` elements."""
        if not self.quantized or self.by_channel:
            return 0
        return -(-dim // self.group_width(dim))

    def code_bytes(self, dim: int) -> int:
        return dim * self.bits // 8

    def scale_bytes(self, dim: int) -> int:
        """Bytes of the scales of a vector of ``dim`` elements; of CHANNEL formats its share of those of its group."""
        if self.by_channel:
            return 2 * dim // CHANNEL_TOKENS
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
        if self.by_channel or (self.kind is Kind.GRID and len(self.planes) > 1):
            return False
        return prefix <= dim and whole and not (self.rotate and prefix % rotation_size(dim))

    @property
    def dim_multiple(self) -> int:
        """What a head_dim must be a multiple of.

        A byte holds 8 dims of a plane of one bit, and the rotation needs 8 | dim. A token's share of the bytes of its
        group is whole where 16 | dim. Raw floats take any dim.
        """
        return 16 if self.by_channel else 8 if self.quantized or self.rotate else 1

    def supports(self, dim: int) -> bool:
        return dim > 0 and dim % self.dim_multiple == 0


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
    *(KVFormat(f"pc{bits}", bits, Kind.CHANNEL, rotate=True) for bits in (3, 4, 5)),
)
_BY_CODE = [replace(fmt, rotate=rotate) for fmt in _TABLE for rotate in (False, True)]
_CODES = {fmt: code for code, fmt in enumerate(_BY_CODE)}
FORMATS = {fmt.name: fmt for fmt in _TABLE}
FP64, FP32, FP16, BF16, INT8, FP8 = _TABLE[:6]
INT3, INT4, INT5, INT6 = (FORMATS[f"int{bits}"] for bits in _DEFAULT_GROUPS)
INT4G64 = FORMATS["int4g64"]
PC3, PC4, PC5 = (FORMATS[f"pc{bits}"] for bits in (3, 4, 5))

_ALIASES = {"fp8_e4m3": "fp8", "float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_ALIASES |= {f"int{bits}g{group_size}": f"int{bits}" for bits, group_size in _DEFAULT_GROUPS.items()}
_PAIRS = {"k8v4": (INT8, INT4), "k6v4": (INT6, INT4G64), "k5v4": (INT5, INT4G64), "pc4v3": (PC4, INT3)}
_ALONE = [fmt for fmt in _TABLE if fmt.group_size in (0, _DEFAULT_GROUPS.get(fmt.bits)) and not fmt.by_channel]
NAMES = (*(fmt.name for fmt in _ALONE), *_PAIRS)  # what may be written for K and V together


def format_named(name: str) -> KVFormat:
    """The format called ``name``. Raises ValueError for an unknown name."""
    fmt = FORMATS.get(_ALIASES.get(name, name))
    if fmt is None:
        groups = ", ".join(f"g{size}" for size in GROUP_SIZES)
        raise ValueError(
            f"unknown KV format {name!r}: choose from {', '.join(NAMES)} or k=NAME,v=NAME; "
            f"int3 to int6 take a group size: {groups}, as in int4g64; K may be pc3, pc4 or pc5"
        )
    return fmt


def parse_kv_dtype(text: str) -> tuple[KVFormat, KVFormat]:
    """``--kv-dtype`` to (K format, V format): a name, a pair such as ``k8v4``, or ``k=NAME,v=NAME``. Raises
    ValueError."""
    text = text.strip().lower()
    if text in _PAIRS:
        return _PAIRS[text]
    if "=" not in text:
        return _checked_pair(format_named(text), format_named(text))
    parts = [part.strip().partition("=") for part in text.split(",")]
    named = {key.strip(): value.strip() for key, _, value in parts}
    if len(parts) != 2 or set(named) != {"k", "v"}:
        raise ValueError(f"cannot read KV format {text!r}: write a name or k=NAME,v=NAME")
    return _checked_pair(format_named(named["k"]), format_named(named["v"]))


def _checked_pair(k_format: KVFormat, v_format: KVFormat) -> tuple[KVFormat, KVFormat]:
    if v_format.by_channel:
        raise ValueError(f"{v_format.name} is a format of K alone: write k={k_format.name},v=int4, or another V")
    return k_format, v_format


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
