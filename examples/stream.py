"""Stream an answer, token by token, from a quantized KV cache.

    python examples/stream.py [MODEL] [--prompt TEXT]

MODEL is a folder, a .gguf file, a pulled name or a hub id. Its chat template is used where it has one.
"""

import argparse

from lean import LLM, EngineConfig, SamplingParams

parser = argparse.ArgumentParser(description="Stream an answer from a quantized KV cache.")
parser.add_argument("model", nargs="?", default="smollm2-135m")
parser.add_argument("--prompt", default="Explain in two sentences why the sky is blue.")
parser.add_argument("--max-tokens", type=int, default=100)


def main(args: argparse.Namespace) -> None:
    # Keys in int8, values in int4; the last 64 tokens and the first 4 stay exact. One sequence, so a small cache.
    llm = LLM(args.model, EngineConfig(kv_dtype="k8v4", max_num_seqs=1))
    size, bf16 = llm.plan.bytes_per_token, llm.plan.bytes_per_token_bf16
    print(f"KV cache: {size:,} bytes per token, {bf16 / size:.2f}x smaller than bf16")

    tokens = 0
    for output in llm.stream(args.prompt, SamplingParams(max_tokens=args.max_tokens)):
        print(output.text, end="", flush=True)
        tokens += len(output.token_ids)
    print(f"\n{output.prompt_tokens} prompt + {tokens} new tokens ({output.finish_reason})")


if __name__ == "__main__":
    main(parser.parse_args())
