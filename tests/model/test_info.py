"""What is read of a model before its weights, and who asks for it."""

import json
import shutil

import pytest
from commands import refused
from helpers import refusal

from lean import EngineConfig
from lean.eval.corpus import Corpus
from lean.eval.sweep.grid import Grid
from lean.eval.sweep.run import run_sweep
from lean.model.info import inspect_model
from lean.store.source import resolve

BNB = EngineConfig(quantization="bnb-4bit")


@pytest.fixture(scope="module")
def quantized(tiny, tmp_path_factory):
    """A checkpoint whose weights are quantized: readable, but not to be quantized once more."""
    folder = shutil.copytree(tiny("llama", num_hidden_layers=2), tmp_path_factory.mktemp("quantized") / "model")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "torchao"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_the_options_of_the_engine_are_part_of_what_is_known(tiny):
    source = resolve(str(tiny("llama", num_hidden_layers=2)))
    info = inspect_model(source, EngineConfig(dtype="bfloat16", quantization="bnb-4bit", trust_remote_code=True))
    assert (str(info.dtype), info.quantization, info.trust_remote_code) == ("torch.bfloat16", "bnb-4bit", True)


def test_a_sweep_refuses_weights_that_cannot_be_quantized_before_it_makes_its_folder(quantized, tmp_path):
    corpus, out = Corpus("letters", "A short text.", "made here"), tmp_path / "out"
    message = refusal(run_sweep, resolve(str(quantized)), BNB, Grid(("int8",), (None,), (0,)), corpus, out, None)
    assert "quantized already" in message
    assert not out.exists()


def test_eval_kld_refuses_weights_that_cannot_be_quantized_before_it_looks_at_the_context(quantized, tmp_path):
    (tmp_path / "text.txt").write_text("A short text.")
    command = ("eval", "kld", str(quantized), "--text", str(tmp_path / "text.txt"), "--context", "1000000000")
    assert "--context 1000000000" in refused(*command).replace(",", "")
    assert "quantized already" in refused(*command, "--quantization", "bnb-4bit")
