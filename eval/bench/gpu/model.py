"""A whole model with random weights, for ``lean.eval.bench_gpu``."""

import statistics
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lean.config import EngineConfig
from lean.eval.bench.peers import Lean
from lean.eval.bench.timing import seconds_of
from lean.model.load import LoadedModel


def step_seconds(model: LoadedModel, config: EngineConfig, batch: int, context: int, steps: int) -> float:
    """Median time of a decode step of ``batch`` sequences behind ``context`` tokens each."""
    engine = Lean(model, config, batch)
    engine.read([i % 250 for i in range(context)])
    engine.step()
    return statistics.median(seconds_of(engine.step) for _ in range(steps))


def random_llama(
    folder: Path,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    vocabulary: int,
    length: int,
    device: torch.device,
) -> None:
    """A bf16 checkpoint with random weights and a tokenizer of one token per byte."""
    alphabet = ["</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=length,
        bos_token_id=0, eos_token_id=0, tie_word_embeddings=True, dtype="bfloat16",
    )  # fmt: skip
    with torch.device(device):
        LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(folder)
