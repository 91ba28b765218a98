"""Quantized checkpoints that lean does not read are refused by name, before their weights are read."""

import pytest
import torch
from commands import refused
from helpers import refusal
from quantized_checkpoints import change_config, change_tensors, settings

from lean import EngineConfig
from lean.model import packing
from lean.model.info import inspect_model
from lean.model.load import load_model
from lean.store.prequantized import matrix
from lean.store.source import resolve

Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.fixture(autouse=True)
def never_slow(monkeypatch):
    monkeypatch.setattr(packing, "is_slow", lambda *_: False)


def read(folder):
    return load_model(inspect_model(resolve(str(folder)), EngineConfig()), torch.device("cpu"))


def changed(form, **changes):
    return settings(form, 32) | changes


def weights_of(**changes):
    found = settings("packed", 32)
    found["config_groups"]["group_0"]["weights"] |= changes
    return found


def group_of(form="packed", **changes):
    found = settings(form, 32)
    found["config_groups"]["group_0"] |= changes
    return found


TOKENWISE = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
REFUSED = {
    "gptq 8 bits": ("gptq", changed("gptq", bits=8), "gptq with 8 bits; lean reads 4 bits"),
    "gptq 3 bits": ("gptq", changed("gptq", bits=3), "3 bits"),
    "gptq marlin": ("gptq", changed("gptq", checkpoint_format="marlin"), "format 'marlin'"),
    "gptq group": ("gptq", changed("gptq", group_size=48), "groups of 48"),
    "gptq other group": ("gptq", changed("gptq", group_size=64), "groups of 32, which quantization_config does not"),
    "gptq words": ("gptq", changed("gptq", pack_dtype="int16"), "pack_dtype"),
    "gptq type": ("gptq", changed("gptq", bits="four"), "bits 'four': it must be a whole number"),
    "awq gemv": ("awq", changed("awq", version="gemv"), "version 'gemv'"),
    "awq 3 bits": ("awq", changed("awq", bits=3), "3 bits"),
    "awq no zeros": ("awq", changed("awq", zero_point=False), "zero_point false"),
    "awq llm-awq": ("awq", changed("awq", backend="llm-awq"), "version 'llm-awq'"),
    "fp8": ("packed", weights_of(type="float", num_bits=8), "'float' codes of 8 bits"),
    "nvfp4": ("packed", changed("packed", format="nvfp4-pack-quantized"), "format 'nvfp4-pack-quantized'"),
    "marlin 24": ("packed", changed("packed", format="marlin-24"), "format 'marlin-24'"),
    "sparse": ("packed", changed("packed", sparsity_config={"format": "sparse-24-bitmask"}), "sparse weights"),
    "rotated": ("packed", changed("packed", transform_config={"config_groups": {"a": 1}}), "rotated weights"),
    "cache": ("packed", changed("packed", kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
    "activations": ("packed", group_of(input_activations="fp8"), "quantized activations (input_activations)"),
    "W8A8": (
        "int8",
        group_of("int8", input_activations=TOKENWISE),
        "activations (W8A8, input_activations); lean reads",
    ),
    "act-order": ("packed", weights_of(actorder="group"), "act-order (actorder 'group')"),
    "tensor": ("packed", weights_of(strategy="tensor"), "strategy 'tensor'"),
    "6 bits": ("packed", weights_of(num_bits=6), "6 bits"),
    "8 in groups": ("packed", weights_of(num_bits=8), "8 bits and groups of 32"),
    "preset": ("packed", changed("packed", config_groups={"W4A16": ["Linear"]}), "preset 'W4A16'"),
    "no groups": ("packed", changed("packed", config_groups=None), "it must be an object with groups"),
    "unknown": ("gptq", {"quant_method": "exl3"}, "exl3, which transformers"),
    "nameless": ("gptq", {"bits": 4}, "a method without a name"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_formats_are_refused_by_name_before_weights_are_read(copy, monkeypatch, case):
    form, found, words = REFUSED[case]
    folder = copy(form)
    change_config(folder, quantization_config=found)
    monkeypatch.setattr(matrix.QuantizedMatrix, "filled", lambda *_: pytest.fail("weights were read"))
    for quantization in (None, "auto", "none"):
        message = refusal(inspect_model, resolve(str(folder)), EngineConfig(quantization=quantization))
        assert words in message


@pytest.mark.parametrize("desc_act", [False, True])
def test_act_order_is_seen_in_the_order_itself(copy, desc_act):
    """Settings alone do not tell: desc_act with groups of neighbours is no other order."""
    folder = copy("gptq")
    change_config(folder, quantization_config=changed("gptq", desc_act=desc_act))
    assert read(folder).weights.formats == (("int4", 14),)
    change_tensors(folder, lambda tensors: tensors[f"{Q_PROJ}.g_idx"].copy_(torch.arange(128).flip(0) // 32))
    assert f"act-order ({Q_PROJ}.g_idx)" in refusal(read, folder)
    change_tensors(folder, lambda tensors: tensors.pop(f"{Q_PROJ}.g_idx"))
    if desc_act:
        assert "act-order (desc_act), and without" in refusal(read, folder)
    else:
        assert read(folder).weights.formats == (("int4", 14),)


def shorter(name):
    return lambda tensors: tensors.update({name: tensors[name][:-1]})


def as_floats(name):
    return lambda tensors: tensors.update({name: tensors[name].float()})


BROKEN = {
    "no scales": ("gptq", lambda t: t.pop(f"{Q_PROJ}.scales"), f"{Q_PROJ}.scales is missing"),
    "no codes": ("gptq", lambda t: t.pop(f"{Q_PROJ}.qweight"), f"{Q_PROJ}.qweight is missing"),
    "no zeros": ("gptq", lambda t: t.pop(f"{Q_PROJ}.qzeros"), f"{Q_PROJ}.qzeros is missing"),
    "no zero points": (
        "packed_asym",
        lambda t: t.pop(f"{Q_PROJ}.weight_zero_point"),
        f"{Q_PROJ}.weight_zero_point is missing",
    ),
    "no packed scales": ("packed", lambda t: t.pop(f"{Q_PROJ}.weight_scale"), f"{Q_PROJ}.weight_scale is missing"),
    "no bytes": ("int8", lambda t: t.pop(f"{Q_PROJ}.weight"), f"{Q_PROJ}.weight"),
    "short codes": ("gptq", shorter(f"{Q_PROJ}.qweight"), "has shape [15, 128] and dtype I32, which does not fit"),
    "short scales": ("gptq", shorter(f"{Q_PROJ}.scales"), "has shape [3, 128] and dtype F16, which does not fit"),
    "short zeros": ("awq", shorter(f"{Q_PROJ}.qzeros"), "has shape [3, 16] and dtype I32, which does not fit"),
    "short bytes": ("int8", shorter(f"{Q_PROJ}.weight"), "has shape [127, 128] and dtype I8, which does not fit"),
    "short order": ("gptq", shorter(f"{Q_PROJ}.g_idx"), "has shape [127]"),
    "codes of floats": ("packed", as_floats(f"{Q_PROJ}.weight_packed"), "dtype F32, which does not fit"),
    "no layer": ("gptq", lambda t: [t.pop(k) for k in [*t] if k.startswith(f"{Q_PROJ}.")], "tensors missing"),
    "no codes at all": ("gptq", lambda t: [t.pop(k) for k in [*t] if "_proj." in k], "no tensor ends in qweight"),
    "unknown layer": (
        "gptq",
        lambda t: t.update(
            {f"model.layers.9.x.{p}": t[f"{Q_PROJ}.{p}"].clone() for p in ("qweight", "scales", "qzeros")}
        ),
        "has no place",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_files_that_are_damaged_are_refused_in_one_line(copy, case):
    form, change, words = BROKEN[case]
    folder = copy(form)
    change_tensors(folder, change)
    assert words in refusal(read, folder)


def test_the_command_line_refuses_them_with_exit_code_2(copy):
    folder = copy("gptq")
    change_config(folder, quantization_config=changed("gptq", bits=8))
    assert "8 bits" in refused("run", str(folder), "a prompt")
