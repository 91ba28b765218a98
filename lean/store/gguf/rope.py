"""Rotary positions of a GGUF file, as transformers' `rope_parameters`.

Rules and defaults: `src/llama-model.cpp` and `ggml_compute_forward_rope` of https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lean.store.gguf.architectures import FREQS, LONG, SHORT, Architecture
from lean.store.gguf.keys import Metadata

THETA = 10_000.0  # where a file names none


def rope_parameters(
    metadata: Metadata, head_dim: int, context: int, factors: Mapping[str, Sequence[float]], arch: Architecture
) -> dict[str, Any]:
    """The rotary settings of all layers, or of the full-attention layers of a model with two kinds.

    Args:
        head_dim: width of a key.
        context: the longest context that the model was made for.
        factors: by tensor name, what divides each frequency.

    Raises:
        ModelError: a value that is impossible, or that lean cannot serve.
    """
    dims = metadata.count("rope.dimension_count", head_dim)
    if dims > head_dim or dims % 2 or (dims != head_dim and not arch.partial):
        raise metadata.refuse("rope.dimension_count", f"is {dims}: lean serves {metadata.arch} files with {head_dim}")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base", THETA)}
    if arch.partial:
        share = dims / head_dim
        rope["partial_rotary_factor"] = share if int(head_dim * share) == dims else math.nextafter(share, 2)
    kind, factor = _scaling(metadata)
    original = metadata.count("rope.scaling.original_context_length", context)
    scale = metadata.number("rope.scaling.attn_factor", 1.0)
    metadata.require_equal("rope.scaling.yarn_attn_factor", 1.0, "1")
    _check_factors(metadata, dims, factors)
    if factor != 1 and not arch.linear:
        raise metadata.refuse(
            "rope.scaling.type", f"is {kind}: lean serves {metadata.arch} files with longrope or none"
        )
    if factors and (kind == "yarn" or factor != 1):
        raise metadata.refuse("rope.scaling.type", f"is {kind} beside {min(factors)}: lean serves one of the two")
    if LONG in factors or SHORT in factors:
        if LONG not in factors or SHORT not in factors:
            raise metadata.refuse("rope.scaling.type", f"needs both {LONG} and {SHORT}: one of them is missing")
        long, short = list(factors[LONG]), list(factors[SHORT])
        return rope | _longrope(long, short, original, scale)
    if kind == "longrope":
        raise metadata.refuse("rope.scaling.type", f"is longrope: {LONG} and {SHORT} are missing")
    if kind == "yarn" and factor > 1:
        fast, slow = (
            metadata.number(f"rope.scaling.yarn_beta_{end}", beta) for end, beta in (("fast", 32), ("slow", 1))
        )
        rope |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        rope |= {"beta_fast": fast, "beta_slow": slow}
        return rope | {"attention_factor": scale * (0.1 * math.log(factor) + 1.0)}
    if scale != 1:
        raise metadata.refuse("rope.scaling.attn_factor", f"is {scale:g} without a scaling that uses it")
    freqs = list(factors.get(FREQS, ()))
    if any(value != 1 for value in freqs):
        return rope | _longrope(freqs, freqs, original, 1.0)
    return rope | {"rope_type": "linear", "factor": factor} if factor != 1 else rope


def _longrope(long: list[float], short: list[float], original: int, scale: float) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "long_factor": long,
        "short_factor": short,
        "factor": 1.0,
        "original_max_position_embeddings": original,
        "attention_factor": scale,
    }


def _scaling(metadata: Metadata) -> tuple[str, float]:
    """(type, factor) of the scaling; the factor is 1 where there is none. A factor without a type is linear."""
    kind = metadata.text("rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise metadata.refuse("rope.scaling.type", f"is {kind[:40]!r}: lean serves none, linear, yarn and longrope")
    factor = metadata.number("rope.scaling.factor", metadata.number("rope.scale_linear", 1.0, zero=True), zero=True)
    if kind == "yarn" and 0 < factor < 1:
        raise metadata.refuse("rope.scaling.factor", f"is {factor:g}: yarn needs at least 1")
    return kind, 1.0 if kind == "none" or factor == 0 else factor


def _check_factors(metadata: Metadata, dims: int, factors: Mapping[str, Sequence[float]]) -> None:
    for name, values in factors.items():
        if len(values) != dims // 2 or not all(math.isfinite(value) and value > 0 for value in values):
            raise metadata.refuse(
                "rope.dimension_count", f"is {dims}: {name} must hold {dims // 2} finite factors above 0"
            )
