"""Packages that a checkpoint needs beside lean's own dependencies: for quantized weights, and for old tokenizers.

On a CPU, and on a GPU without the packages, lean unpacks gptq, awq and compressed-tensors itself.
"""

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import transformers
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

from lean.errors import ModelError, one_line
from lean.store.source import ModelSource

# Methods of quantization_config, as transformers reads them, and the packages that they need there.
_FOR_WEIGHTS = {
    "aqlm": ("aqlm",),
    "auto-round": ("auto-round",),
    "awq": ("gptqmodel",),
    "compressed-tensors": ("compressed-tensors",),
    "gptq": ("optimum", "gptqmodel"),
    "hqq": ("hqq",),
    "quanto": ("optimum-quanto",),
    "quark": ("amd-quark",),
    "torchao": ("torchao",),
    "vptq": ("vptq",),
}


def quantization_of(config: Any) -> str | None:
    """The method with which a checkpoint's weights are quantized already; None where they are not."""
    found = getattr(config, "quantization_config", None) or {}
    found = found if isinstance(found, dict) else found.to_dict()
    if not found:
        return None
    return str(found.get("quant_method") or ("bitsandbytes" if "load_in_4bit" in found else "a method without a name"))


def require_known_method(method: str, name: str) -> None:
    """Raise ModelError for a method that transformers does not have: it would load the weights as if they were exact.

    ``bitsandbytes`` stands for its two methods.
    """
    if not method.startswith("bitsandbytes") and method not in AUTO_QUANTIZER_MAPPING:
        raise ModelError(
            f"{name}: its weights are quantized with {one_line(method, 40)}, which transformers "
            f"{transformers.__version__} does not know: pass an unquantized checkpoint"
        )


def lacks_packages(method: str) -> str:
    """Those of the packages that transformers needs for a method that are not installed, with spaces between them."""
    return _missing(_FOR_WEIGHTS.get(method, ()))


def require_for_weights(config: Any, name: str) -> None:
    """Raise ModelError where the packages for a checkpoint's quantized weights are missing."""
    method = quantization_of(config)
    if missing := lacks_packages(method or ""):
        raise ModelError(f"{name}: its weights are quantized with {method}, which needs: pip install {missing}")


def require_for_tokenizer(source: ModelSource) -> None:
    """Raise ModelError where only a package that is missing can read the tokenizer's files."""
    folder = source.folder
    if source.gguf_file is not None or (folder / "tokenizer.json").is_file():
        return
    for file in sorted([*folder.glob("*.model"), *folder.glob("*.tiktoken")]):
        if missing := _missing(("tiktoken",) if _is_tiktoken(file) else ("sentencepiece", "protobuf")):
            raise ModelError(
                f"cannot read the tokenizer of {source.name}: there is no tokenizer.json, and {file.name} needs: "
                f"pip install {missing}"
            )


def _is_tiktoken(file: Path) -> bool:
    """tiktoken's files are lines of text. SentencePiece's are messages of protobuf, which begin with a field's key."""
    with file.open("rb") as stream:
        return stream.read(1).isalnum()


def _missing(packages: tuple[str, ...]) -> str:
    """Those of the packages that are not installed, with spaces between them."""

    def installed(package: str) -> bool:
        try:
            distribution(package)
        except PackageNotFoundError:
            return False
        return True

    return " ".join(package for package in packages if not installed(package))
