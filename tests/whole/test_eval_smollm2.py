"""Perplexity of the demo model by ``lean eval ppl`` and by a loop over transformers' own model, in float32."""

import json
import math

import pytest
import torch
import transformers
from commands import lean

from lean.eval.corpus import python_docs
from lean.store.pull import pull

pytestmark = pytest.mark.slow
TOKENS, CONTEXT = 1500, 512


@pytest.fixture(autouse=True)
def _two_threads(_one_thread):
    torch.set_num_threads(2)


@pytest.fixture(scope="module")
def folder():
    return pull("smollm2-135m")


@pytest.fixture(scope="module")
def peer(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("stride", [CONTEXT, CONTEXT // 2])
def test_perplexity_is_that_of_a_strided_loop_over_transformers(folder, peer, stride):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(python_docs()[: 8 * TOKENS])["input_ids"][:TOKENS]
    total, done = 0.0, 0
    for begin in range(0, len(ids), stride):
        end = min(begin + CONTEXT, len(ids))
        first = max(0, min(begin, done - 1))  # the token before, where a window would begin with a scored one
        with torch.no_grad():
            logprobs = peer(torch.tensor([ids[first:end]])).logits[0].log_softmax(-1)
        for target in range(max(1, done), end):
            total -= float(logprobs[target - 1 - first, ids[target]])
        done = end
        if end == len(ids):
            break
    args = ("--context", str(CONTEXT), "--stride", str(stride), "--max-tokens", str(TOKENS), "--bos", "none")
    exact = ("--kv-dtype", "fp32", "--dtype", "float32", "--json")
    report = json.loads(lean("eval", "ppl", str(folder), *args, *exact))
    wanted = math.exp(total / (len(ids) - 1))
    print(f"stride {stride}: lean {report['token_ppl']:.6f}, transformers {wanted:.6f}")
    assert report["tokens_scored"] == len(ids) - 1
    assert report["token_ppl"] == pytest.approx(wanted, abs=1e-4 * wanted)
