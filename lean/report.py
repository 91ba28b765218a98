"""Reports about an engine, its model and its cache: the start-up line, the closing line, JSON objects."""

from collections import Counter
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from lean.cache.plan import CachePlan, plan_cache
from lean.cache.states import bytes_of, layers_of
from lean.config import EngineConfig
from lean.errors import ConfigError
from lean.units import ENDLESS, mib

if TYPE_CHECKING:
    from lean.engine.request import RequestOutput
    from lean.llm import LLM
    from lean.model.packing import Packing
    from lean.quant.weight_use import WeightUse
    from lean.store.gguf.file import GgufFile
    from lean.store.prequantized.plan import CheckpointModel


def start_up_line(llm: "LLM") -> str:
    """One line: model, formats, bytes per token, memory beside bf16, capacity, pools, kernels."""
    plan, size, info = llm.plan, llm.size, llm.model.info
    residual = ""
    if plan.residual_length:
        residual = f", last {plan.residual_length} and first {plan.num_exact_sinks} tokens unquantized"
    window = ""
    if plan.window:
        window = f", window {plan.window:,} + {plan.num_sink_tokens} sinks"
    pools = " + ".join(
        ([f"{mib((size.num_slots + 1) * plan.state_bytes)} states"] if plan.states else [])
        + [
            f"{mib((rule.num_blocks + 1) * pool.block_bytes)} {pool.name}"
            + (" unquantized" if pool.exact else "")
            + (f" (window {pool.window})" if pool.window else "")
            for rule, pool in zip(size.rules, plan.pools)
        ]
    )
    states = f" and {mib(plan.state_bytes)} of states a sequence" if plan.states else ""
    longest = size.max_model_len
    full, bf16 = plan.bytes_at(longest), plan.bytes_at_bf16(longest)
    length = "any length" if longest == ENDLESS else f"{longest:,} tokens"
    seqs = llm.config.max_num_seqs
    room = f"{size.num_tokens:,} tokens"
    if plan.bounded:
        room = "one sequence" if seqs == 1 else f"{seqs} sequences"
    weights = f"; {weights_line(llm.model.weights)}" if llm.model.weights else ""
    mode = ", deterministic" if llm.config.deterministic else ""
    mode += ", compiled decode" if llm.config.compile else ""
    mode += f", CUDA graphs ({mib(llm.graph_bytes)})" if llm.cuda_graphs else ""
    working = llm.engine.parts.working_bytes
    kept = f", {mib(size.num_tails * plan.tail_bytes)} of it for {size.num_tails} tails" if size.num_tails else ""
    kept += f", {mib(working)} kept for steps" if working else ""
    formats = " and ".join(dict.fromkeys(pool.name for pool in plan.pools if not pool.exact))
    return (
        f"{info.source.name}: {str(info.dtype).removeprefix('torch.')} on {llm.model.device}{weights}; "
        f"KV cache {formats}{residual}{window}, {plan.bytes_per_token:,} bytes/token{states}; "
        f"{mib(full)} at {length} (bf16: {mib(bf16)}, {bf16 / full:.2f}x as much); "
        f"{mib(size.nbytes)} allocated{kept}, room for {room}: {pools}; kernels: {llm.kernel_name}{mode}"
    )


def weights_line(use: "WeightUse") -> str:
    """The formats and bytes of quantized weights."""
    if use.formats or use.kept:
        bits = f"{use.bits:.2f} bits in " if use.formats else ""
        counts = [f"{count} {kind}" for kind, count in use.formats]
        counts += [f"{count} unquantized ({reason})" for reason, count in use.kept]
        return (
            f"weights {bits}{', '.join(counts)} tensors, "
            f"{mib(use.quantized_bytes)} + {mib(use.exact_bytes)} unquantized"
        )
    rest = "" if use.num_quantized == use.num_linear else f" of {use.num_linear}"
    slow = "" if use.fused else " (dequantized for every product: slow)"
    return (
        f"weights {use.bits:.2f} bits {use.name} in {use.num_quantized}{rest} linear layers{slow}, "
        f"{mib(use.quantized_bytes)} + {mib(use.exact_bytes)} unquantized"
    )


def weights_report(use: "WeightUse") -> dict[str, Any]:
    """The ``weights`` object of ``run --json``."""
    return {
        "format": use.name,
        "bits": round(use.bits, 4),
        "layers_quantized": use.num_quantized,
        "layers_linear": use.num_linear,
        "bytes_quantized": use.quantized_bytes,
        "bytes_exact": use.exact_bytes,
        **({"tensors": dict(use.formats), "unquantized": dict(use.kept)} if use.formats or use.kept else {}),
    }


