"""Tiny random checkpoints of every text decoder of transformers, each with the peculiarities of its type.

The default configuration of a type keeps what makes it special: layer patterns, shared KV, layers without rotation,
experts, soft caps, sink logits, partial rotation. Only its sizes shrink, by the rules of ``census.yaml``.
"""

import copy
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from tiny import byte_tokenizer
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

MOST_PARAMETERS = 30_000_000  # more: a size that census.yaml does not know

# Parts of the names of weights that make queries or keys.
_QUERIES_AND_KEYS = ("q_proj", "k_proj", "query", "key", "q_lin", "k_lin", "q_b_proj", "kv_b_proj", ".wq.", ".wk.")
_QUERIES_AND_KEYS += ("qkv", "c_attn")


@cache
def rules() -> dict[str, Any]:
    """census.yaml."""
    return yaml.safe_load(Path(__file__).with_name("census.yaml").read_text(encoding="utf-8"))


def types() -> list[str]:
    """Every type of transformers' mapping."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def asides() -> set[str]:
    """Types of the mapping that are encoders, or half of a model that reads something else than text."""
    return {*rules()["encoders"], *rules()["halves"]}


def variants() -> list[str]:
    """Names of other settings of some types, such as ``qwen2+sliding``."""
    return [name for name in rules()["variants"] if type_of(name) in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]


def type_of(name: str) -> str:
    return name.partition("+")[0]


def _defaults(kind: str) -> dict[str, Any]:
    """The fields of a type and their defaults. Some types cannot be described without arguments."""
    try:
        return CONFIG_MAPPING[kind]().to_dict()
    except Exception:  # each in its own way
        return {}


def _small(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of census.yaml that a configuration has with a number, an unset pad_token_id too."""
    sizes = rules()["sizes"]
    plain = {key: value for key, value in fields.items() if key in sizes and not isinstance(value, (dict, list))}
    small = {key: sizes[key] for key, value in plain.items() if value is not None or key == "pad_token_id"}
    if "num_key_value_heads" in fields and fields["num_key_value_heads"] is None and "num_attention_heads" in small:
        small["num_key_value_heads"] = sizes["num_key_value_heads"]
    return small


def small_config(name: str) -> PreTrainedConfig:
    """The configuration of a tiny model of a type, or of a variant."""
    kind, types_ = type_of(name), rules()["types"]
    fields, own = _defaults(kind), types_.get(kind, {}) | rules()["variants"].get(name, {})
    small = _small(fields) | own
    text = (fields.get("text_config") or {}) | own.get("text_config", {})
    if text:  # a wrapper
        inner = text.get("model_type", "")
        small["text_config"] = _small(_defaults(inner) | text) | types_.get(inner, {}) | own.get("text_config", {})
    return CONFIG_MAPPING[kind](**copy.deepcopy(small))


@torch.no_grad()
def randomise(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Draw what transformers initialises to a constant, and enlarge what it draws small.

    Biases of 0 and norms of 1 hide dropped ones. Matrices that shrink what goes through them hide nearly everything:
    the logits then hardly depend on attention. Here every matrix keeps the size of a vector, as in a trained model.
    """
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            continue
        noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        last, lower = name.rpartition(".")[2], name.lower()
        if not parameter.isfinite().all():
            parameter.copy_(noise * 0.02)
        norm = parameter.dim() == 1 and ("norm" in lower or "ln" in lower or last in ("g", "weight", "scale"))
        if norm or last.endswith("bias") or last == "b" or "sink" in lower:
            parameter.add_(noise * 0.3)
        elif parameter.dim() >= 2:
            _keep_size(parameter, noise)
            if any(part in lower for part in _QUERIES_AND_KEYS):
                parameter.mul_(1.5)  # attention away from uniform
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.add_(torch.randn(buffer.shape, generator=generator).to(buffer.dtype) * 0.1)


def _keep_size(matrix: torch.Tensor, noise: torch.Tensor) -> None:
    """Scale a matrix [..., out, in] up to standard deviation 1 / sqrt(in). A constant one gets noise of a third."""
    wanted, found = matrix.shape[-1] ** -0.5, float(matrix.std())
    if found < 1e-6:
        matrix.add_(noise * wanted / 3)
    elif found < wanted:
        matrix.mul_(wanted / found)


def _check_size(model: PreTrainedModel) -> int:
    count = sum(parameter.numel() for parameter in model.parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"{count:,} parameters are too many: census.yaml misses a size")
    return count


def build(name: str, folder: Path) -> int:
    """Write the checkpoint of a type or a variant into ``folder``. Returns its number of parameters.

    Raises what transformers raises where it cannot build the type, and ValueError for a large model.
    """
    config = small_config(name)
    arguments: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    with torch.device("meta"):
        _check_size(AutoModelForCausalLM.from_config(copy.deepcopy(config), **arguments))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, **arguments)
    randomise(model, torch.Generator().manual_seed(0))
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return _check_size(model)


@torch.inference_mode()
def eager_logits(folder: Path, ids: list[int]) -> torch.Tensor:
    """[len(ids), vocab]: transformers' in float32, with eager attention and no cache."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
