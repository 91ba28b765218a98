"""The whole way of a GGUF file through the engine: lean's own log-probabilities, and what the user sees."""

from collections import Counter

import numpy as np
import pytest
import torch
from gguf_files import write_gguf
from helpers import refusal
from tiny import EOS, byte_tokenizer, tokens
from transformers import AutoModelForCausalLM

from lean import LLM, EngineConfig
from lean.model import info
from lean.model.info import inspect_model
from lean.model.load import load_model
from lean.report import model_report
from lean.store.gguf import file as files
from lean.store.gguf import weights
from lean.store.source import resolve

IDS = tokens(80)
FREQS = np.array([1, 1, 1.5, 2, 4, 8, 8, 8], np.float32)


@pytest.fixture(autouse=True)
def _bytes(monkeypatch):
    monkeypatch.setattr("lean.model.load.load_gguf_tokenizer", lambda file: (byte_tokenizer(), frozenset({EOS})))


def start(path) -> LLM:
    found = inspect_model(resolve(str(path)), EngineConfig(dtype="float32"))
    return LLM(load_model(found, torch.device("cpu")), EngineConfig(kv_dtype="auto", dtype="float32", prefill_chunk=37))


def logprobs(llm: LLM) -> torch.Tensor:
    return llm.logits(torch.cat([rows for _, rows in llm.hidden_states(IDS)])).log_softmax(-1)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt_oss"])
def test_the_engine_gives_the_log_probabilities_of_the_safetensors(tiny, tmp_path, kind):
    folder = tiny(kind)
    file = write_gguf(folder, tmp_path / "tiny.gguf")
    assert torch.equal(logprobs(start(file)), logprobs(start(folder)))


def test_the_engine_divides_the_frequencies_and_says_nothing_of_lengths(tiny, tmp_path):
    folder = tiny("llama")
    llm = start(write_gguf(folder, tmp_path / "tiny.gguf", tensors={"rope_freqs.weight": FREQS}))
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    module.model.rotary_emb.inv_freq.div_(torch.from_numpy(FREQS))
    with torch.no_grad():
        want = module(torch.tensor([IDS])).logits[0].log_softmax(-1)
    assert (logprobs(llm) - want).abs().max() < 1e-4  # lean's angles are float64, transformers' float32
    assert not any("longrope" in note for note in llm.notes)


def test_loading_a_gguf_file_prints_nothing(tiny, tmp_path, capfd):
    file = write_gguf(tiny("llama"), tmp_path / "tiny.gguf", keys={"tokenizer.ggml.bos_token_id": None})
    capfd.readouterr()
    load_model(inspect_model(resolve(str(file)), EngineConfig(dtype="float32")), torch.device("cpu"))
    assert capfd.readouterr() == ("", "")


def test_a_start_reads_the_header_once_and_keeps_none_of_it(tiny, tmp_path, monkeypatch):
    """A vocabulary takes a tenth of a second to read, and tens of MiB of memory."""
    file = write_gguf(tiny("llama"), tmp_path / "tiny.gguf")
    done = Counter()

    def counted(place, name):
        call = getattr(place, name)
        monkeypatch.setattr(place, name, lambda *args: (done.update([name]), call(*args))[1])

    counted(files, "read_gguf_header")
    counted(weights, "plan_weights")
    monkeypatch.setattr(info, "plan_weights", weights.plan_weights)
    llm = start(file)
    assert done == {"read_gguf_header": 1, "plan_weights": 1}
    assert llm.model.info.stored is None
    again = load_model(llm.model.info, torch.device("cpu"))
    assert torch.equal(again.module.lm_head.weight, llm.model.module.lm_head.weight)
    done.clear()
    model_report(str(file))
    assert done == {"read_gguf_header": 1, "plan_weights": 1}


def test_a_file_is_refused_before_weights_are_read(tiny, tmp_path):
    folder = tiny("llama")
    for number, (keys, tensors, word) in enumerate(
        [
            ({".logit_scale": 0.5}, {}, "llama.logit_scale"),
            ({}, {"blk.0.attn_q_norm.weight": FREQS}, "blk.0.attn_q_norm.weight"),
            ({".feed_forward_length": 2**31 - 1}, {}, "blk.0.ffn"),
        ]
    ):
        file = write_gguf(folder, tmp_path / f"{number}.gguf", keys=keys, tensors=tensors)
        assert word in refusal(inspect_model, resolve(str(file)), EngineConfig())


def test_the_report_names_the_architecture_and_the_types_of_the_tensors(tiny, tmp_path):
    assert "gguf" not in model_report(str(tiny("llama")))
    line = model_report(str(write_gguf(tiny("llama"), tmp_path / "tiny.GGUF")))["gguf"]
    assert line == "llama, one file; tensors: 30 F32"
