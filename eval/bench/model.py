"""``lean bench decode``, ``prefill`` and ``batch``: whole models, compared with other engines on the same tokens."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lean.config import EngineConfig
from lean.errors import UserError
from lean.eval.bench.memory import read_bandwidth
from lean.eval.bench.peers import PEERS, Decoder, Lean, LlamaCpp, Transformers, decode_room
from lean.eval.bench.timing import BenchRow, Timing, rows_beside_peers, seconds_of
from lean.eval.corpus import python_docs
from lean.layer_formats import parse_formats
from lean.llm import LLM
from lean.model.info import inspect_model
from lean.model.load import LoadedModel, load_model
from lean.quant import BF16

_ROUNDS = 7
_STEPS = 3  # timed steps per turn
_STEPS_IN_ALL = (_ROUNDS + 2) * (_STEPS + 1)


def bench_tokens(llm: LLM, count: int) -> list[int]:
    """The first ``count`` tokens of Python's help topics. Raises UserError where the text is shorter."""
    ids: list[int] = llm.model.tokenizer(python_docs()[: 8 * count + 100], add_special_tokens=False)["input_ids"]
    if len(ids) < count:
        raise UserError(f"the benchmark's text has only {len(ids):,} tokens: lower --context")
    return ids[:count]


def weight_bytes(model: LoadedModel) -> int:
    """Bytes of the weights that every decode step reads: all but the input embeddings, which count with a tied head."""
    module: Any = model.module
    tensors = {tensor.data_ptr(): tensor.nbytes for tensor in (*module.parameters(), *module.buffers())}
    inputs, head = module.get_input_embeddings(), module.get_output_embeddings()
    shared = set() if head is None else {tensor.data_ptr() for tensor in _own(head)}
    for tensor in _own(inputs):
        if tensor.data_ptr() not in shared:
            tensors.pop(tensor.data_ptr(), None)
    return sum(tensors.values())


