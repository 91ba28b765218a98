"""What a KV format costs on your own text: perplexity, and KL divergence from the exact cache.

    python examples/accuracy.py [MODEL] [--text FILE] [--kv-dtype NAME ...]

MODEL is a folder, a .gguf file, a pulled name or a hub id. Without FILE the text is Python's help topics. Every score
is read through the cache that it judges, with float32 weights: the rounding of bfloat16 would hide small differences.
`lean eval kld` and `lean sweep` report the same figures, and more.
"""

import argparse
from dataclasses import replace

from lean import LLM, EngineConfig
from lean.eval.corpus import load_corpus, load_text
from lean.eval.score.fidelity import compare, full_config, read_reference
from lean.eval.score.perplexity import prepare

parser = argparse.ArgumentParser(description="What a KV format costs on your own text.")
parser.add_argument("model", nargs="?", default="smollm2-135m")
parser.add_argument("--text", help="A UTF-8 file.")
parser.add_argument("--tokens", type=int, default=1024, help="Number of tokens to read, from the beginning.")
parser.add_argument("--dtype", default="float32", help="Of weights and activations.")
parser.add_argument("--kv-dtype", nargs="+", default=["int8", "fp8", "k8v4", "int4"])


def main(args: argparse.Namespace) -> None:
    corpus = load_text(args.text) if args.text else load_corpus("python-docs")
    config = EngineConfig(dtype=args.dtype, max_num_seqs=1, max_model_len=args.tokens + 1)
    exact = LLM(args.model, full_config(config))
    scored = prepare(exact, corpus, max_tokens=args.tokens)
    reference = read_reference(exact, scored)
    for kv_dtype in args.kv_dtype:
        # The engines share one copy of the weights.
        llm = LLM(exact.model, replace(config, kv_dtype=kv_dtype))
        found = compare(reference, llm)
        smaller = llm.plan.bytes_per_token_bf16 / llm.plan.bytes_per_token
        print(f"{kv_dtype:<6} {smaller:.2f}x smaller per token, {found.tokens_scored:,} tokens scored")
        print(f"    perplexity {found.ppl:.4f} (exact cache: {found.ppl_exact:.4f})")
        print(f"    mean KLD {found.kld_mean:.6f} ± {found.kld_stderr:.6f} nats, top-1 agreement {found.top1:.3f}")


if __name__ == "__main__":
    main(parser.parse_args())
