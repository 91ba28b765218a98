"""Prefill and decode speed beside transformers' generate, in one run.

The two take turns on the same tokens and threads; medians are quoted and the ratio is what counts, since machines are
shared and noisy.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import transformers

from lean.config import DEFAULT_MODEL, EngineConfig
from lean.engine import LLM
from lean.errors import ConfigError, run_main
from lean.eval.corpus import python_docs
from lean.hub import resolve
from lean.request import SamplingParams


def _seconds(call: Callable[[list[int], int], None], ids: list[int], count: int) -> float:
    start = time.perf_counter()
    call(ids, count)
    return time.perf_counter() - start


def main() -> None:
    """Measure tokens per second at several context lengths."""
    parser = argparse.ArgumentParser(prog="python -m lean.eval.bench", description=main.__doc__)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--kv-dtype", default="int8")
    parser.add_argument("--context", type=int, nargs="*", default=[128, 1024, 2048], help="prompt tokens")
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    source = resolve(args.model)
    if source.gguf_file is not None:
        raise ConfigError("the comparison loads the model with transformers too: pass a checkpoint folder")
    llm = LLM(source, EngineConfig(kv_dtype=args.kv_dtype, max_num_seqs=1))
    peer = transformers.AutoModelForCausalLM.from_pretrained(source.folder, dtype=llm.model.info.dtype).eval()
    peer.to(llm.model.device)
    tokens = llm.model.tokenizer(python_docs()[: 8 * max(args.context)])["input_ids"]
    if len(tokens) < max(args.context):
        raise ConfigError(f"the text has {len(tokens)} tokens only: lower --context")

    def ours(ids: list[int], count: int) -> None:
        llm.generate([ids], SamplingParams(max_tokens=count, ignore_eos=True, temperature=0.0))

    def theirs(ids: list[int], count: int) -> None:
        prompt = torch.tensor([ids], device=peer.device)
        options = {"min_new_tokens": count, "max_new_tokens": count, "do_sample": False}
        peer.generate(prompt, attention_mask=torch.ones_like(prompt), **options)

    print(f"{args.model}, {llm.model.info.dtype}, KV {args.kv_dtype}, {torch.get_num_threads()} threads, {llm.kernels}")
    print("tokens/s: lean, transformers, ratio; medians of", args.repeats)
    for context in args.context:
        ids = tokens[:context]
        times: dict[tuple[str, int], list[float]] = {}
        for repeat in range(args.repeats + 1):
            for name, call in (("lean", ours), ("transformers", theirs)):
                for count in (1, 1 + args.new_tokens):
                    seconds = _seconds(call, ids, count)
                    if repeat:  # the first is warm-up
                        times.setdefault((name, count), []).append(seconds)
        first = {name: statistics.median(times[name, 1]) for name in ("lean", "transformers")}
        whole = {name: statistics.median(times[name, 1 + args.new_tokens]) for name in first}
        prefill = {name: context / first[name] for name in first}
        decode = {name: args.new_tokens / (whole[name] - first[name]) for name in first}
        for what, speed in (("prefill", prefill), ("decode", decode)):
            ratio = speed["lean"] / speed["transformers"]
            print(
                f"{what:8} at {context:5}: {speed['lean']:9.1f} {speed['transformers']:9.1f} {ratio:6.2f}x", flush=True
            )


if __name__ == "__main__":
    run_main(main)
