"""What each metadata key of a GGUF file is to lean: used, without effect, or a reason to refuse the file.

Names and defaults: `gguf-py/gguf/constants.py` and `src/llama-model.cpp` of https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lean.errors import ModelError, one_line

OTHER_KINDS = {"adapter": "an adapter (LoRA)", "clip": "a multimodal projector (mmproj)"}
OTHER_KINDS |= {
    "controlvector": "a control vector",
    "imatrix": "an importance matrix",
    "diffusion": "a diffusion model",
}
OTHER_KINDS |= {"xielu": "a model with xIELU activations"}
TOKEN_IDS = ("bos", "eos", "unknown", "seperator", "padding", "mask", "eot", "eom")


@dataclass(frozen=True)
class Rule:
    """What lean does with a key: ``used`` reads it; else it is without effect at ``neutral`` values, or at any."""

    used: bool = False
    neutral: tuple[Any, ...] | None = None


USED, HARMLESS = Rule(used=True), Rule()
OFF, ONE = Rule(neutral=(0, False)), Rule(neutral=(0, 1))  # llama.cpp takes a scale of 0 for none

# Keys of every architecture, without the prefix `{arch}.`.
COMMON: dict[str, Rule] = {
    **dict.fromkeys(("context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size"), USED),
    **dict.fromkeys(("attention.head_count", "attention.head_count_kv"), USED),
    **dict.fromkeys(("attention.key_length", "attention.value_length", "attention.scale"), USED),
    **dict.fromkeys(("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"), USED),
    **dict.fromkeys(("attention.sliding_window", "attention.sliding_window_pattern"), USED),
    **dict.fromkeys(("attention.key_length_swa", "attention.value_length_swa"), USED),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), OFF),
    "tensor_data_layout": Rule(neutral=("Meta AI original pth", "reference")),
    "use_parallel_residual": OFF,
    "attention.causal": Rule(neutral=(True,)),
    **dict.fromkeys(("attention.clamp_kqv", "attention.max_alibi_bias", "attention.output_scale"), OFF),
    **dict.fromkeys(("attention.temperature_scale", "attention.temperature_length", "router_logit_softcapping"), OFF),
    **dict.fromkeys(("attention.q_lora_rank", "attention.kv_lora_rank", "attention.shared_kv_layers"), OFF),
    **dict.fromkeys(("attention.key_length_mla", "attention.value_length_mla", "attention.indexer.top_k"), OFF),
    **dict.fromkeys(("logit_scale", "embedding_scale", "residual_scale"), ONE),
    **dict.fromkeys(("expert_count", "expert_used_count", "expert_feed_forward_length"), OFF),
    **dict.fromkeys(("expert_shared_count", "expert_shared_feed_forward_length"), OFF),
    **dict.fromkeys(("expert_chunk_feed_forward_length", "expert_group_scale", "experts_per_group"), OFF),
    **dict.fromkeys(("expert_group_count", "expert_group_used_count"), ONE),
    "expert_weights_scale": ONE,
    **dict.fromkeys(("expert_weights_norm", "expert_gating_func", "moe_latent_size"), OFF),
    **dict.fromkeys(("moe_every_n_layers", "interleave_moe_layer_step"), ONE),
    **dict.fromkeys(("leading_dense_block_count", "nextn_predict_layers", "n_deepstack_layers"), OFF),
    **dict.fromkeys(("pooling_type", "embedding_length_out", "swin_norm", "rescale_every_n_layers"), OFF),
    "full_attention_interval": Rule(neutral=(1,)),
}
ROPE: dict[str, Rule] = {
    **dict.fromkeys(("rope.dimension_count", "rope.freq_base", "rope.scale_linear", "rope.scaling.type"), USED),
    **dict.fromkeys(("rope.scaling.factor", "rope.scaling.original_context_length"), USED),
    **dict.fromkeys(("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"), USED),
    **dict.fromkeys(("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"), USED),
    **dict.fromkeys(("rope.freq_base_swa", "rope.dimension_count_swa"), USED),
    "rope.scaling.yarn_ext_factor": Rule(neutral=(1, -1)),  # -1 stands for the default, 1
    **dict.fromkeys(("rope.scaling.yarn_log_multiplier", "rope.scaling.alpha"), OFF),
    "rope.scaling.finetuned": HARMLESS,  # whether a scaling was trained; it does not change the computation
    "rope.dimension_sections": OFF,
}
SOFTCAPS: dict[str, Rule] = dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), USED)
EXPERTS: dict[str, Rule] = {
    **dict.fromkeys(("expert_count", "expert_used_count", "expert_feed_forward_length"), USED),
    "expert_gating_func": Rule(neutral=(0, 1)),  # 0: the architecture's own; 1: softmax
}


def check_keys(name: str, arch: str, metadata: Mapping[str, Any], rules: Mapping[str, Rule]) -> None:
    """Refuse a file with a key of its architecture that would change the computation and that lean does not read.

    Keys of `general`, `split`, `quantize`, `tokenizer` and of other programs do not describe the computation.

    Raises:
        ModelError: naming the key.
    """
    for key, value in metadata.items():
        prefix, _, rest = key.partition(".")
        if prefix in OTHER_KINDS and prefix != arch and prefix != "imatrix":
            raise ModelError(f"{name}: {one_line(key, 80)} is a setting of {OTHER_KINDS[prefix]}: not served by lean")
        if prefix != arch:
            continue
        rule = rules.get(rest)
        if rule is None:
            raise ModelError(
                f"{name}: lean does not know the metadata key {one_line(key, 80)!r}: it may change answers"
            )
        if rule.used or rule.neutral is None:
            continue
        values = value if isinstance(value, list) and value else [value]
        if not all(_equals_one(item, rule.neutral) for item in values):
            allowed = " or ".join(dict.fromkeys(repr(item) for item in rule.neutral))
            shown = one_line(value, 60)
            raise ModelError(f"{name}: {key} is {shown}, and lean serves {arch} files only where it is {allowed}")


def _equals_one(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Numbers equal the booleans that programs write in their place."""
    return isinstance(value, str | int | float) and value in neutral


