"""Texts to evaluate on match their names; a missing text is an error within seconds."""

import sys
import time

import pytest
from helpers import refusal

from lean.eval.corpus import load_corpus, load_text, text_hash


def test_python_docs_are_this_pythons_topics_in_order():
    from pydoc_data.topics import topics

    corpus = load_corpus("python-docs")
    assert corpus.text == "\n\n".join(topics[name] for name in sorted(topics))
    assert corpus.report()["sha256"] == text_hash(corpus.text) == corpus.sha256


def test_a_file_is_read_as_it_is(tmp_path):
    (tmp_path / "a.txt").write_bytes("é\r\n😀 ".encode())
    corpus = load_text(tmp_path / "a.txt")
    assert corpus.text == "é\r\n😀 "
    assert corpus.name == "a.txt"


def test_a_byte_order_mark_is_not_text(tmp_path):
    (tmp_path / "a.txt").write_text("é and more", encoding="utf-8-sig")
    assert load_text(tmp_path / "a.txt").text == "é and more"


def test_files_without_text_are_refused_in_one_line(tmp_path):
    (tmp_path / "latin").write_bytes(b"caf\xe9 and more")
    (tmp_path / "blank").write_text(" \n")
    assert "not UTF-8" in refusal(load_text, tmp_path / "latin")
    assert "no text" in refusal(load_text, tmp_path / "blank")
    assert "cannot read" in refusal(load_text, tmp_path / "none")
    assert "cannot read" in refusal(load_text, tmp_path)
    assert "python-docs" in refusal(load_corpus, "wiki")


def test_wikitext_offline_fails_within_five_seconds_and_says_what_to_do(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setattr("lean.eval.corpus._HUB", ("127.0.0.1", 9))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    started = time.monotonic()
    message = refusal(load_corpus, "wikitext2")
    assert time.monotonic() - started < 5
    assert "--text FILE" in message


def test_wikitext_without_datasets_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install datasets" in refusal(load_corpus, "wikitext2")
