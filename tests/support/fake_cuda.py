"""A decode step on tensors that only claim to be on a GPU: shapes, dtypes and devices are real, numbers do not exist.

Whatever needs a number fails: `item`, `bool`, a shape that depends on values.
"""

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lean import EngineConfig, SamplingParams
from lean.cache.block_manager import BlockManager
from lean.cache.kv_cache import KVCache
from lean.cache.plan import plan_cache
from lean.cache.size import size_cache
from lean.engine import host
from lean.engine.request import Request
from lean.engine.runner import Runner, StepResult
from lean.engine.sampler import Sampler
from lean.engine.scheduler import Chunk
from lean.model import experts, rotary
from lean.model.attention import AttentionBatch
from lean.model.info import inspect_model
from lean.model.load import load_model
from lean.model.sink_turn import Pairing, SinkRotary, SinkTurn
from lean.quant import raw_format
from lean.store.source import resolve

CUDA = torch.device("cuda", 0)
CONTEXT = 100  # tokens in the cache before the step


class Operators(TorchDispatchMode):
    """Counts the operators that a step consists of.

    on_cpu: those that make a tensor on the CPU. waiting: copies from the CPU that wait for the GPU. reducing: those
    that add the numbers of a row.
    """

    def __init__(self) -> None:
        super().__init__()
        self.all: Counter[str] = Counter()
        self.on_cpu: Counter[str] = Counter()
        self.waiting: Counter[str] = Counter()
        self.reducing: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        self.all[func.name()] += 1
        if any(isinstance(one, torch.Tensor) and one.device.type == "cpu" for one in tree_leaves(found)):
            self.on_cpu[func.name()] += 1
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        between = func in _COPIES and len({one.device for one in (*given, found)}) == 2
        if between and not (kwargs or {}).get("non_blocking", len(args) > 2 and args[2]):
            self.waiting[func.name()] += 1
        if adds(func) and args[0].is_floating_point():
            self.reducing[func.name()] += 1
        return found


_aten = torch.ops.aten
_COPIES = {_aten._to_copy.default, _aten.copy_.default}
_ADDS = {
    _aten._softmax, _aten.softmax, _aten._log_softmax, _aten.log_softmax, _aten.native_layer_norm, _aten.layer_norm,
    _aten._fused_rms_norm, _aten.rms_norm, _aten.native_group_norm, _aten.group_norm, _aten.cumsum,
}  # fmt: skip
_SAME_IN_ANY_ORDER = {
    _aten.amax, _aten.amin, _aten.max, _aten.min, _aten.aminmax, _aten.argmax, _aten.argmin, _aten.any, _aten.all,
    _aten.count_nonzero,
}  # fmt: skip


def adds(func) -> bool:
    """Whether an operator adds, or multiplies, the numbers of a row."""
    packet = func.overloadpacket
    return packet in _ADDS or (torch.Tag.reduction in func.tags and packet not in _SAME_IN_ANY_ORDER)


