"""The dtype that `auto` stands for: the checkpoint's, unless the GPU has no tensor cores for it."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from fake_gpus import Card, install

from lean import LLM, EngineConfig
from lean.engine import assemble
from lean.model.dtype import choose_dtype, stored_dtype
from lean.model.info import inspect_model
from lean.store.source import resolve

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
TURING, AMPERE = Card("NVIDIA GeForce RTX 2060", 7, 5), Card("NVIDIA GeForce RTX 3060", 8, 6)


def chosen(card: Card | None, name: str, model_type: str = "llama", stored: str = "bfloat16"):
    config = SimpleNamespace(model_type=model_type, dtype=getattr(torch, stored))
    dtype, notes = choose_dtype(name, config, {}, CPU if card is None else CUDA)
    return str(dtype).removeprefix("torch."), " ".join(notes)


@pytest.fixture(params=[TURING, AMPERE], ids=lambda card: card.name)
def card(request, monkeypatch):
    install(monkeypatch, request.param)
    return request.param


def test_bfloat16_becomes_float16_where_it_has_no_tensor_cores(card):
    dtype, note = chosen(card, "auto")
    if card is AMPERE:
        assert (dtype, note) == ("bfloat16", "")
    else:
        assert dtype == "float16"
        assert note.startswith("NVIDIA GeForce RTX 2060 has no tensor cores for bfloat16: the model runs in float16")
        assert "--dtype bfloat16" in note


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text", "glm4"])
def test_models_that_overflow_float16_get_float32_there(card, model_type):
    dtype, note = chosen(card, "auto", model_type)
    if card is AMPERE:
        assert (dtype, note) == ("bfloat16", "")
    else:
        assert (dtype, "twice the bytes" in note) == ("float32", True)


def test_what_is_asked_for_stays_with_a_note(card):
    dtype, note = chosen(card, "bfloat16")
    assert (dtype, "slow; --dtype float16" in note) == ("bfloat16", card is TURING)
    dtype, note = chosen(card, "bfloat16", "gemma2")
    assert (dtype, note.endswith(": slow")) == ("bfloat16", card is TURING)
    assert chosen(card, "float16") == ("float16", "")
    assert chosen(card, "float32", "gemma2") == ("float32", "")


@pytest.mark.parametrize("name", ["float16", "auto"])
def test_float16_for_a_model_that_overflows_it_is_noted_everywhere(name):
    dtype, note = chosen(None, name, "gemma2", stored="float16")
    assert dtype == "float16"
    assert note == "the activations of gemma2 can overflow float16: --dtype bfloat16 or float32 is safe"


def test_checkpoints_in_other_dtypes_and_amd_gpus_stay_as_they_are(monkeypatch):
    install(monkeypatch, TURING)
    assert chosen(TURING, "auto", stored="float32") == ("float32", "")
    install(monkeypatch, Card("AMD Radeon RX 6700 XT", 7, 0, gcnArchName="gfx1031"), hip="7.1")
    assert chosen(TURING, "auto") == ("bfloat16", "")


def test_without_a_dtype_in_the_configuration_the_tensors_decide():
    config = SimpleNamespace(dtype=None)
    assert stored_dtype(config, {"a": {"dtype": "F16"}, "b": {"dtype": "F32"}}) is torch.float32
    assert stored_dtype(config, {}) is torch.bfloat16


def test_a_checkpoint_in_bfloat16_is_loaded_in_float16_on_such_a_gpu(monkeypatch, tiny, tmp_path):
    folder = shutil.copytree(tiny("llama"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | {"dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    install(monkeypatch, TURING)
    source = resolve(str(folder))
    assert inspect_model(source, EngineConfig()).dtype is torch.bfloat16
    info = inspect_model(source, EngineConfig(), CUDA)
    assert info.dtype is torch.float16
    assert any("float16" in note for note in info.notes)


def test_the_engine_asks_for_its_own_device(monkeypatch, tiny):
    folder, asked = str(tiny("llama")), []
    install(monkeypatch, TURING)
    monkeypatch.setattr(assemble, "inspect_model", lambda source, config, device: asked.append(device) or {}["stop"])
    with pytest.raises(KeyError, match="stop"):
        LLM(folder, EngineConfig())
    assert asked == [CUDA]
