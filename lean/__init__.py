"""lean: memory-efficient LLM inference over a quantized paged KV cache."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lean.machine.spin import bound_spin

if TYPE_CHECKING:
    from lean.cache.usage import CacheUse
    from lean.config import EngineConfig
    from lean.engine.logprobs import TokenLogprob
    from lean.engine.request import RequestOutput
    from lean.errors import ConfigError, EngineError, KernelError, LeanError, ModelError, RequestError, UserError
    from lean.llm import LLM
    from lean.sampling_params import SamplingParams

__all__ = [
    "LLM",
    "CacheUse",
    "ConfigError",
    "EngineConfig",
    "EngineError",
    "KernelError",
    "LeanError",
    "ModelError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "TokenLogprob",
    "UserError",
]

_HOME = {
    "LLM": "lean.llm",
    "CacheUse": "lean.cache.usage",
    "ConfigError": "lean.errors",
    "EngineConfig": "lean.config",
    "EngineError": "lean.errors",
    "KernelError": "lean.errors",
    "LeanError": "lean.errors",
    "ModelError": "lean.errors",
    "RequestError": "lean.errors",
    "RequestOutput": "lean.engine.request",
    "SamplingParams": "lean.sampling_params",
    "TokenLogprob": "lean.engine.logprobs",
    "UserError": "lean.errors",
}


bound_spin()  # before anything imports torch


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `import lean` loads neither torch nor transformers."""
    if name not in _HOME:
        raise AttributeError(f"module 'lean' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
