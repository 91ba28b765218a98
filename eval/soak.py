"""Random load on a tiny model: memory must stay constant, every request must end, every block must be given back.

The model has random weights and is made at the start; the test is about the engine. Requests arrive in random numbers
and are cancelled and forked; some begin like earlier ones, and some have a salt. The pool is too small for them, so
that preemptions are frequent. With --disk the prefix cache is also kept in a folder, which is too small, too.
"""

import argparse
import json
import os
import random
import tempfile
import time
from collections import Counter, deque
from dataclasses import replace
from pathlib import Path

import torch

from lean.config import EngineConfig
from lean.engine.request import RequestOutput
from lean.errors import EngineError, run_main
from lean.eval.random_model import save_random_model
from lean.llm import LLM
from lean.sampling_params import SamplingParams
from lean.store.home import write_result
from lean.units import parse_size

MAX_ALIVE = 200
MODEL_LENGTH = 256
GROWTH = 0.02  # growth of resident memory from the second quarter to the last that counts as noise


def tiny_model(folder: Path) -> None:
    """Save a checkpoint with random weights and a tokenizer of one token per byte."""
    save_random_model(
        folder, vocab_size=257, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=MODEL_LENGTH,
    )  # fmt: skip


def resident_bytes() -> int:
    """Resident memory of this process; 0 on a system other than Linux."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


class Load:
    """Makes requests, some of which begin like an earlier one, cancels some, and counts how they end."""

    def __init__(self, llm: LLM, seed: int) -> None:
        self.llm = llm
        self.random = random.Random(seed)
        self.count: Counter[str] = Counter()
        self.left: dict[int, int] = {}  # request -> its sequences that have not ended
        self.texts: dict[int, list[int]] = {}  # running requests -> their tokens so far, of the first sequence
        self.ended: deque[list[int]] = deque(maxlen=8)  # all tokens of requests that have ended
        self.target = 30  # requests alive at once

    def params(self) -> SamplingParams:
        draw = self.random
        return SamplingParams(
            max_tokens=draw.choice((1, 4, 16, 64, 200)),
            temperature=draw.choice((0.0, 0.7, 1.2)),
            n=draw.choice((1, 1, 1, 2, 4)),
            top_p=draw.choice((None, 0.9)),
            repetition_penalty=draw.choice((None, 1.3)),
            frequency_penalty=draw.choice((0.0, 0.5)),
            stop=draw.choice(((), ("a",), ("no such text",))),
            ignore_eos=draw.random() < 0.5,
            logprobs=draw.choice((None, None, 0, 3)),
        )

    def add(self) -> None:
        draw, params = self.random, self.params()
        prompt = [draw.randrange(1, 257) for _ in range(draw.choice((1, 5, 30, 90, 180)))]
        if self.ended and draw.random() < 0.5:
            said = draw.choice(self.ended)
            prompt = [*said[: draw.choice((len(said), len(said) // 2))], *prompt][: MODEL_LENGTH - 1]
        request_id = self.llm.add_request(prompt, params, cache_salt=draw.choice((None, None, "a")))
        self.left[request_id] = params.n
        self.texts[request_id] = list(prompt)

    def take(self, output: RequestOutput) -> None:
        request_id = output.request_id
        self.count["tokens"] += len(output.token_ids)
        self.count["prompt"] += output.prompt_tokens * (output.finish_reason is not None)
        self.count["cached"] += output.cached_tokens * (output.finish_reason is not None)
        if output.index == 0:
            self.texts[request_id] += output.token_ids
        if output.finish_reason is None:
            return
        if output.finish_reason == "error":
            raise EngineError(f"request {request_id}: {output.error}")
        self.left[request_id] -= 1
        if self.left[request_id]:
            return
        del self.left[request_id]
        self.count["aborted" if output.finish_reason == "abort" else "done"] += 1
        self.ended.append(self.texts.pop(request_id))

    def step(self, adding: bool = True) -> None:
        """One step of the engine. With ``adding``, some requests are added and cancelled first."""
        if adding:
            if self.random.random() < 0.005:
                self.target = self.random.choice((1, 4, 30, MAX_ALIVE))
            while len(self.left) < self.target and self.random.random() < 0.7:
                self.add()
            if self.left and self.random.random() < 0.1:
                self.llm.abort(self.random.choice(list(self.left)))
        for output in self.llm.step():
            self.take(output)

    def finish(self) -> None:
        """Run until all requests have ended. Raises EngineError where one does not end or blocks are not given back."""
        steps = 0
        while self.llm.has_work:
            self.step(adding=False)
            steps += 1
            if steps > MAX_ALIVE * 4 * MODEL_LENGTH:
                raise EngineError(f"{len(self.left)} requests do not end")
        if self.left or self.llm.stats().bytes_held:
            raise EngineError(
                f"{len(self.left)} requests have not ended and {self.llm.stats().bytes_held} bytes are still held"
            )


def verdict(curve: list[dict[str, float]]) -> tuple[float, str]:
    """Growth of mean resident memory from the second quarter of the run to the last, and a sentence about it."""
    quarter = len(curve) // 4
    if not quarter:
        return 0.0, "the run is too short to judge memory"
    early, late = (
        sum(point["rss_mib"] for point in part) / quarter for part in (curve[quarter : 2 * quarter], curve[-quarter:])
    )
    growth = late / early - 1
    word = "memory grows" if growth > GROWTH else "memory is constant"
    return growth, f"{word}: {early:.1f} MiB in the second quarter, {late:.1f} in the last ({growth:+.2%})"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m lean.eval.soak", description=main.__doc__)
    parser.add_argument("--minutes", type=float, default=60, help="length of the run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the model and of the load (default: %(default)s)")
    parser.add_argument("--kv-dtype", default="int8", help="KV format (default: %(default)s)")
    parser.add_argument(
        "--num-blocks", type=int, default=24, help="blocks of 16 tokens; fewer blocks cause more preemptions"
    )
    parser.add_argument(
        "--disk", type=parse_size, metavar="SIZE", help="keep the prefix cache in a temporary folder of this size, too"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the curve and the verdict to FILE")
    return parser.parse_args()


def soak(load: Load, minutes: float) -> list[dict[str, float]]:
    """Run the load, print a line every minute (8 lines at least), and return the lines' figures."""
    curve: list[dict[str, float]] = []
    start = time.monotonic()
    interval = min(60.0, minutes * 60 / 8)  # a verdict needs two points in a quarter
    next_point = start + interval
    print("minutes    done  aborted  preemptions     tokens  cached  of disk   alive  RSS MiB", flush=True)
    while (now := time.monotonic()) < start + minutes * 60 or now >= next_point:
        load.step()
        if now < next_point:
            continue
        next_point += interval
        load.llm.check_integrity()
        prefix = load.llm.stats().prefix
        assert prefix is not None
        point = {
            "minutes": (now - start) / 60,
            "done": load.count["done"],
            "aborted": load.count["aborted"],
            "preemptions": load.llm.num_preemptions,
            "tokens": load.count["tokens"],
            "cached": load.count["cached"] / max(1, load.count["prompt"]),
            "read": prefix.tokens_read / max(1, prefix.tokens_found),
            "alive": len(load.left),
            "rss_mib": resident_bytes() / 2**20,
        }
        curve.append(point)
        print(
            f"{point['minutes']:7.1f} {point['done']:7} {point['aborted']:8} {point['preemptions']:12} "
            f"{point['tokens']:10} {point['cached']:7.1%} {point['read']:8.1%} {point['alive']:7} "
            f"{point['rss_mib']:8.1f}",
            flush=True,
        )
    return curve


def main() -> None:
    """Run random load for some time; check that memory stays constant and that every block is given back."""
    args = _options()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # tiny tensors gain nothing from threads
    with tempfile.TemporaryDirectory() as folder:
        tiny_model(Path(folder))
        config = EngineConfig(kv_dtype=args.kv_dtype, block_size=16, num_blocks=args.num_blocks, prefill_chunk=64)
        if args.disk is not None:
            config = replace(config, prefix_cache_dir=f"{folder}/cache", prefix_cache_size=args.disk)
        load = Load(LLM(folder, config), args.seed)
        curve = soak(load, args.minutes)
        load.finish()
        load.llm.close()
        if (disk := load.llm.stats().disk) is not None:
            print(f"disk: {disk}")
    growth, words = verdict(curve)
    print(f"all requests ended, every block was given back; {words}")
    if args.json:
        text = json.dumps({"growth": growth, "verdict": words, "curve": curve}, indent=1) + "\n"
        write_result(args.json, text.encode())
    if growth > GROWTH:
        raise EngineError(words)


if __name__ == "__main__":
    run_main(main)
