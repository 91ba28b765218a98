"""The tokenizer of a checkpoint folder is that of its files, whatever class of transformers reads them."""

import json
import shutil

import pytest
from helpers import refusal
from tokenizers import Tokenizer

from lean import LLM, EngineConfig
from lean.model.load import load_tokenizer
from lean.store.source import resolve

TEXTS = ("year 1234 and 567", "Hello  world\n\n  x", "don't é 日本 🙂", "a<s>b</s> c")


@pytest.fixture
def folder(tiny, tmp_path):
    """A tokenizer that cuts off each digit, and has a merge of two digits that then never applies."""
    folder = shutil.copytree(tiny("llama", num_hidden_layers=1), tmp_path / "copy")
    saved = json.loads((folder / "tokenizer.json").read_text())
    saved["model"]["merges"] = [["1", "2"]]
    saved["model"]["vocab"]["12"] = len(saved["model"]["vocab"])
    digits = {"type": "Digits", "individual_digits": True}
    saved["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, saved["pre_tokenizer"]]}
    (folder / "tokenizer.json").write_text(json.dumps(saved))
    return folder


def name_class(folder, name):
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": name}))


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "GemmaTokenizer", "LlamaTokenizer", "PreTrainedTokenizerFast"])
def test_tokenizer_json_is_followed_whatever_class_is_named(folder, name):
    name_class(folder, name)
    expected = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer, end = load_tokenizer(resolve(str(folder)))
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ids == expected.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids) == text
    assert (tokenizer.bos_token, end) == ("<s>", 2)


def test_a_class_that_cuts_text_otherwise_is_named_in_a_warning(folder, caplog):
    load_tokenizer(resolve(str(folder)))
    assert caplog.text == ""
    name_class(folder, "GemmaTokenizer")
    load_tokenizer(resolve(str(folder)))
    assert "'GemmaTokenizer', the class" in caplog.text
    assert len(caplog.records) == 1


@pytest.mark.parametrize("name", ["LlamaTokenizer", "Qwen2Tokenizer", "GemmaTokenizer", "BertTokenizer", "NoSuch", ""])
def test_without_files_of_a_vocabulary_a_folder_is_refused(folder, name):
    """transformers would make a tokenizer of a few control tokens."""
    name_class(folder, name or "PreTrainedTokenizerFast")
    (folder / "tokenizer.json").unlink()
    if not name:
        (folder / "tokenizer_config.json").unlink()
    assert "tokenizer.json is missing" in refusal(LLM, str(folder), EngineConfig())


def test_a_vocabulary_without_its_merges_is_refused(folder):
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "tokenizer.json").unlink()
    name_class(folder, "GPT2Tokenizer")
    assert "vocab.json needs merges.txt" in refusal(LLM, str(folder), EngineConfig())
