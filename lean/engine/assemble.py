"""From a model and a configuration to the parts that an engine runs steps with."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import torch

from lean.cache.advice import Room, what_fits
from lean.cache.plan import CachePlan, plan_cache
from lean.cache.size import CacheSize, DoesNotFit, size_cache
from lean.config import LATENT_PREFILL_CHUNK, EngineConfig
from lean.device import cache_share, choose_device, driver_free_bytes, free_bytes, passed_over
from lean.engine.compiling import can_fork
from lean.engine.cuda_graphs import CudaGraphs, WaitsForDevice
from lean.engine.decode_steps import keep_compiled_code
from lean.engine.fingerprint import engine_folder, open_folder
from lean.engine.parts import Parts, bind
from lean.engine.recordable import Recordable, recordable
from lean.engine.selftest import try_layers, try_rotation
from lean.engine.working_memory import working_bytes
from lean.errors import ConfigError, is_out_of_memory
from lean.kernels.compiling import Compiled, compiled_kernels
from lean.kernels.serving import Need, backend, needs_of
from lean.model import rotary
from lean.model.expansion import may_expand
from lean.model.info import ModelInfo, inspect_model
from lean.model.load import LoadedModel, load_model
from lean.quant import raw_format
from lean.store.source import ModelSource, resolve
from lean.threads import fit_threads, use_threads
from lean.units import mib

fit_threads()  # once torch is loaded, before anything computes: what the program sets later is its own choice


def assemble(
    model: str | ModelSource | LoadedModel,
    config: EngineConfig,
    *,
    progress: bool = False,
    on_compile: Callable[[str, Compiled], None] | None = None,
) -> Parts:
    """Find and load the model where it is not loaded yet, plan and size its cache, bind both, and test them.

    Sizes are computed twice: before loading, to refuse early, and again from the memory that the weights left.

    Raises:
        UserError: the model or the configuration cannot be used. What the configuration and the machine decide is
            refused before weights are read.
    """
    use_threads(config.threads)
    device = choose_device(config.device)
    if isinstance(model, LoadedModel):
        _check_loaded(model, config, device)
        device, info = model.device, model.info
    else:
        if isinstance(model, str):
            model = resolve(model, progress=progress, trust_remote_code=config.trust_remote_code)
        info = inspect_model(model, config, device)
    if config.deterministic and info.states:
        raise ConfigError(
            f"{info.source.name}: --deterministic is not possible, as layers with states compute other bits when a "
            "prompt is cut into other chunks: remove it"
        )
    config = with_chunk(config, info, device)
    plan = plan_cache(info.layers, config, raw_format(info.dtype), info.states)
    needs = needs_of((layout for pool in plan.pools for layout in pool.layouts), info.dtype)
    kernel_name = _choose_kernels(device, needs)
    with compiled_kernels(on_compile) if kernel_name.startswith("Triton") else nullcontext() as compiled:
        parts = _assemble(model, info, config, device, plan, needs, kernel_name)
    if compiled is not None and compiled.kernels:
        parts.notes.append(str(compiled))
    return parts


def with_chunk(config: EngineConfig, info: ModelInfo, device: torch.device) -> EngineConfig:
    """The same options with the chunk that suits the model, where they leave it open."""
    if config.prefill_chunk is not None:
        return config
    large = config.window is None and may_expand(info.is_latent, device, config.deterministic)
    return replace(config, prefill_chunk=LATENT_PREFILL_CHUNK) if large else config


def _assemble(
    model: ModelSource | LoadedModel,
    info: ModelInfo,
    config: EngineConfig,
    device: torch.device,
    plan: CachePlan,
    needs: list[Need],
    kernel_name: str,
) -> Parts:
    folder = open_folder(config, loaded_here=not isinstance(model, LoadedModel))
    if not isinstance(model, LoadedModel):
        weights = info.gpu_bytes(info.quantization) if device.type == "cuda" else info.weight_bytes
        _check_weights_fit(info, config, device, weights)
        _size(plan, config, info, device, coming=weights)  # refuses early what can never fit
        model = load_model(info, device, config.deterministic)
    graphs = recordable(model, needs, kernel_name)
    working = working_bytes(model, config, plan, kernel_name, graphs.rows_for(config) if graphs else 0)
    size = _size(plan, config, info, device, working=working)
    notes = passed_over(device) if config.device == "auto" else []
    notes += [*info.notes, *plan.notes, *_length_notes(info, config, plan, size)]
    # Replaced before the first step on this cache. The steps that measured memory ran the model's own.
    length = min(size.max_model_len, info.max_position_embeddings)
    notes += rotary.install(model.module, length, info.source.name)
    free = free_bytes(device)
    try:
        parts = bind(model, config, plan, size, kernel_name)
        if folder is not None:
            parts.disk_folder = engine_folder(folder, model, config, plan, kernel_name)
        return _made_ready(parts, graphs, notes, working)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    # What is free is not all that can be had: suggest at most half of what was tried.
    fits = what_fits(room(info, device, min(free, size.nbytes) // 2), config, config.max_model_len)
    raise ConfigError(
        f"out of memory while the KV cache of {mib(size.nbytes)} was set up, though {mib(free)} were free; {fits}"
    )


def _made_ready(parts: Parts, graphs: Recordable | None, notes: list[str], working: int) -> Parts:
    """Run the first steps to test model and cache, and prepare decode steps."""
    parts.notes, parts.working_bytes = notes, working
    try_layers(parts.runner, parts.manager)
    if parts.plan.window:
        rotation = try_rotation(parts.runner, parts.manager)
        parts.runner.sink_rotary = rotation if parts.plan.num_sink_tokens else None
    prepare_decode(parts, graphs)
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
    model.check_weights(config.quantization, config.deterministic, config.compile)


def _choose_kernels(device: torch.device, needs: list[Need]) -> str:
    """Choose the kernels that serve from now on; returns their name. Raises ConfigError for unknown ones."""
    try:
        return backend(device, needs)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _size(
    plan: CachePlan, config: EngineConfig, info: ModelInfo, device: torch.device, coming: int = 0, working: int = 0
) -> CacheSize:
    """Sizes by the memory that is free now.

    coming: bytes of the weights, where they are not loaded yet. working: bytes to keep free for steps.

    Raises ConfigError that ends with what would fit.
    """
    free = free_bytes(device) - working
    left = free - coming
    # On a CPU the weights are pages of their file, which the system drops where memory is short.
    usable = left if device.type == "cuda" else free
    try:
        return size_cache(plan, config, info.max_position_embeddings, max(0, usable), cache_share(device))
    except DoesNotFit as error:
        fits = what_fits(room(info, device, left), config, config.max_model_len)
        kept = f", beside {mib(working)} for steps" if working else ""
        raise ConfigError(f"{error}{kept}; {fits}") from None


def room(info: ModelInfo, device: torch.device, free: int) -> Room:
    """What decides the size of a cache of this model, where ``free`` bytes of memory are free for it."""
    config = info.config
    # Of models that mix windows and full attention, some do not rotate the layers with full attention.
    full = not any(layer.window for layer in info.layers)
    rotates = bool(getattr(config, "rope_parameters", None)) and all(getattr(config, "no_rope_layers", None) or ())
    dtype_format, limit = raw_format(info.dtype), info.max_position_embeddings
    return Room(info.layers, dtype_format, limit, max(0, free), cache_share(device), full and rotates, info.states)


def _check_weights_fit(info: ModelInfo, config: EngineConfig, device: torch.device, needed: int) -> None:
    """Raise ConfigError for weights of ``needed`` bytes that do not fit into the free memory, before they are read."""
    free = free_bytes(device)
    if needed <= free:
        return
    fits = []
    plain = needed == info.weight_bytes
    if plain and info.dtype.itemsize > 2 and needed // info.dtype.itemsize * 2 <= free:
        fits.append("--dtype bfloat16")
    smaller = device.type == "cuda" and config.quantization in (None, "auto", "none") and not config.deterministic
    if smaller and info.quantizable.weights and info.dtype is not torch.float64 and info.gpu_bytes("bnb-4bit") <= free:
        fits.append("--quantization bnb-4bit")
    raise ConfigError(
        f"the weights of {info.source.name} take {mib(needed)}, but {mib(free)} are free: use "
        f"{''.join(f'{option}, or ' for option in fits)}a smaller model, or free some memory"
    )


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


def prepare_decode(parts: Parts, graphs: Recordable | None) -> None:
    """Compile or record the decode steps where the configuration and the device ask for it. Raises ModelError."""
    config, device, seconds = parts.config, parts.model.device, 0.0
    if graphs is not None and (rows := graphs.rows_for(config)):
        free = driver_free_bytes(device)
        try:
            seconds = _prepare(parts, rows, CudaGraphs(device))
        except WaitsForDevice as error:
            graphs = Recordable(0, str(error))
        else:
            parts.cuda_graphs, parts.graph_bytes = True, max(0, free - driver_free_bytes(device))
    parts.notes += graphs.notes(config) if graphs is not None else []
    if not config.compile:
        return
    kept = f"the compiled code is kept for the next run in {keep_compiled_code()}"
    if device.type == "cpu" and can_fork():
        parts.runner.compile_beside(config.max_num_seqs, parts.size.max_model_len, "inductor")
        parts.notes.append(f"decode steps are compiled while the first ones run uncompiled; {kept}")
        return
    if not parts.cuda_graphs:
        seconds = _prepare(parts, config.max_num_seqs, None)
    parts.notes.append(f"compiling decode steps of up to {config.max_num_seqs} sequences took {seconds:.0f} s; {kept}")


def _prepare(parts: Parts, max_num_seqs: int, record: CudaGraphs | None) -> float:
    """See `Runner.prepare_decode`."""
    backend = "inductor" if parts.config.compile else None
    return parts.runner.prepare_decode(max_num_seqs, parts.size.max_model_len, backend, record)
