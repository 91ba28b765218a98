"""The architectures that lean serves from GGUF files: their keys, and where each tensor goes in transformers' module.

Tensor names: `gguf-py/gguf/tensor_mapping.py`; what converters change: `convert_hf_to_gguf.py`; both of
https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from lean.store.gguf.keys import COMMON, EXPERTS, HARMLESS, ROPE, SOFTCAPS, USED, Rule

# How a tensor of a file becomes one of the module:
#   as_is       the same numbers
#   interleave  rows of each head in pairs (llama.cpp's rotation) -> halves (transformers')
#   minus_one   norms that are stored as the factor, and that the module keeps as the factor less 1
#   transpose   the last two dimensions swapped
#   row         one row more: [n] -> [1, n]
#   stack       gate, then up, along the rows of each expert
#   weave       gate and up alternate, along the columns of each expert
Change = Literal["as_is", "interleave", "minus_one", "transpose", "row", "stack", "weave"]


FREQS, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"


class Origin(NamedTuple):
    """The tensors of a file, without `blk.N.`, that make one of the module."""

    tensors: tuple[str, ...]
    change: Change = "as_is"


@dataclass(frozen=True)
class Architecture:
    """One value of `general.architecture`.

    Attributes:
        model_type: of transformers.
        top: the module's tensors outside the layers, by name.
        layer: the module's tensors of one layer, by name after ``layers``.
        layers: prefix of the layers in the module.
        rules: what each metadata key is.
        rms: whether norms are RMS norms; else they subtract the mean, and have another epsilon.
        fields: names of the epsilon and of other fields in transformers' configuration.
        head_dim: whether the module can have heads of another width than hidden size / heads.
        rope: whether positions are rotary.
        partial: whether the rotation can cover a part of a head.
        window: which layers may slide: ``none``, ``all``, or every one but each n-th.
        constants: further fields of the configuration.
        biases: by field of the configuration, the tensors of which any needs it; the others are then 0.
        experts: fields of the configuration for the number of experts, and for the width of one.
        factors: tensors outside the layers that divide the rotary frequencies.
        linear: whether transformers' class has linear and yarn scaling.
    """

    model_type: str
    top: Mapping[str, Origin]
    layer: dict[str, Origin]
    rules: dict[str, Rule]
    layers: str = "model.layers."
    rms: bool = True
    eps: str = "rms_norm_eps"
    intermediate: str = "intermediate_size"
    head_dim: bool = True
    rope: bool = True
    partial: bool = False
    linear: bool = True
    window: Literal["none", "all"] | int = "none"
    constants: Mapping[str, object] = field(default_factory=dict)
    biases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    experts: tuple[str, str] | None = None
    factors: tuple[str, ...] = ()


def _as_is(**names: str) -> dict[str, Origin]:
    """``q_proj="attn_q"``: names with `__` for a point; weight and bias alike."""
    pairs = {name.replace("__", "."): stem for name, stem in names.items()}
    return {
        f"{name}.{part}": Origin((f"{stem}.{part}",)) for name, stem in pairs.items() for part in ("weight", "bias")
    }


def _changed(origins: Mapping[str, Origin], change: Change, *endings: str) -> dict[str, Origin]:
    return {name: origin._replace(change=change) for name, origin in origins.items() if name.endswith(endings)}


_TOP = _as_is(model__embed_tokens="token_embd", model__norm="output_norm", lm_head="output")
_ATTENTION = _as_is(
    self_attn__q_proj="attn_q", self_attn__k_proj="attn_k", self_attn__v_proj="attn_v", self_attn__o_proj="attn_output"
)
_QK_NORMS = _as_is(self_attn__q_norm="attn_q_norm", self_attn__k_norm="attn_k_norm")
_NORMS = _as_is(input_layernorm="attn_norm", post_attention_layernorm="ffn_norm")
_MLP = _as_is(mlp__gate_proj="ffn_gate", mlp__up_proj="ffn_up", mlp__down_proj="ffn_down")
_DENSE = _ATTENTION | _NORMS | _MLP
_EXPERTS = _as_is(mlp__gate="ffn_gate_inp") | {
    "mlp.experts.gate_up_proj": Origin(("ffn_gate_exps.weight", "ffn_up_exps.weight"), "stack"),
    "mlp.experts.down_proj": Origin(("ffn_down_exps.weight",)),
}
_SHARED_EXPERT = _as_is(
    mlp__shared_expert__gate_proj="ffn_gate_shexp",
    mlp__shared_expert__up_proj="ffn_up_shexp",
    mlp__shared_expert__down_proj="ffn_down_shexp",
) | {"mlp.shared_expert_gate.weight": Origin(("ffn_gate_inp_shexp.weight",), "row")}
_LLAMA_ATTENTION = _ATTENTION | _changed(
    _ATTENTION, "interleave", "q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias"
)
_GEMMA = (
    _ATTENTION
    | _MLP
    | _as_is(
        input_layernorm="attn_norm",
        post_attention_layernorm="post_attention_norm",
        pre_feedforward_layernorm="ffn_norm",
        post_feedforward_layernorm="post_ffw_norm",
    )
)
_GEMMA |= _changed(_GEMMA | _QK_NORMS, "minus_one", "norm.weight")
_GEMMA_TOP = _TOP | _changed(_TOP, "minus_one", "norm.weight")
_NEMOTRON = _ATTENTION | _NORMS | _as_is(mlp__up_proj="ffn_up", mlp__down_proj="ffn_down")
_GPT_OSS = _ATTENTION | {
    **_as_is(input_layernorm="attn_norm", post_attention_layernorm="post_attention_norm", mlp__router="ffn_gate_inp"),
    "self_attn.sinks": Origin(("attn_sinks.weight",)),
    "mlp.experts.gate_up_proj": Origin(("ffn_gate_exps.weight", "ffn_up_exps.weight"), "weave"),
    "mlp.experts.gate_up_proj_bias": Origin(("ffn_gate_exps.bias", "ffn_up_exps.bias"), "weave"),
    "mlp.experts.down_proj": Origin(("ffn_down_exps.weight",), "transpose"),
    "mlp.experts.down_proj_bias": Origin(("ffn_down_exps.bias",)),
}
_GPT2 = _as_is(ln_1="attn_norm", ln_2="ffn_norm") | _as_is(
    attn__c_attn="attn_qkv", attn__c_proj="attn_output", mlp__c_fc="ffn_up", mlp__c_proj="ffn_down"
)
_GPT2 |= _changed(_GPT2, "transpose", "c_attn.weight", "c_proj.weight", "c_fc.weight")
_GPT2_TOP = _as_is(
    transformer__wte="token_embd", transformer__wpe="position_embd", transformer__ln_f="output_norm", lm_head="output"
)

_ROTARY = {**COMMON, **ROPE}
_BIASES: dict[str, tuple[str, ...]] = {
    "attention_bias": ("attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_output.bias")
}
_MLP_BIASES: dict[str, tuple[str, ...]] = {"mlp_bias": ("ffn_gate.bias", "ffn_up.bias", "ffn_down.bias")}

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(
        "llama",
        _TOP,
        _LLAMA_ATTENTION | _NORMS | _MLP,
        _ROTARY,
        window="all",
        biases=_BIASES | _MLP_BIASES,
        factors=(FREQS, LONG, SHORT),
    ),
    "qwen2": Architecture("qwen2", _TOP, _DENSE, _ROTARY),
    "qwen2moe": Architecture(
        "qwen2_moe",
        _TOP,
        _ATTENTION | _NORMS | _EXPERTS | _SHARED_EXPERT,
        _ROTARY
        | EXPERTS
        | {"expert_weights_norm": USED, "expert_shared_feed_forward_length": USED}
        | {"expert_shared_count": HARMLESS},  # the shared experts are stored as one
        constants={"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
        experts=("num_experts", "moe_intermediate_size"),
    ),
    "qwen3": Architecture("qwen3", _TOP, _DENSE | _QK_NORMS, _ROTARY, biases=_BIASES),
    "qwen3moe": Architecture(
        "qwen3_moe",
        _TOP,
        _ATTENTION | _QK_NORMS | _NORMS | _EXPERTS,
        _ROTARY | EXPERTS | {"expert_weights_norm": USED},
        constants={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
        biases=_BIASES,
        experts=("num_experts", "moe_intermediate_size"),
    ),
    "phi3": Architecture(
        "phi3",
        _TOP,
        _NORMS
        | _as_is(self_attn__qkv_proj="attn_qkv", self_attn__o_proj="attn_output")
        | _as_is(mlp__gate_up_proj="ffn_up", mlp__down_proj="ffn_down"),
        _ROTARY,
        head_dim=False,
        partial=True,
        linear=False,
        factors=(LONG, SHORT),
        window="all",
    ),
    "gemma2": Architecture("gemma2", _GEMMA_TOP, _GEMMA, _ROTARY | SOFTCAPS, window=2, biases=_BIASES),
    "gemma3": Architecture(
        "gemma3_text", _GEMMA_TOP, _GEMMA, _ROTARY | {"final_logit_softcapping": USED}, window=6, biases=_BIASES
    ),
    "starcoder2": Architecture(
        "starcoder2",
        _TOP,
        _ATTENTION | _NORMS | _as_is(mlp__c_fc="ffn_up", mlp__c_proj="ffn_down"),
        _ROTARY,
        rms=False,
        eps="norm_epsilon",
        window="all",
    ),
    "nemotron": Architecture(
        "nemotron",
        _GEMMA_TOP,
        _NEMOTRON | _changed(_NEMOTRON, "minus_one", "norm.weight"),
        _ROTARY,
        rms=False,
        eps="norm_eps",
        partial=True,
        biases=_BIASES | {"mlp_bias": ("ffn_up.bias", "ffn_down.bias")},
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        _TOP,
        _GPT_OSS,
        _ROTARY | EXPERTS | {"expert_gating_func": Rule(neutral=(0, 3))},  # 3: softmax over the chosen experts
        window=2,
        constants={"attention_bias": True},
        experts=("num_local_experts", "intermediate_size"),
    ),
    "minimax-m2": Architecture(
        "minimax_m2",
        _TOP,
        _ATTENTION | _QK_NORMS | _NORMS | _EXPERTS | {"mlp.e_score_correction_bias": Origin(("exp_probs_b.bias",))},
        _ROTARY
        | EXPERTS
        | {"expert_gating_func": Rule(neutral=(2,)), "expert_weights_norm": Rule(neutral=(True,))},  # 2: sigmoid
        partial=True,
        experts=("num_local_experts", "intermediate_size"),
    ),
    "gpt2": Architecture(
        "gpt2",
        _GPT2_TOP,
        _GPT2,
        COMMON,
        layers="transformer.h.",
        rms=False,
        eps="layer_norm_epsilon",
        intermediate="n_inner",
        head_dim=False,
        rope=False,
    ),
}
# A llama file with experts is transformers' mixtral; one with a window is its mistral. The computation is the same.
MIXTRAL = Architecture(
    "mixtral",
    _TOP,
    _LLAMA_ATTENTION | _NORMS | _EXPERTS,
    _ROTARY | EXPERTS | {"expert_weights_norm": Rule(neutral=(True,))},
    window="all",
    experts=("num_local_experts", "intermediate_size"),
    factors=(FREQS, LONG, SHORT),
)
MISTRAL = Architecture(
    "mistral",
    _TOP,
    ARCHITECTURES["llama"].layer,
    _ROTARY,
    window="all",
    factors=(FREQS, LONG, SHORT),
)
