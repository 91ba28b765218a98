"""Generate text without end: a window and attention sinks keep the memory of the cache constant.

    python examples/endless.py [MODEL] [--tokens N]

MODEL is a folder, a .gguf file, a pulled name or a hub id. Every token attends to the last WINDOW tokens and to the
first four. The script stops after N tokens; without that limit it could go on for ever.
"""

import argparse

from lean import LLM, EngineConfig, SamplingParams

BLOCK_SIZE = 32  # the cache grows and shrinks by blocks: counted at multiples of it, its size can be compared
EVERY = 4 * BLOCK_SIZE

parser = argparse.ArgumentParser(description="Generate text without end in constant memory.")
parser.add_argument("model", nargs="?", default="smollm2-135m")
parser.add_argument("--tokens", type=int, default=2048, help="Number of tokens to generate.")
parser.add_argument("--window", type=int, default=256, help="Number of last tokens that stay visible.")
parser.add_argument("--prompt", default="Once upon a time")


def main(args: argparse.Namespace) -> None:
    config = EngineConfig(kv_dtype="int8", window=args.window, sinks=4, block_size=BLOCK_SIZE, max_num_seqs=1)
    llm = LLM(args.model, config)
    params = SamplingParams(max_tokens=args.tokens, temperature=1.0, seed=0, ignore_eos=True)
    generated = 0
    for output in llm.stream(args.prompt, params, chat=False):
        generated += len(output.token_ids)
        if generated % EVERY == 0 and output.finish_reason is None:
            print(f"{generated:>9,} tokens generated: the cache holds {llm.stats().bytes_held:,} bytes", flush=True)
    print(f"{generated:>9,} tokens generated: the cache never held more than {llm.peak_use.bytes_held:,} bytes")


if __name__ == "__main__":
    main(parser.parse_args())
