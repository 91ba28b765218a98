"""Norms of a model, computed without rounding to float32."""

import torch


def exact_norms(module: torch.nn.Module) -> torch.nn.Module:
    """Replace the forward of RMSNorm and of Cohere's LayerNorm, in which transformers rounds to float32."""
    for norm in module.modules():
        name = type(norm).__name__
        if name.endswith("RMSNorm"):
            weight = getattr(norm, "weight", 1.0) + (1 if "Gemma" in name else 0)
            eps = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
            norm.forward = lambda x, w=weight, e=eps: x * (x.square().mean(-1, keepdim=True) + e).rsqrt() * w
        elif name == "CohereLayerNorm":
            norm.forward = lambda x, w=norm.weight, e=norm.variance_epsilon: (
                torch.nn.functional.layer_norm(x, x.shape[-1:], eps=e) * w
            )
    return module
