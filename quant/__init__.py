"""KV-cache number formats: their bytes, and the torch code that defines what is written."""

from lean.quant.codecs import decode, encode, quantize_dequantize, raw_format
from lean.quant.formats import (
    BF16,
    FORMATS,
    FP8,
    FP16,
    FP32,
    FP64,
    INT4,
    INT8,
    NAMES,
    Kind,
    KVFormat,
    describe,
    parse_kv_dtype,
)
from lean.quant.rotation import rotate

__all__ = [
    "BF16", "FORMATS", "FP8", "FP16", "FP32", "FP64", "INT4", "INT8", "NAMES", "KVFormat", "Kind",
    "decode", "describe", "encode", "parse_kv_dtype", "quantize_dequantize", "raw_format", "rotate",
]  # fmt: skip
