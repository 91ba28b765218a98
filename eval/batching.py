"""What running requests together gives: one decode step of many rows beside one row, and ragged requests in turn."""

import argparse
import random
import statistics
import time

from lean.config import DEFAULT_MODEL, EngineConfig
from lean.engine import LLM
from lean.errors import run_main
from lean.eval.corpus import python_docs
from lean.model import LoadedModel
from lean.sampling_params import SamplingParams


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def step_seconds(model: LoadedModel, tokens: list[int], rows: int, context: int, kv_dtype: str, steps: int) -> float:
    """Median seconds of a decode step with so many rows, each behind ``context`` tokens of its own."""
    answer = 2 * steps + rows * context // 512 + 8
    length = context + answer
    llm = LLM(model, EngineConfig(kv_dtype, max_num_seqs=rows, max_model_len=length))
    for row in range(rows):
        llm.add_request(tokens[row * context : (row + 1) * context], greedy(answer))
    for _ in range(2 + rows * context // llm.config.step_tokens):  # until all of them decode
        llm.step()
    seconds = []
    for _ in range(steps + 2):
        started = time.perf_counter()
        llm.step()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[2:])


def requests_seconds(model: LoadedModel, prompts: list[list[int]], together: int, kv_dtype: str) -> float:
    """Seconds to answer all prompts with 32 tokens each, ``together`` at a time."""
    llm = LLM(model, EngineConfig(kv_dtype, max_num_seqs=together, max_model_len=512))
    started = time.perf_counter()
    llm.generate(prompts, greedy(32))
    return time.perf_counter() - started


def main() -> None:
    """Measure decode steps of one and of many rows, and ragged requests together and one after another."""
    parser = argparse.ArgumentParser(prog="python -m lean.eval.batching", description=main.__doc__)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--kv-dtype", default="int8")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--requests", type=int, default=32)
    args = parser.parse_args()
    llm = LLM(args.model, EngineConfig(args.kv_dtype, max_num_seqs=1, max_model_len=512))
    model = llm.model
    tokens = model.tokenizer(python_docs()[:60_000])["input_ids"]
    print(f"{args.model}, {model.info.dtype}, KV {args.kv_dtype}, {llm.kernels}")
    # One row is measured before and after, since machines are shared and noisy.
    one, many, again = (
        step_seconds(model, tokens, rows, args.context, args.kv_dtype, args.steps) for rows in (1, args.rows, 1)
    )
    alone = min(one, again)
    print(
        f"decode step at {args.context} tokens: 1 row {1e3 * alone:.1f} ms, {args.rows} rows {1e3 * many:.1f} ms: "
        f"{args.rows * alone / many:.2f}x the tokens/s",
        flush=True,
    )
    draw = random.Random(0)
    prompts = []
    for _ in range(args.requests):
        start, length = draw.randrange(5000), draw.randrange(8, 200)
        prompts.append(tokens[start : start + length])
    in_turn = requests_seconds(model, prompts, 1, args.kv_dtype)
    together = requests_seconds(model, prompts, args.rows, args.kv_dtype)
    print(
        f"{args.requests} requests of 8 to 200 tokens, 32 new each: one after another {in_turn:.1f} s, "
        f"{args.rows} at a time {together:.1f} s: {in_turn / together:.2f}x"
    )


if __name__ == "__main__":
    run_main(main)
