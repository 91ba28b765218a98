"""Multimodal checkpoints, of which lean reads the text model."""

import re
from collections.abc import Mapping
from typing import Any, TypeVar

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lean.errors import ModelError

T = TypeVar("T")

# How the text model's tensors are called in multimodal checkpoints -> in the text model alone.
_KEYS = {
    r"^model\.language_model\.": "model.",
    r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
}


def text_keys(full: Any, text: Any, raw: Mapping[str, Any], name: str) -> Mapping[str, str]:
    """The key mapping that loads the text model of a multimodal checkpoint, as transformers takes it.

    ``text`` gets the settings that concern it and stand in the outer configuration only. ``raw``: config.json.

    Raises:
        ModelError: the text model cannot be loaded alone.
    """
    what = f"{name} ({full.model_type})"
    if text.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ModelError(
            f"{what}: multimodal checkpoints whose text model is {text.model_type} are not supported by lean"
        )
    if getattr(full, "quantization_config", None) is not None:
        raise ModelError(f"{what}: multimodal checkpoints with quantized weights are not supported by lean")
    # The whole model ties the embedding to the head by its own setting, not by that of its text.
    text.tie_word_embeddings = getattr(full, "tie_word_embeddings", text.tie_word_embeddings)
    if "eos_token_id" in raw and "eos_token_id" not in (raw.get("text_config") or {}):
        text.eos_token_id = raw["eos_token_id"]
    if getattr(text, "dtype", None) is None:
        text.dtype = getattr(full, "dtype", None)
    return _KEYS


def renamed(tensors: Mapping[str, T], key_mapping: Mapping[str, str]) -> dict[str, T]:
    """The tensors under the names that they have in the text model."""
    return {_rename(key, key_mapping): entry for key, entry in tensors.items()}


def _rename(key: str, key_mapping: Mapping[str, str]) -> str:
    for pattern, replacement in key_mapping.items():
        key, count = re.subn(pattern, replacement, key)
        if count:
            break
    return key
