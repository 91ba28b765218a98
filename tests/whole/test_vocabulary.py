"""Memory for logits stays small, however large the vocabulary."""

import torch
from helpers import one_sequence
from tiny import tokens

from lean import LLM, EngineConfig
from lean.eval.score.fidelity import compare, read_reference

VOCAB = 262_144


class Watched(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the largest tensor that any operation makes."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.nbytes)
        return out


def test_no_tensor_of_scores_outgrows_16_mib_with_262144_tokens(tiny):
    llm = LLM(str(tiny("llama", vocab_size=VOCAB, hidden_size=16, head_dim=16)), EngineConfig(max_num_seqs=1))
    assert llm.model.logit_rows == 16
    ids = tokens(150)
    with Watched() as score:
        llm.score(ids)
    exact = LLM(llm.model, EngineConfig("fp32", max_num_seqs=1))
    reference = read_reference(exact, one_sequence(ids))
    with Watched() as fidelity:
        compare(reference, llm)
    weights = VOCAB * 16 * 4
    assert max(score.largest, fidelity.largest) <= max(16 * VOCAB * 4, weights)


def test_small_vocabularies_keep_their_slices(tiny):
    assert LLM(str(tiny("llama"))).model.logit_rows == 64
