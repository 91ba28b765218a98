"""From a model and a configuration to the parts that an engine runs steps with."""

from dataclasses import dataclass, field

import torch

from lean.cache.block_manager import BlockManager
from lean.cache.kv_cache import KVCache
from lean.cache.plan import CachePlan, plan_cache
from lean.cache.size import CacheSize, size_cache
from lean.config import EngineConfig
from lean.device import cache_share, choose_device, free_bytes
from lean.engine.decode_steps import CudaGraphs, keep_compiled_code
from lean.engine.runner import Runner
from lean.engine.selftest import try_layers, try_rotation
from lean.errors import ConfigError
from lean.kernels.ops import backend, is_recordable
from lean.model import rotary
from lean.model.info import ModelInfo, inspect_model
from lean.model.load import LoadedModel, load_model
from lean.quant import raw_format
from lean.store.source import ModelSource, resolve


@dataclass
class Parts:
    """A model bound to a cache.

    Attributes:
        plan, size: which layers share which pools, and how many blocks every pool has.
        manager: the accounting of blocks. cache: their tensors. runner: computes steps on both.
        kernel_name: the kernels that serve attention.
        notes: lines that the user should see.
        cuda_graphs: whether decode steps are recorded. graph_bytes: memory that the records take.
    """

    config: EngineConfig
    model: LoadedModel
    plan: CachePlan
    size: CacheSize
    manager: BlockManager
    cache: KVCache
    runner: Runner
    kernel_name: str
    notes: list[str] = field(default_factory=list)
    cuda_graphs: bool = False
    graph_bytes: int = 0


def bind(model: LoadedModel, config: EngineConfig, plan: CachePlan, size: CacheSize, kernel_name: str) -> Parts:
    """Allocate the cache of ``plan`` and ``size`` for a loaded model. The kernels of ``kernel_name`` serve already."""
    manager = BlockManager(size.rules, config.block_size)
    cache = KVCache(plan, size, model.info.layers, model.device)
    runner = Runner(model, cache, manager, config.deterministic)
    return Parts(config, model, plan, size, manager, cache, runner, kernel_name)


def assemble(model: str | ModelSource | LoadedModel, config: EngineConfig, *, progress: bool = False) -> Parts:
    """Find and load the model where it is not loaded yet, plan and size its cache, bind both, and test them.

    Sizes are computed twice: before loading, to refuse early, and again from the memory that the weights left.

    Raises:
        UserError: the model or the configuration cannot be used. What the configuration and the machine decide is
            refused before weights are read.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = choose_device(config.device)
    if isinstance(model, LoadedModel):
        _check_loaded(model, config, device)
        device, info = model.device, model.info
    else:
        if isinstance(model, str):
            model = resolve(model, progress=progress, trust_remote_code=config.trust_remote_code)
        info = inspect_model(model, config)
    kernel_name = _choose_kernels(device)
    plan = plan_cache(info.layers, config, raw_format(info.dtype))
    if not isinstance(model, LoadedModel):
        _size(plan, config, info, device)  # refuses early what can never fit
        model = load_model(info, device, config.deterministic)
    size = _size(plan, config, info, device)
    notes = [*info.notes, *plan.notes, *_length_notes(info, config, plan, size)]
    # The rotary forward is replaced before the first step.
    length = min(size.max_model_len, info.max_position_embeddings)
    notes += rotary.install(model.module, length, info.source.name)
    parts = bind(model, config, plan, size, kernel_name)
    parts.notes = notes
    try_layers(parts.runner, parts.manager)
    if plan.window:
        rotation = try_rotation(parts.runner, parts.manager)
        parts.runner.sink_rotary = rotation if plan.num_sink_tokens else None
    _prepare_decode(parts)
    return parts


def _check_loaded(model: LoadedModel, config: EngineConfig, device: torch.device) -> None:
    """Raise ConfigError where the configuration asks for another dtype, device or weights than the model has."""
    if config.dtype != "auto" and getattr(torch, config.dtype) is not model.info.dtype:
        raise ConfigError(
            f"dtype {config.dtype} was requested, but the loaded model is {model.info.dtype}: load the model again"
        )
    if config.device != "auto" and device != model.device:
        raise ConfigError(
            f"device {config.device} was requested, but the loaded model is on {model.device}: load the model again"
        )
    model.check_weights(config.quantization, config.deterministic)


def _choose_kernels(device: torch.device) -> str:
    """Choose the kernels that serve from now on; returns their name. Raises ConfigError for unknown ones."""
    try:
        return backend(device)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _size(plan: CachePlan, config: EngineConfig, info: ModelInfo, device: torch.device) -> CacheSize:
    """Sizes by the memory that is free now."""
    return size_cache(plan, config, info.max_position_embeddings, free_bytes(device), cache_share(device))


def _length_notes(info: ModelInfo, config: EngineConfig, plan: CachePlan, size: CacheSize) -> list[str]:
    notes = []
    wanted = config.max_model_len or size.model_max_len
    if size.max_model_len < wanted:
        notes.append(f"max-model-len lowered from {wanted} to {size.max_model_len}: more does not fit the KV memory")
    reach = plan.window + plan.num_sink_tokens
    if plan.window and reach > info.max_position_embeddings:
        notes.append(
            f"window {plan.window} and {plan.num_sink_tokens} sinks span {reach} tokens, but the model was trained for "
            f"{info.max_position_embeddings}: answers may be worse; lower --window"
        )
    return notes


def _prepare_decode(parts: Parts) -> None:
    """Compile or record the decode steps where the configuration and the device ask for it. Raises ModelError."""
    config, device = parts.config, parts.model.device
    parts.cuda_graphs = not config.enforce_eager and is_recordable(device)
    if device.type == "cuda" and not (parts.cuda_graphs or config.enforce_eager):
        parts.notes.append(f"no CUDA graphs with these kernels ({parts.kernel_name}): decode steps run eagerly")
    if not (config.compile or parts.cuda_graphs):
        return
    free = free_bytes(device)
    seconds = parts.runner.prepare_decode(
        config.max_num_seqs,
        parts.size.max_model_len,
        "inductor" if config.compile else None,
        CudaGraphs(device) if parts.cuda_graphs else None,
    )
    if parts.cuda_graphs:
        parts.graph_bytes = max(0, free - free_bytes(device))
    if config.compile:
        parts.notes.append(
            f"compiling decode steps of up to {config.max_num_seqs} sequences took {seconds:.0f} s; "
            f"the compiled code is kept for the next run in {keep_compiled_code()}"
        )
