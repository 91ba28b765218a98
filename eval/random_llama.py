"""A Llama with random weights, saved as a checkpoint: a model for benchmarks and load tests that needs no download."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def save_random_llama(
    folder: Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", **config: Any
) -> None:
    """Write the model and a tokenizer of one token per byte. ``config``: fields of LlamaConfig; vocab_size >= 257."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(folder)
    with torch.device(device):
        model: Any = LlamaForCausalLM(LlamaConfig(**config, bos_token_id=0, eos_token_id=0))
    model.to(dtype).save_pretrained(folder)