class _CpuBuild(TorchFunctionMode):
    """What a torch built for CPUs cannot do with tensors of a GPU: brackets, here views and `aten.index`; pinning."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.tensor and kwargs:
            kwargs.pop("pin_memory", None)
        if func is torch.Tensor.__getitem__:
            view, indices = _view(*args)
            return _aten.index.Tensor(view, indices) if indices else view
        if func is torch.Tensor.__setitem__:
            view, indices = _view(*args[:2])
            value = args[2]
            if indices:
                value = value if isinstance(value, torch.Tensor) else view.new_full((), value)
                _aten.index_put_.default(view, indices, value)
            elif isinstance(value, torch.Tensor):
                _aten.copy_.default(view, value)
            else:
                view.fill_(value)
            return None
        return func(*args, **(kwargs or {}))


def _view(x: torch.Tensor, key: object) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """(the view that a key's numbers and slices make, tensors that index its dims)."""
    keys, dim = list(key if isinstance(key, tuple) else (key,)), 0
    indices: list[torch.Tensor | None] = []
    for place, one in enumerate(keys):
        if one is None:
            x, dim = x.unsqueeze(dim), dim + 1
        elif one is Ellipsis:
            dim = x.dim() - sum(rest is not None for rest in keys[place + 1 :])
        elif isinstance(one, slice):
            x, dim = _aten.slice.Tensor(x, dim, one.start, one.stop, one.step or 1), dim + 1
        elif isinstance(one, torch.Tensor):
            assert one.dtype is not torch.bool, "the shape would depend on numbers"
            indices, dim = [*indices, *[None] * (dim - len(indices)), one], dim + 1
        else:
            x = x.select(dim, one)
    return x, indices


@dataclass
class FakeGpu:
    """A model and its cache on a GPU that does not exist.

    reads: the number of values of each read by the host.
    """

    runner: Runner
    mode: FakeTensorMode
    reads: list[int]

    def new(self, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        with self.mode:
            return torch.empty(shape, dtype=dtype, device=CUDA)

    def decoded(self, rows: int, operators: Operators) -> torch.Tensor:
        """Hidden states of a decode step of ``rows`` sequences: the part that a CUDA graph records."""
        runner, pools = self.runner, self.runner.cache.plan.pools
        turn = None
        if runner.sink_rotary is not None:
            half = runner.sink_rotary.inv_freq.shape[0]
            cos, sin = (self.new(rows, 1, half, dtype=torch.float32) for _ in "cs")
            turn = SinkTurn(cos, sin, runner.sink_rotary.layers)
        batch = AttentionBatch(
            query_start_loc=self.new(rows + 1, dtype=torch.int32),
            seq_lens=self.new(rows, dtype=torch.int32),
            positions=self.new(rows),
            slot_mapping=tuple(self.new(rows) for _ in pools),
            block_tables=tuple(self.new(rows, 8, dtype=torch.int32) for _ in pools),
            sink_turn=turn,
        )
        with self.mode, _CpuBuild(), torch.inference_mode(), operators, runner._products(rows):
            return runner.model.hidden(
                self.new(1, rows), self.new(1, rows), attention_batch=batch, kv_cache=runner.cache
            )

    def stepped(
        self, patch: pytest.MonkeyPatch, params: list[SamplingParams], operators: Operators
    ) -> tuple[list[Chunk], StepResult]:
        """A whole decode step of one sequence for each of ``params``."""
        chunks = []
        for i, one in enumerate(params):
            request = Request(i, list(range(1, CONTEXT + 1)), one, sampler=Sampler(one, [1, 2, 3], i))
            chunks.append(Chunk(request, CONTEXT - 1, CONTEXT, True))
        patch.setattr(self.runner, "run", lambda chunks: self.decoded(len(chunks), operators))
        with self.mode, _CpuBuild(), operators:
            return chunks, self.runner.execute(chunks)


def fake_gpu(
    patch: pytest.MonkeyPatch,
    folder: Path,
    *,
    deterministic: bool = False,
    window: int | None = None,
) -> FakeGpu:
    """The checkpoint in ``folder`` on a fake GPU (sm_86). Products of experts are those that an engine would choose."""
    config = EngineConfig("int8", max_num_seqs=8, max_model_len=256, dtype="bfloat16", deterministic=deterministic)
    config = config if window is None else replace(config, window=window)
    info = inspect_model(resolve(str(folder)), config)
    model = load_model(info, torch.device("cpu"), deterministic)
    patch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 6))
    products = experts.implementation(info.config, CUDA, info.dtype, deterministic)
    if products is not None:
        model.module.set_experts_implementation(products)
    rotary.install(model.module, 256, info.source.name)
    plan = plan_cache(info.layers, config, raw_format(info.dtype))
    size = size_cache(plan, config, info.max_position_embeddings, 2**30)
    turn = None
    if plan.num_sink_tokens and plan.window:
        turn = SinkRotary(rotary.all_frequencies(model.module)[0], {i: Pairing() for i in range(len(info.layers))})
    mode = FakeTensorMode()
    _move(model.module, mode)
    reads: list[int] = []

    def nothing(tensor: torch.Tensor) -> numpy.ndarray:
        assert tensor.device == CUDA
        reads.append(tensor.numel())
        return numpy.ones(tensor.numel())  # token 1, and true

    patch.setattr(host, "to_host", nothing)
    manager = BlockManager(size.rules, config.block_size)
    with mode, _CpuBuild():
        runner = Runner(model, KVCache(plan, size, info.layers, CUDA), manager, deterministic)
    runner.sink_rotary = turn
    return FakeGpu(runner, mode, reads)


def _move(module: torch.nn.Module, mode: FakeTensorMode) -> None:
    """Replace all tensors of a module by fake ones on the GPU."""
    made: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            with mode:
                made[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype, device=CUDA)
        return made[id(tensor)]

    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = torch.nn.Parameter(fake(parameter), requires_grad=False)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = fake(buffer)
        for kind, (frequencies, scaling) in getattr(part, "lean_tables", {}).items():
            part.lean_tables[kind] = fake(frequencies), scaling