def out_of_sight(llm: "LLM", num_tokens: int) -> str | None:
    """One line about the tokens that a window hides from the next token; None if it hides none.

    ``num_tokens``: length of the sequence.
    """
    window, sinks = llm.plan.window, llm.plan.num_sink_tokens
    if not window or num_tokens < window + sinks:
        return None
    first = f"the first {sinks} and " if sinks else ""
    return f"of {num_tokens:,} tokens the model now sees only {first}the last {window:,} (--window)"


def kv_report(llm: "LLM") -> dict[str, Any]:
    """The ``kv`` object of ``run --json``: the cache at the moment when it held the most tokens."""
    plan, use = llm.plan, llm.peak_use
    k_formats, v_formats = plan.formats
    return {
        "format_k": "/".join(fmt.name for fmt in k_formats),
        "format_v": "/".join(fmt.name for fmt in v_formats),
        "residual": plan.residual_length,
        "sinks": max(plan.num_exact_sinks, plan.num_sink_tokens),
        "block_size": plan.block_size,
        "bytes_per_token": plan.bytes_per_token,
        "tokens_held": use.tokens_held,
        "bytes_held": use.bytes_held,
        "bytes_if_bf16": use.bytes_if_bf16,
        "state_bytes": use.state_bytes,
        "pools": [asdict(pool) for pool in use.pools],
    }


def answer_report(llm: "LLM", outputs: "list[RequestOutput]", times: list[float]) -> dict[str, Any]:
    """The object of ``run --json``. ``times``: seconds from the start to each output."""
    from lean.engine.outputs import joined

    indices = range(max(output.index for output in outputs) + 1)
    answers = [joined([output for output in outputs if output.index == index]) for index in indices]
    first = answers[0]
    tokens = sum(len(answer.token_ids) for answer in answers)
    ttft, decode = times[0], times[-1] - times[0]
    report: dict[str, Any] = {
        "text": first.text,
        "token_ids": first.token_ids,
        "finish_reason": first.finish_reason,
        "prompt_tokens": first.prompt_tokens,
        "cached_tokens": first.cached_tokens,
        "completion_tokens": tokens,
        "kv": kv_report(llm),
        "timing": {
            "load_s": round(llm.load_s, 3),
            "ttft_s": round(ttft, 4),
            "prefill_tok_s": round(first.prompt_tokens / ttft, 2),
            "decode_tok_s": round((tokens - len(answers)) / decode, 2) if tokens > len(answers) else None,
        },
        "kernels": llm.kernel_name,
    }
    if llm.model.weights is not None:
        report["weights"] = weights_report(llm.model.weights)
    if first.logprobs is not None:
        report["logprobs"] = [asdict(entry) for entry in first.logprobs]
    if first.prompt_logprobs is not None:
        report["prompt_logprobs"] = [entry and asdict(entry) for entry in first.prompt_logprobs]
    if len(answers) > 1:
        report["choices"] = [
            {
                "index": answer.index,
                "text": answer.text,
                "token_ids": answer.token_ids,
                "finish_reason": answer.finish_reason,
            }
            for answer in answers
        ]
    return report


def keep_notes(llm: "LLM") -> None:
    """Log no notes of the engine from now on: they would stand amid an answer that is printed word by word."""
    if llm.engine.pace is not None:
        llm.engine.pace.aloud = False


def closing_line(report: dict[str, Any]) -> str:
    """One line: tokens, speed and cache memory of an answer."""
    kv, timing = report["kv"], report["timing"]
    speed = f", then {timing['decode_tok_s']:.1f} tokens/s" if timing["decode_tok_s"] else ""
    cached = f" ({report['cached_tokens']} from the prefix cache)" if report["cached_tokens"] else ""
    return (
        f"{report['prompt_tokens']} prompt tokens{cached}, {report['completion_tokens']} new tokens "
        f"(finish reason: {report['finish_reason']}); first token after {timing['ttft_s']:.2f} s{speed}; "
        f"KV cache held {mib(kv['bytes_held'])} for {kv['tokens_held']} tokens "
        f"(in bf16, without blocks: {mib(kv['bytes_if_bf16'])})"
    )


