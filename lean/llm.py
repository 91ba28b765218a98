"""LLM: what people call."""

from lean.engine.engine import LLM

__all__ = ["LLM"]
