"""Models of every kind for engines with a window."""

import functools
from collections.abc import Callable

import torch
from tiny import tokens

from lean import LLM, EngineConfig
from lean.model.info import inspect_model
from lean.model.load import LoadedModel, load_model
from lean.store.source import resolve

ONE, TWO = {"num_hidden_layers": 1}, {"num_hidden_layers": 2}
FULL, SLIDING = {"layer_types": ["full_attention"]}, {"layer_types": ["sliding_attention"]}
LOCAL_AND_GLOBAL = {**TWO, "layer_types": ["sliding_attention", "full_attention"]}
MODELS = {
    "llama": ("llama", ONE),
    "llama, 2 layers": ("llama", TWO),
    "llama, 4 layers": ("llama", {"num_hidden_layers": 4}),
    "qwen2": ("qwen2", ONE),
    "qwen2, 2 layers": ("qwen2", TWO),
    "phi3": ("phi3", ONE),
    "phi3, half of the dims": ("phi3", {**ONE, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    "mistral": ("mistral", ONE),
    "gemma2": ("gemma2", {**ONE, **FULL}),
    "gemma3": ("gemma3", {**ONE, **FULL}),
    "gemma3, sliding": ("gemma3", {**ONE, **SLIDING}),
    "gemma3, mixed": ("gemma3", LOCAL_AND_GLOBAL),
    "gpt_oss": ("gpt_oss", {**ONE, **FULL}),
    "gpt_oss, mixed": ("gpt_oss", LOCAL_AND_GLOBAL),
}
LENGTH = 181
IDS, LAST = tokens(LENGTH), LENGTH - 1
QUANTIZED = ("int8", "fp8", "k8v4", "int4")


def loader(tiny: Callable) -> Callable[[str], LoadedModel]:
    """``loader(tiny)(name)``: a model of MODELS, read once."""

    @functools.cache
    def read(name: str) -> LoadedModel:
        kind, config = MODELS[name]
        info = inspect_model(resolve(str(tiny(kind, **config))), EngineConfig(dtype="float32"))
        return load_model(info, torch.device("cpu"), True)

    return read


def start(model: LoadedModel, kv_dtype: str = "fp32", **config: object) -> LLM:
    return LLM(model, EngineConfig(**{"deterministic": True, "kv_dtype": kv_dtype, "max_num_seqs": 2, **config}))


def hidden(llm: LLM, ids: list[int]) -> torch.Tensor:
    return torch.cat([rows for _, rows in llm.hidden_states(ids)])


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether both are equal to the bit and finite."""
    return bool(a.isfinite().all()) and torch.equal(a.view(torch.int32), b.view(torch.int32))


def residual(kv_dtype: str, length: int) -> dict[str, int]:
    return {} if kv_dtype in ("fp32", "fp16") else {"kv_residual_length": length}