def packing_line(packing: "Packing | None", exact_bytes: int, by_default: bool = False) -> str:
    """What the weights of a model take, before they are loaded.

    Args:
        exact_bytes: unquantized.
        by_default: they are packed where no flag says otherwise.
    """
    if packing is None or not packing.weights:
        return f"{mib(exact_bytes)} unquantized"
    counts = [f"{count} {kind}" for kind, count in packing.formats.items()]
    counts += [f"{count} unquantized ({reason})" for reason, count in packing.kept.items()]
    tensors = f"{mib(packing.nbytes)}: {', '.join(counts)} tensors"
    if by_default:
        return f"{tensors}; with --quantization none {mib(exact_bytes)} unquantized"
    return f"{mib(exact_bytes)} unquantized; with --quantization auto {tensors}"


def model_report(name: str, trust_remote_code: bool = False) -> dict[str, Any]:
    """The object of ``info --json``. Bytes cover all layers; null for a format that does not support the head_dim.

    No residual is counted, but of the formats that need one the smallest.
    """
    from lean.model.info import inspect_model
    from lean.quant import CHANNEL_TOKENS, NAMES, parse_kv_dtype, raw_format
    from lean.store.gguf.weights import GgufModel
    from lean.store.prequantized.plan import CheckpointModel
    from lean.store.source import resolve

    source = resolve(name, trust_remote_code=trust_remote_code)
    config = EngineConfig(trust_remote_code=trust_remote_code)
    auto = replace(config, quantization="auto")
    info = inspect_model(source, config if source.gguf_file is None else auto)
    packing = inspect_model(source, auto).packing if source.original is not None else info.packing
    exact_bytes = info.weight_bytes if info.packing is None else info.parameters * info.dtype.itemsize

    def plan(kv_dtype: str) -> CachePlan | None:
        try:
            least = CHANNEL_TOKENS if parse_kv_dtype(kv_dtype)[0].by_channel else 0
            config = EngineConfig(kv_dtype=kv_dtype, kv_residual_length=least)
            return plan_cache(info.layers, config, raw_format(info.dtype), info.states)
        except ConfigError:
            return None

    plans = {kv_dtype: plan(kv_dtype) for kv_dtype in NAMES}

    def one_or_all(values: list[int]) -> int | list[int]:
        return values[0] if len(set(values)) == 1 else values

    layers, state_bytes = info.layers, bytes_of(info.states)
    return {
        "path": str(info.source.folder / (info.source.gguf_file or "")),
        **({"gguf": _gguf_line(info.stored.file)} if isinstance(info.stored, GgufModel) else {}),
        **({"quantized_by": _method_line(info.stored)} if isinstance(info.stored, CheckpointModel) else {}),
        "architecture": info.architecture,
        "model_type": info.config.model_type,
        "parameters": info.parameters,
        "dtype": str(info.dtype).removeprefix("torch."),
        "weights": packing_line(packing, exact_bytes, isinstance(info.stored, CheckpointModel)),
        "weight_bytes": exact_bytes,
        "weight_bytes_packed": packing.nbytes if packing is not None and packing.weights else None,
        "layers": len(layers),
        "num_q_heads": one_or_all([layer.num_q_heads for layer in layers]),
        "num_kv_heads": one_or_all([layer.num_kv_heads for layer in layers]),
        "head_dim": one_or_all([layer.k_dim for layer in layers]),
        "windows": [layer.window or None for layer in layers],
        "kv_layers": [index if layer.kv_layer is None else layer.kv_layer for index, layer in enumerate(layers)],
        "max_position_embeddings": info.max_position_embeddings,
        "states": f"{layers_of(info.states)} layers, {mib(state_bytes)} a sequence" if info.states else "none",
        "state_bytes": state_bytes,
        "bytes_per_token": {name: plan and plan.bytes_per_token for name, plan in plans.items()},
        "bytes_at_4096_tokens": {name: plan and plan.bytes_at(4096) for name, plan in plans.items()},
        "notes": list(info.notes),
    }


def _gguf_line(gguf: "GgufFile") -> str:
    """The architecture that a GGUF file names, its parts, and how many tensors it has of each type."""
    kinds = Counter(tensor.type_name for tensor in gguf.tensors.values())
    counted = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    parts = f"{len(gguf.parts)} parts" if len(gguf.parts) > 1 else "one file"
    return f"{gguf.metadata['general.architecture']}, {parts}; tensors: {counted}"


def _method_line(stored: "CheckpointModel") -> str:
    """Who quantized the weights."""
    return f"{stored.method}, {len(stored.targets)} tensors"
