"""Complete several prompts together and print the log-probability of every token.

    python examples/batch.py [MODEL]

MODEL is a folder, a .gguf file, a pulled name or a hub id. Prompts run together, and each gets its own output.
"""

import argparse
import math

from lean import LLM, EngineConfig, SamplingParams

PROMPTS = ["The capital of France is", "Water boils at", "One, two, three,"]

parser = argparse.ArgumentParser(description="Complete prompts together, with log-probabilities.")
parser.add_argument("model", nargs="?", default="smollm2-135m")
parser.add_argument("--max-tokens", type=int, default=6)
parser.add_argument("--logprobs", type=int, default=3, help="Most likely alternatives to show for each token.")


def main(args: argparse.Namespace) -> None:
    llm = LLM(args.model, EngineConfig(max_num_seqs=len(PROMPTS)))
    params = SamplingParams(max_tokens=args.max_tokens, temperature=0.0, logprobs=args.logprobs)
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, params, chat=False)):
        print(f"{prompt!r} -> {output.text!r} ({output.finish_reason})")
        for token in output.logprobs or []:
            text = llm.model.tokenizer.decode([token.token_id])
            others = ", ".join(
                f"{llm.model.tokenizer.decode([other])!r} {math.exp(logprob):.3f}" for other, logprob in token.top
            )
            print(f"    {text!r:<12} logprob {token.logprob:7.3f}   most likely: {others}")


if __name__ == "__main__":
    main(parser.parse_args())
