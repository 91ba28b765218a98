"""lean: memory-efficient LLM inference over a quantized paged KV cache."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lean.config import EngineConfig
    from lean.engine.request import RequestOutput
    from lean.llm import LLM
    from lean.sampling_params import SamplingParams

__all__ = ["LLM", "EngineConfig", "RequestOutput", "SamplingParams"]

_HOME = {
    "LLM": "llm",
    "EngineConfig": "config",
    "RequestOutput": "engine.request",
    "SamplingParams": "sampling_params",
}


def __getattr__(name: str) -> Any:
    """Import on first use: `lean --help` and `import lean.quant` need not wait for transformers."""
    if name not in _HOME:
        raise AttributeError(f"module 'lean' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"lean.{_HOME[name]}"), name)
