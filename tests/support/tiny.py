"""Tiny checkpoints with random weights and a byte-level tokenizer: one token is one byte."""

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

KINDS = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "mixtral", "gpt_oss")
VOCAB_SIZE = 264  # 3 special tokens, 256 bytes, and 5 rows that belong to no token
BOS, EOS = 1, 2
WINDOW = 32

_BASE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}
_SLIDING = {"head_dim": 16, "sliding_window": WINDOW}
_EXTRA = {
    "qwen3": {"head_dim": 32},
    "mistral": {"sliding_window": WINDOW},
    "gemma2": {**_SLIDING, "query_pre_attn_scalar": 16},
    "gemma3": {**_SLIDING, "query_pre_attn_scalar": 16, "num_hidden_layers": 6},  # the sixth layer is the global one
    "gpt_oss": {**_SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2},
}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Ids 0 <pad>, 1 <s>, 2 </s>, then the bytes; an emoji is four tokens. Adds no BOS."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ("<pad>", "<s>", "</s>")
    vocab = {token: index for index, token in enumerate((*special, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def tiny_checkpoint(folder: Path, kind: str, **config: object) -> Path:
    """Write a checkpoint of ``kind`` into ``folder`` and return it; ``config`` overrides fields of its configuration.

    Biases, norm weights and sink logits are drawn too, and q/k are enlarged: transformers initialises them to 0 and 1,
    which hides dropped ones, and attention near uniform hides nearly everything.
    """
    name = {"gemma3": "gemma3_text"}.get(kind, kind)
    fields = {**_BASE, **_EXTRA.get(kind, {}), **config}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **fields), dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias") or "norm" in name or "sinks" in name:
                    parameter.add_(torch.randn_like(parameter) * 0.5)
                elif any(part in name for part in ("q_proj.weight", "k_proj.weight", "qkv_proj.weight")):
                    parameter.mul_(8)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def tokens(count: int, seed: int = 0) -> list[int]:
    """Random bytes as token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 259, (count,), generator=generator).tolist()
