"""The needle test without a model: tokenizers, and a stand-in for an engine that answers by searching the prompt.

Random weights find nothing. The stand-in searches all tokens of a prompt, or only the last few.
"""

import hashlib
import json
import re
from types import SimpleNamespace

from tiny import byte_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from lean.engine.request import RequestOutput
from lean.eval.corpus import python_docs
from lean.eval.score.needle import run_needle

CHATML = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
' }}{% endfor %}{{ '<|im_start|>assistant
' }}"""
TEXT = python_docs()
ASKED = re.compile(r"The access code for the (\w+ \w+) is$")


def merging_tokenizer():
    """Several characters per token, as in real models."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT[:60_000]], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


TOKENIZERS = {"bytes": byte_tokenizer, "merges": merging_tokenizer}


def make_tokenizer(name, chat):
    """A tokenizer by its name in TOKENIZERS, with a chat template if asked for."""
    tokenizer = TOKENIZERS[name]()
    tokenizer.name_or_path = name
    if chat:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
        tokenizer.chat_template = CHATML
    return tokenizer


class Searcher:
    """Stands in for an engine: searches the last ``sees`` tokens of a prompt for the words at the prompt's end."""

    def __init__(self, tokenizer, sees=None, max_model_len=100_000):
        self.model = SimpleNamespace(tokenizer=tokenizer)
        self.size = SimpleNamespace(max_model_len=max_model_len)
        self.sees = sees
        self.prompts = []  # token ids, in order
        self.together = []  # number of prompts in each call

    def texts(self):
        return [self.model.tokenizer.decode(ids) for ids in self.prompts]

    def generate(self, prompts, params):
        assert params.temperature == 0
        assert params.repetition_penalty == 1
        self.prompts += prompts
        self.together.append(len(prompts))
        return [self.answer(ids) for ids in prompts]

    def answer(self, ids):
        text = self.model.tokenizer.decode(ids[-self.sees :] if self.sees else ids)
        found = re.search(rf"{ASKED.search(text)[0]} (\d+)\.", text)
        return RequestOutput(0, f" {found[1]}." if found else " not known", [], len(ids), "length")


def run(engine, lengths=(700,), depths=(50,), text=TEXT, **options):
    return list(run_needle(engine, text, lengths, depths, **options))


def share(cells):
    return [cell.accuracy for cell in cells]


def digest(engine):
    return hashlib.sha256(json.dumps(engine.prompts).encode()).hexdigest()
