"""KV-cache number formats: their bytes, and the torch code that defines what is written."""

from typing import TYPE_CHECKING, Any

from lean.quant.formats import (
    BF16,
    CHANNEL_TOKENS,
    FORMATS,
    FP8,
    FP16,
    FP32,
    FP64,
    INT3,
    INT4,
    INT4G64,
    INT5,
    INT6,
    INT8,
    NAMES,
    PC3,
    PC4,
    PC5,
    Kind,
    KVFormat,
    describe,
    parse_kv_dtype,
)

if TYPE_CHECKING:
    from lean.quant.channels import decode_channels, encode_channels
    from lean.quant.codecs import decode, encode, quantize_dequantize, raw_format
    from lean.quant.rotation import rotate, rotate_back

__all__ = [
    "BF16", "CHANNEL_TOKENS", "FORMATS", "FP8", "FP16", "FP32", "FP64", "INT3", "INT4", "INT4G64", "INT5", "INT6",
    "INT8", "NAMES", "PC3", "PC4", "PC5", "KVFormat", "Kind",
    "decode", "decode_channels", "describe", "encode", "encode_channels", "parse_kv_dtype", "quantize_dequantize",
    "raw_format", "rotate", "rotate_back",
]  # fmt: skip

_HOME = {
    "rotate": "rotation",
    "rotate_back": "rotation",
    **dict.fromkeys(("decode_channels", "encode_channels"), "channels"),
    **dict.fromkeys(("decode", "encode", "quantize_dequantize", "raw_format"), "codecs"),
}


def __getattr__(name: str) -> Any:
    """Formats are data and need no torch. The functions that compute need it and are imported on first use."""
    if name not in _HOME:
        raise AttributeError(f"module 'lean.quant' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"lean.quant.{_HOME[name]}"), name)
