"""A checkpoint that needs another package names it, and how to install it, in one line and before weights are read."""

import json
import shutil
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest
import torch
from helpers import refusal
from safetensors.torch import load_file, save_file

from lean import LLM, EngineConfig
from lean.model import packages


@pytest.fixture
def checkpoint(tiny, tmp_path):
    """``checkpoint(**changes)``: a copy of a tiny checkpoint whose config.json has these keys."""

    def make(**changes):
        folder = shutil.copytree(tiny("llama", num_hidden_layers=1), tmp_path / "model")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))
        return folder

    return make


@pytest.fixture(autouse=True)
def _nothing_installed(monkeypatch):
    def distribution(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(packages, "distribution", distribution)


METHODS = {
    "awq": "pip install gptqmodel",
    "gptq": "pip install optimum gptqmodel",
    "compressed-tensors": "pip install compressed-tensors",
    "torchao": "pip install torchao",
    "hqq": "pip install hqq",
    "aqlm": "pip install aqlm",
}


@pytest.mark.parametrize("method", METHODS)
def test_weights_that_are_quantized_name_the_package_that_reads_them(method):
    config = SimpleNamespace(quantization_config={"quant_method": method})
    assert refusal(packages.require_for_weights, config, "x").endswith(METHODS[method])


def test_a_package_that_is_there_is_not_asked_for(monkeypatch):
    monkeypatch.setattr(packages, "distribution", lambda name: name)
    packages.require_for_weights(SimpleNamespace(quantization_config={"quant_method": "awq"}), "x")
    packages.require_for_weights(SimpleNamespace(), "x")


def test_quantized_weights_are_refused_before_they_are_read(checkpoint):
    folder = checkpoint(quantization_config={"quant_method": "hqq"})
    assert "quantized with hqq, which needs: pip install hqq" in refusal(LLM, str(folder), EngineConfig())


def test_a_method_that_transformers_does_not_know_is_refused(checkpoint):
    """It would load the weights as if they were exact."""
    folder = checkpoint(quantization_config={"quant_method": "exl3"})
    assert "quantized with exl3, which transformers" in refusal(LLM, str(folder), EngineConfig())


@pytest.mark.parametrize(
    ("name", "content", "wanted"),
    [
        ("tokenizer.model", b"\n\x0e\n\x05<unk>", "pip install sentencepiece protobuf"),
        ("spiece.model", b"\n\x0e\n\x05<unk>", "pip install sentencepiece protobuf"),
        ("tokenizer.model", b"IQ== 0\nIg== 1\n", "pip install tiktoken"),
        ("qwen.tiktoken", b"IQ== 0\nIg== 1\n", "pip install tiktoken"),
    ],
)
def test_a_tokenizer_without_tokenizer_json_names_the_package_that_reads_it(checkpoint, name, content, wanted):
    folder = checkpoint()
    (folder / name).write_bytes(content)
    LLM(str(folder), EngineConfig())  # tokenizer.json is there
    (folder / "tokenizer.json").unlink()
    message = refusal(LLM, str(folder), EngineConfig())
    assert message.endswith(f"{name} needs: {wanted}")


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_codes_of_quantized_weights_are_never_taken_for_the_weights(checkpoint, kind):
    """As when quantization_config was lost from config.json."""
    folder = checkpoint()
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if "proj" in name]:
        if kind == "fp8":
            tensors[name.replace("weight", "weight_scale_inv")] = torch.ones(1)
        tensors[name] = tensors[name].to(torch.int8 if kind == "int8" else torch.float8_e4m3fn)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert "has no quantization_config" in refusal(LLM, str(folder), EngineConfig())
