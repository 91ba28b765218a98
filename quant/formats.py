"""KV formats: how one vector of a K or V head is stored in bytes.

A format is data. Pool sizes, reports and kernel strides all read their byte counts from here.
"""

from dataclasses import dataclass, replace
from enum import IntEnum

CODEC_VERSION = 1  # what the bytes of a block mean; another number where any format stores other bytes for a vector


class Kind(IntEnum):
    """How a code is turned into a number."""

    RAW = 0  # an IEEE float without a scale
    INT = 1  # two's complement integer times a scale
    E4M3 = 2  # OCP e4m3fn times a scale (https://arxiv.org/abs/2209.05433)


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
        group_size: dims along head_dim that share one fp16 scale; 0 means the whole vector. RAW has no scale.
        rotate: vectors are multiplied by the block Hadamard rotation before they are encoded.
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
        """The code of the largest absolute value of a group."""
        return 448.0 if self.kind is Kind.E4M3 else 2.0 ** (self.bits - 1) - 1

    @property
    def min_code(self) -> float:
        """int4 uses its sixteenth code; int8 and fp8 stay symmetric."""
        return -self.max_code - (self.bits == 4)

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
        return 2 * self.groups(dim)

    def bytes_per_vector(self, dim: int) -> int:
        """Bytes of one vector of ``dim`` elements, scales included."""
        return self.code_bytes(dim) + self.scale_bytes(dim)

    def supports_prefix(self, dim: int, prefix: int) -> bool:
        """Whether the first ``prefix`` numbers of a vector of ``dim`` can be read alone, with scales of their own: no
        block of the rotation ends beyond them, and kernels decode up to 32 numbers at once."""
        whole = not self.quantized or prefix % 32 == 0
        return prefix <= dim and whole and not (self.rotate and prefix % rotation_size(dim))

    def supports(self, dim: int) -> bool:
        """int4 halves groups of at least 8 dims and the rotation needs 8 | dim; raw floats take any dim."""
        return dim > 0 and (dim % 8 == 0 or not (self.quantized or self.rotate))


_TABLE = (
    KVFormat("fp64", 64, Kind.RAW),
    KVFormat("fp32", 32, Kind.RAW),
    KVFormat("fp16", 16, Kind.RAW),
    KVFormat("bf16", 16, Kind.RAW),
    KVFormat("int8", 8, Kind.INT, rotate=True),
    KVFormat("fp8", 8, Kind.E4M3),
    KVFormat("int4", 4, Kind.INT, group_size=32, rotate=True),
)
_BY_CODE = [replace(fmt, rotate=rotate) for fmt in _TABLE for rotate in (False, True)]
_CODES = {fmt: code for code, fmt in enumerate(_BY_CODE)}
FP64, FP32, FP16, BF16, INT8, FP8, INT4 = _TABLE
FORMATS = {fmt.name: fmt for fmt in _TABLE}

_ALIASES = {"fp8_e4m3": "fp8", "float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_PAIRS = {"k8v4": (INT8, INT4)}
NAMES = (*FORMATS, *_PAIRS)


def format_named(name: str) -> KVFormat:
    """The format called ``name``. Raises ValueError for an unknown name."""
    fmt = FORMATS.get(_ALIASES.get(name, name))
    if fmt is None:
        raise ValueError(f"unknown KV format {name!r}: choose from {', '.join(NAMES)} or k=NAME,v=NAME")
    return fmt


def parse_kv_dtype(text: str) -> tuple[KVFormat, KVFormat]:
    """``--kv-dtype`` to (K format, V format): a name, ``k8v4``, or ``k=NAME,v=NAME``. Raises ValueError."""
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
