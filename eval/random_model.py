"""A model with random weights, saved as a checkpoint: for benchmarks and load tests that need no download.

``python -m lean.eval.random_model FOLDER '{"model_type": "llama", "hidden_size": 256}'``
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast


def save_random_model(
    folder: Path,
    model_type: str = "llama",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    **config: Any,
) -> None:
    """Write the model and a tokenizer of one token per byte. ``config``: fields of its type; vocab_size >= 257."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(folder)
    fields = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None, **config}
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **fields))
    model.to(dtype).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lean.eval.random_model", description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="folder to write, e.g. random-mla")
    parser.add_argument("config", type=json.loads, help="fields of config.json as a JSON object, model_type among them")
    parser.add_argument("--dtype", default="float32", help="dtype of the weights, e.g. bfloat16")
    options = parser.parse_args()
    save_random_model(options.folder, dtype=getattr(torch, options.dtype), **options.config)


if __name__ == "__main__":
    main()
