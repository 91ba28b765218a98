"""How faithful a cache is: KL divergence and agreement against another engine on the same tokens."""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from lean.cache_groups import plan_cache
from lean.config import DEFAULT_MODEL, EngineConfig
from lean.engine import LLM
from lean.errors import run_main
from lean.eval.corpus import python_docs, text_hash
from lean.quant.formats import BF16
from lean.runner import LOGIT_SLICE


@dataclass(frozen=True)
class Fidelity:
    """Per token: natural-log KL(reference || candidate); over all tokens: agreement of the likeliest token.

    ``perplexity`` is the candidate's, over tokens 1 .. n - 1.
    """

    num_tokens: int
    perplexity: float
    mean_kld: float
    stderr_kld: float
    median_kld: float
    p999_kld: float
    top1: float


def _slices(llm: LLM, token_ids: Sequence[int]) -> Iterator[torch.Tensor]:
    """Last hidden states in slices of LOGIT_SLICE rows, whatever chunks the engine runs; the last may be shorter."""
    held = None
    for _, rows in llm.hidden_states(token_ids):
        held = rows if held is None else torch.cat((held, rows))
        while held.shape[0] >= LOGIT_SLICE:
            yield held[:LOGIT_SLICE]
            held = held[LOGIT_SLICE:]
    if held is not None and held.shape[0]:
        yield held


@torch.inference_mode()
def compare(reference: LLM, candidate: LLM, token_ids: Sequence[int]) -> Fidelity:
    """Score the same tokens through both engines side by side; logits exist for LOGIT_SLICE rows at once."""
    targets = torch.tensor(list(token_ids))
    klds, agreed, scores = [], [], []
    position = 0
    for ref_rows, rows in zip(_slices(reference, token_ids), _slices(candidate, token_ids), strict=True):
        p = reference.logits(ref_rows).log_softmax(-1)
        q = candidate.logits(rows).log_softmax(-1)
        klds.append((p.exp() * (p - q)).sum(-1).cpu())
        agreed.append((p.argmax(-1) == q.argmax(-1)).cpu())
        wanted = targets[position + 1 : position + 1 + q.shape[0]].to(q.device)
        scores.append(q[: wanted.shape[0]].gather(1, wanted[:, None])[:, 0].cpu())
        position += q.shape[0]
    kld = torch.cat(klds).double()
    return Fidelity(
        num_tokens=kld.numel(),
        perplexity=float(torch.cat(scores).double().mean().neg().exp()),
        mean_kld=float(kld.mean()),
        stderr_kld=float(kld.std() / kld.numel() ** 0.5),
        median_kld=float(kld.median()),
        p999_kld=float(kld.quantile(0.999)),
        top1=float(torch.cat(agreed).double().mean()),
    )


ROWS = ("int8:0", "fp8:0", "k8v4:0", "int4:0", "int8", "fp8", "k8v4", "int4")
FLOOR_CHUNK = 128


def main() -> None:
    """Print the fidelity of cache formats against the exact cache, for one model and Python's help topics."""
    parser = argparse.ArgumentParser(prog="python -m lean.eval.fidelity", description=main.__doc__)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--dtype", default="float32", help="of weights and activations (default: %(default)s)")
    parser.add_argument(
        "--formats", nargs="+", default=ROWS, metavar="FORMAT[:R]", help="kv-dtype[:residual] (default: %(default)s)"
    )
    args = parser.parse_args()
    exact = EngineConfig(kv_dtype="auto", dtype=args.dtype, max_num_seqs=1)
    reference = LLM(args.model, exact, progress=True)
    text = python_docs()
    ids = reference.model.tokenizer(text[: args.tokens * 8], add_special_tokens=False)["input_ids"][: args.tokens]
    count = len(ids)
    print(f"{args.model}, {args.dtype}, {count} tokens of python-docs (sha256 {text_hash(text)[:16]}), no BOS added,")
    print(f"chunk {exact.prefill_chunk}; sizes against bf16: per token, and with blocks and residual at {count} tokens")
    print(f"{'format':11} {'R':>3} {'token':>6} {'held':>6} {'ppl':>8} {'mean KLD':>20} {'p99.9':>8} {'top-1':>6}")

    def row(name: str, config: EngineConfig) -> None:
        engine = LLM(reference.model, config)
        result = compare(reference, engine, ids)
        # Exact copies are stored in the model's dtype; sizes are told for a bf16 model.
        plan = plan_cache(reference.model.info.layers, config, BF16)
        token = plan.bytes_per_token_bf16 / plan.bytes_per_token
        held = plan.bytes_at_bf16(count) / plan.bytes_at(count)
        print(
            f"{name:11} {plan.residual_length:3} {token:5.2f}x {held:5.2f}x {result.perplexity:8.3f} "
            f"{result.mean_kld:10.6f} ±{result.stderr_kld:.6f} {result.p999_kld:8.4f} {result.top1:6.3f}",
            flush=True,
        )

    # The floor: the exact cache at another chunk, which differs by rounding alone.
    row(f"exact/{FLOOR_CHUNK}", replace(exact, dtype="auto", prefill_chunk=FLOOR_CHUNK))
    for spec in args.formats:
        kv_dtype, _, residual = spec.partition(":")
        row(kv_dtype, EngineConfig(kv_dtype, kv_residual_length=int(residual) if residual else None, max_num_seqs=1))


if __name__ == "__main__":
    run_main(main)
