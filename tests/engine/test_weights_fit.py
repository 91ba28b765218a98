"""Weights that do not fit onto a GPU are refused before they are read, with what would fit."""

import pytest
import torch
from engine_state import forbid_reading_weights
from fake_gpus import Card, install
from helpers import refusal
from tiny import tiny_checkpoint
from torch import nn

from lean import LLM, EngineConfig
from lean.model.info import inspect_model
from lean.quant.weights import Quantizable, quantizable
from lean.store.source import resolve

CUDA = torch.device("cuda", 0)
MIB = 2**20


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """A model whose weights are linear layers above all: 20 MiB in float32."""
    wide = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2}
    return str(tiny_checkpoint(tmp_path_factory.mktemp("wide"), "llama", **wide))


@pytest.fixture
def card(monkeypatch, folder):
    """``card(free)``: a GPU with this much memory, onto which nothing is loaded."""

    def have(free: int) -> None:
        install(monkeypatch, Card(total=free))

    forbid_reading_weights(monkeypatch)
    return have


def test_the_bytes_of_quantized_weights_are_known_from_their_shapes():
    decoder = nn.Sequential(nn.Linear(128, 64), nn.Linear(100, 64), nn.Linear(128, 20), nn.Embedding(10, 64))
    found = quantizable(decoder)
    assert found == Quantizable(weights=128 * 64, outputs=64)
    assert found.gpu_bytes("bnb-4bit") == 128 * 64 * 9 // 16  # 4 bits, and 32 bits for 64 weights
    assert found.gpu_bytes("bnb-8bit") == 128 * 64 + 4 * 64


@pytest.mark.parametrize("quantization", ["bnb-4bit", "bnb-8bit"])
def test_they_are_those_that_bitsandbytes_makes(quantization):
    bnb = pytest.importorskip("bitsandbytes")
    weight = torch.randn(64, 128)
    if quantization == "bnb-4bit":
        layer = bnb.nn.Params4bit(weight, False, blocksize=64, compress_statistics=False, quant_type="nf4").to("cpu")
        nbytes = layer.data.nbytes + layer.quant_state.absmax.nbytes
    else:
        layer = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False).to("cpu")
        codes, scales, _ = bnb.functional.int8_vectorwise_quant(weight.half())
        nbytes = codes.nbytes + scales.nbytes
    assert nbytes == Quantizable(64 * 128, 64).gpu_bytes(quantization)


def test_what_fits_is_named_and_fits(folder, card):
    info = inspect_model(resolve(folder), EngineConfig())
    full, four = info.weight_bytes, info.gpu_bytes("bnb-4bit")
    assert four < full // 5
    for free, wanted in ((full // 2 + MIB, True), (full // 3, False)):
        card(free)
        message = refusal(LLM, folder, EngineConfig())
        assert message.startswith("the weights of wide0 take ")
        assert ("--dtype bfloat16, or " in message) == wanted
        assert "--quantization bnb-4bit, or a smaller model" in message
    card(four - 1)
    assert "--" not in refusal(LLM, folder, EngineConfig())
    card(full // 2)
    assert "bnb-4bit" not in refusal(LLM, folder, EngineConfig(deterministic=True))


def test_quantized_weights_count_with_the_bytes_they_will_have(folder, card):
    info = inspect_model(resolve(folder), EngineConfig())
    card(info.gpu_bytes("bnb-8bit") - 1)
    assert "--" not in refusal(LLM, folder, EngineConfig(quantization="bnb-8bit"))
    enough = info.gpu_bytes("bnb-8bit") + 4 * MIB
    assert enough < info.weight_bytes
    card(enough)
    with pytest.raises(pytest.fail.Exception, match="the weights were read"):
        LLM(folder, EngineConfig(quantization="bnb-8bit", max_num_seqs=1, max_model_len=64))


def test_the_cache_must_fit_beside_the_weights_that_come(folder, card):
    info = inspect_model(resolve(folder), EngineConfig())
    card(info.weight_bytes + 2 * MIB)
    message = refusal(LLM, folder, EngineConfig(kv_memory=3 * MIB))
    assert "kv-memory 3.0 MiB exceeds the 2.0 MiB of free memory" in message