class Metadata:
    """Typed reading of one file's metadata. Every fault is a ModelError that names the key."""

    def __init__(self, name: str, arch: str, pairs: Mapping[str, Any]) -> None:
        self.name, self.arch, self.pairs = name, arch, pairs

    def refuse(self, key: str, why: str) -> ModelError:
        return ModelError(f"{self.name}: {self.arch}.{key} {why}")

    def get(self, key: str) -> Any:
        return self.pairs.get(f"{self.arch}.{key}")

    def count(self, key: str, default: int | None = None, *, zero: bool = False) -> int:
        """A number above 0 (or from 0). A list with one number per layer counts where all are equal."""
        value = self.get(key)
        if isinstance(value, list):
            if not value or any(item != value[0] for item in value):
                raise self.refuse(key, f"is {one_line(value, 60)}: lean serves files where all layers have the same")
            value = value[0]
        if value is None:
            if default is None:
                raise self.refuse(key, "is missing: the file is damaged, or its converter too old")
            return default
        if type(value) is not int or not (0 if zero else 1) <= value < 2**31:
            raise self.refuse(key, f"is {one_line(repr(value), 40)}: it must be a whole number above 0")
        return value

    def number(self, key: str, default: float | None = None, *, zero: bool = False) -> float:
        """A finite number above 0, or from 0."""
        value = self.get(key)
        if value is None:
            if default is None:
                raise self.refuse(key, "is missing: the file is damaged, or its converter too old")
            return default
        finite = type(value) in (int, float) and math.isfinite(value) and value < 1e30
        if not finite or value < 0 or (value == 0 and not zero):
            raise self.refuse(key, f"is {one_line(repr(value), 40)}: it must be a finite number above 0")
        return float(value)

    def text(self, key: str, default: str) -> str:
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            raise self.refuse(key, f"is {one_line(repr(value), 40)}: it must be text")
        return default if value is None else value

    def require_equal(self, key: str, wanted: float, meaning: str) -> None:
        """Refuse a key whose value lean cannot serve apart from the one that it has anyway."""
        value = self.get(key)
        if value is not None and not (type(value) in (int, float) and math.isclose(value, wanted, rel_tol=1e-5)):
            raise self.refuse(key, f"is {one_line(repr(value), 40)}: lean serves {self.arch} files only with {meaning}")
