"""Models in float64 whose code asks for float32 here and there: in norms, softmax, routers and angles."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_TO_DTYPE = {torch.Tensor.to, torch.Tensor.type, torch.Tensor.softmax, torch.Tensor.sum, torch.Tensor.mean}
_TO_DTYPE |= {torch.softmax, torch.sum, torch.mean, functional.softmax, functional.log_softmax}


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


class Doubled(TorchFunctionMode):
    """Where this is active, a tensor that is to become float32 becomes float64. New tensors keep their dtype."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.float:
            return args[0].double()
        if func in _TO_DTYPE:
            return func(*map(_wide, args), **{key: _wide(value) for key, value in kwargs.items()})
        if func is torch.Tensor.index_copy_:  # into a tensor that was made in float32 before
            *places, values = args
            return func(*places, values.to(args[0].dtype))
        return func(*args, **kwargs)
