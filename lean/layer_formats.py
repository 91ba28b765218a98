"""The KV format of every layer, and how the options that choose it are spelled."""

import re
from collections.abc import Iterator

from lean.errors import ConfigError, one_line
from lean.quant.formats import BF16, KVFormat, parse_kv_dtype

_RANGE = re.compile(r"(-?\d+)(?:(-)(-?\d+)?)?")


def parse_formats(text: str, dtype_format: KVFormat) -> tuple[KVFormat, KVFormat]:
    """A ``--kv-dtype`` to (K format, V format); ``auto`` gives ``dtype_format``. Raises ConfigError."""
    if text.strip().lower() == "auto":
        return dtype_format, dtype_format
    try:
        return parse_kv_dtype(text)
    except ValueError as error:
        raise ConfigError(f"{error} (or auto)") from None


def split_formats(text: str) -> list[str]:
    """A comma list of ``--kv-dtype`` values to its items. A comma inside ``k=NAME,v=NAME`` is not a separator.

    ``int8,v=int4,k=int8,auto`` gives ``int8``, ``v=int4,k=int8`` and ``auto``. Raises ConfigError for an item that is
    not a format.
    """
    items: list[str] = []
    half = False  # whether the last item is the first half of a pair
    for part in map(str.strip, text.split(",")):
        if half and "=" in part:
            items[-1] += "," + part
            half = False
        else:
            items.append(part)
            half = "=" in part
    if not all(items):
        raise ConfigError(f"KV formats {one_line(text, 40)!r} have an empty item: write names with commas between them")
    for item in items:
        parse_formats(item, BF16)
    return items


def parse_layers(text: str, num_layers: int | None = None) -> range:
    """``3``, ``-1``, ``0-1``, ``16-`` to layer indices; negative ones count from the end.

    Without ``num_layers`` only the spelling is checked. Raises ConfigError.
    """
    match = _RANGE.fullmatch(text.strip())
    if not match:
        raise ConfigError(f"cannot read layers {one_line(text, 40)!r}: write e.g. 3, -1, 0-1 or 16-")
    if num_layers is None:
        return range(0)

    def index(number: str) -> int:
        layer = int(number) + (num_layers if number.startswith("-") else 0)
        if not 0 <= layer < num_layers:
            raise ConfigError(
                f"layer {number} does not exist: this model has {num_layers} layers, 0 to {num_layers - 1}"
            )
        return layer

    first = index(match[1])
    last = index(match[3]) if match[3] else num_layers - 1 if match[2] else first
    if last < first:
        raise ConfigError(f"layers {text.strip()} are an empty range: {first} comes after {last}")
    return range(first, last + 1)


def read_ranges(text: str) -> list[tuple[str, str]]:
    """``0-1:bf16,2-:int4`` to (layers, format) pairs. A comma inside ``k=NAME,v=NAME`` is not a separator."""
    pairs = []
    for part in re.split(r",(?=\s*-?\d)", text):
        layers, colon, name = part.partition(":")
        if not colon or not name.strip():
            raise ConfigError(f"cannot read kv-layers {one_line(part, 40)!r}: write e.g. 0-1:bf16,2-:int4")
        pairs.append((layers, name))
    return pairs


def layer_formats(
    num_layers: int, kv_dtype: str, kv_layers: str | None, kv_skip_layers: str | None, dtype_format: KVFormat
) -> list[tuple[KVFormat, KVFormat]]:
    """(K format, V format) of every layer.

    Args:
        kv_dtype: format of layers that the other two options do not name.
        kv_layers: (layers, format) pairs, see `read_ranges`; a layer may be named once.
        kv_skip_layers: comma-separated layers that keep the model's dtype.
        dtype_format: the unquantized format of the model's dtype.

    Raises:
        ConfigError: a layer does not exist or is named twice, or a format does not exist.
    """
    formats = [parse_formats(kv_dtype, dtype_format)] * num_layers
    named: set[int] = set()
    for option, layers, pair in _named_layers(kv_layers, kv_skip_layers, dtype_format, num_layers):
        for layer in layers:
            if layer in named:
                raise ConfigError(f"{option}: layer {layer} is named twice")
            named.add(layer)
            formats[layer] = pair
    return formats


def check_spelling(kv_dtype: str, kv_layers: str | None, kv_skip_layers: str | None) -> None:
    """Check the options of `layer_formats` before a model is known. Raises ConfigError."""
    parse_formats(kv_dtype, BF16)
    for _ in _named_layers(kv_layers, kv_skip_layers, BF16):
        pass


def _named_layers(
    kv_layers: str | None, kv_skip_layers: str | None, dtype_format: KVFormat, num_layers: int | None = None
) -> Iterator[tuple[str, range, tuple[KVFormat, KVFormat]]]:
    """(option, layers, (K format, V format)) of every range of layers that the options name."""
    for layers, name in read_ranges(kv_layers) if kv_layers else ():
        yield "kv-layers", parse_layers(layers, num_layers), parse_formats(name, dtype_format)
    for layers in kv_skip_layers.split(",") if kv_skip_layers else ():
        yield "kv-skip-layers", parse_layers(layers, num_layers), (dtype_format, dtype_format)