def _own(module: torch.nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def with_format(config: EngineConfig, kv_dtype: str) -> EngineConfig:
    """The same engine options with another KV format, without a residual where the format is not quantized."""
    if not any(fmt.quantized for fmt in parse_formats(kv_dtype, BF16)):
        config = config.exact()
    return replace(config, kv_dtype=kv_dtype)


def bench_length(what: str, config: EngineConfig, contexts: Sequence[int], rows: int = 1) -> int:
    """One max-model-len for all engines of a benchmark: with some models, rotary frequencies depend on it."""
    context = max(contexts)
    return context + (8 if what == "prefill" else decode_room(config, rows, context, _STEPS_IN_ALL))


def contenders(
    llm: LLM, kv_dtypes: Sequence[str], peers: Sequence[str], gguf: str | None
) -> tuple[dict[str, Decoder], list[str]]:
    """(engines by name, names of lean's engines). Raises UserError for a peer that is unknown or not installed."""
    source, threads = llm.model.info.source, torch.get_num_threads()
    made: dict[str, Decoder] = {}
    for name in kv_dtypes:
        made[name] = Lean(llm.model, with_format(llm.config, name))
    ours = list(made)
    for peer in peers:
        if peer.startswith("transformers"):
            if source.gguf_file is not None and source.original is None:  # else the folder has a checkpoint, too
                raise UserError(
                    f"--against {peer} cannot load a GGUF file into transformers: pass a safetensors checkpoint folder"
                )
            bits = 4 if peer == "transformers-quantized" else None
            made[peer] = Transformers(source.folder, llm.model.info.dtype, llm.model.device, bits)
        elif peer == "expanded":
            made[peer] = Lean(_expanded(llm.model), with_format(llm.config, kv_dtypes[0]))
        elif peer == "llama.cpp":
            file = Path(gguf) if gguf else source.folder / source.gguf_file if source.gguf_file else None
            if file is None or not file.is_file():
                raise UserError("--against llama.cpp needs the model as a GGUF file: pass it with --gguf FILE")
            for cache in ("f16", "q8_0"):
                length = llm.size.max_model_len
                made[f"llama.cpp {cache}"] = LlamaCpp(file, cache, length, threads, llm.config.chunk_tokens)
        else:
            raise UserError(f"unknown peer {peer!r}: choose from {', '.join(PEERS)}")
    return made, ours


def _expanded(model: LoadedModel) -> LoadedModel:
    """A second copy of a model with latent attention, which keeps expanded K/V. Raises UserError for another model."""
    if not model.info.is_latent:
        raise UserError("--against expanded is for models with latent attention (MLA): remove it")
    config = EngineConfig(
        dtype=str(model.info.dtype).removeprefix("torch."), quantization=model.info.quantization or "none"
    )
    return load_model(inspect_model(model.info.source, config, model.device, keep_latent=False), model.device)


def _rows(
    llm: LLM, name: str, context: int, timings: Mapping[str, Timing], ours: Sequence[str], nbytes: Mapping[str, int]
) -> list[BenchRow]:
    shape, top = llm.model.info.layers[0], read_bandwidth(llm.model.device) if nbytes else None

    def row(kv_dtype: str, **figures) -> BenchRow:  # type: ignore[no-untyped-def]
        speed = nbytes[kv_dtype] / timings[kv_dtype].median if nbytes else None
        return BenchRow(
            name, kv_dtype, shape.num_q_heads, shape.num_kv_heads, shape.k_dim, context, torch.get_num_threads(),
            **figures, gb_s=speed and speed / 1e9, bandwidth_share=speed / top if speed and top else None,
        )  # fmt: skip

    return rows_beside_peers(row, timings, ours, [peer for peer in timings if peer not in ours])


def _turns(
    calls: Mapping[str, Callable[[], object]], rounds: int, steps: int, device: torch.device
) -> dict[str, Timing]:
    """Engines take turns of several steps. The first step of a turn, with cold caches, is not timed."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name in list(calls) if turn % 2 else list(calls)[::-1]:
            calls[name]()
            taken = [seconds_of(calls[name], device) for _ in range(steps)]
            if turn:
                seconds[name].append(statistics.median(taken))
    return {name: Timing.of(taken) for name, taken in seconds.items()}


def bench_decode(
    llm: LLM, kv_dtypes: Sequence[str], contexts: Sequence[int], peers: Sequence[str], gguf: str | None
) -> Iterator[BenchRow]:
    """Milliseconds per token of one sequence after a context of each length."""
    engines, ours = contenders(llm, kv_dtypes, peers, gguf)
    weights = weight_bytes(llm.model)
    for context in contexts:
        for engine in engines.values():
            engine.read(bench_tokens(llm, context))
        timings = _turns({name: engine.step for name, engine in engines.items()}, _ROUNDS, _STEPS, llm.model.device)
        held = {name: weights + engine.llm.stats().bytes_held for name, engine in engines.items() if name in ours}  # type: ignore[attr-defined]
        yield from _rows(llm, "decode", context, timings, ours, held)


def bench_prefill(
    llm: LLM, kv_dtypes: Sequence[str], contexts: Sequence[int], peers: Sequence[str], gguf: str | None
) -> Iterator[BenchRow]:
    """Milliseconds from a prompt to its first token."""
    engines, ours = contenders(llm, kv_dtypes, peers, gguf)
    for context in contexts:
        ids = bench_tokens(llm, context)
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        for turn in range(4):
            for name, engine in list(engines.items())[:: 1 if turn % 2 else -1]:
                taken = seconds_of(partial(engine.read, ids), llm.model.device)
                if turn:
                    seconds[name].append(taken)
        yield from _rows(llm, "prefill", context, {name: Timing.of(s) for name, s in seconds.items()}, ours, {})


def bench_batch(llm: LLM, kv_dtypes: Sequence[str], contexts: Sequence[int], batch: int) -> Iterator[BenchRow]:
    """Milliseconds per step of ``batch`` sequences. The peer is one sequence; ratio compares tokens per second."""
    for kv_dtype in kv_dtypes:
        for context in contexts:
            config = with_format(llm.config, kv_dtype)
            engines = {rows: Lean(llm.model, replace(config, max_num_seqs=rows), rows) for rows in (1, batch)}
            for engine in engines.values():
                engine.read(bench_tokens(llm, context))
            timings = _turns(
                {str(rows): engine.step for rows, engine in engines.items()}, _ROUNDS, _STEPS, llm.model.device
            )
            for row in _rows(llm, f"batch of {batch}", context, timings, [str(batch)], {}):
                one = timings["1"].median
                yield replace(
                    row, format=kv_dtype, peer="1 sequence", peer_ms=1e3 * one,
                    ratio=batch * one / timings[str(batch)].median,
                )  # fmt: skip
