"""Checkpoints that GPTQ, AWQ and compressed-tensors quantized keep their codes, or become exactly what these mean."""

import pytest
import torch
from helpers import refusal
from quantized_checkpoints import FORMS, SHAPE, change_config, change_tensors, write_plain, write_quantized
from tiny import tokens
from torch import nn

from lean import LLM, EngineConfig, SamplingParams
from lean.engine.fingerprint import describe
from lean.model import info as model_info
from lean.model import packing
from lean.model.info import inspect_model
from lean.model.load import load_model
from lean.quant.packed import Int4Linear, Int8Linear
from lean.report import model_report, start_up_line
from lean.store.prequantized import matrix
from lean.store.source import resolve

CPU = torch.device("cpu")
Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.fixture(autouse=True)
def never_slow(monkeypatch):
    monkeypatch.setattr(packing, "is_slow", lambda *_: False)


def read(folder, quantization=None, dtype="auto", deterministic=False):
    config = EngineConfig(quantization=quantization, dtype=dtype, deterministic=deterministic)
    return load_model(inspect_model(resolve(str(folder)), config), CPU, deterministic)


def logits(model):
    llm = LLM(model, EngineConfig(kv_dtype="auto"))
    return llm.logits(torch.cat([rows for _, rows in llm.hidden_states(tokens(60))]))


def weight_of(layer):
    """The weight of a layer as its product with the identity shows it, float64 [out, in]."""
    return layer(torch.eye(layer.in_features).bfloat16()).t().double()


# --- the codes of the files ---


@pytest.mark.parametrize("group", [32, 128, -1])
@pytest.mark.parametrize("form", FORMS)
def test_every_layer_keeps_its_codes(made, form, group):
    """Up to the rounding of scale and zero to bfloat16, and of the weight that the product shows."""
    folder, weights = made(form, group)
    model = read(folder, deterministic=True)
    kind = "int8" if form in ("packed8", "int8") else "int4"
    assert model.weights.formats == ((kind, 14),)
    assert len(weights) == 14
    for path, want in weights.items():
        layer = model.module.get_submodule(path)
        if kind == "int8":
            assert isinstance(layer, Int8Linear)
            slack = want.abs() * 2**-7
        else:
            assert isinstance(layer, Int4Linear)
            assert layer.group == {32: 32, 128: 128, -1: min(256, want.shape[1])}[group]
            scale, zero = layer.scales.double().unbind(-1)
            wide = (8 * scale.abs() + zero.abs()).t().repeat_interleave(layer.group, 1)
            slack = (wide + want.abs()) * 2**-8
        assert ((weight_of(layer) - want).abs() <= slack + 1e-12).all(), path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("form", "group"), [(form, 32) for form in FORMS] + [("gptq", 128), ("awq", -1)])
def test_none_gives_the_exact_numbers_rounded_once(made, form, group, dtype):
    folder, weights = made(form, group)
    model = read(folder, "none", dtype)
    assert model.weights is None
    for path, want in weights.items():
        layer = model.module.get_submodule(path)
        assert type(layer) is nn.Linear
        assert torch.equal(layer.weight, want.to(getattr(torch, dtype))), path


@pytest.mark.parametrize("form", FORMS)
def test_the_model_predicts_as_one_with_the_dequantized_weights(tiny, made, tmp_path, form):
    folder, weights = made(form)
    plain = write_plain(tiny("llama", **SHAPE), tmp_path / "plain", weights)
    exact = logits(read(plain, "none", "float32"))
    assert torch.equal(logits(read(folder, "none", "float32")), exact)
    exact = exact.log_softmax(-1)
    loss = lambda found: float((exact.exp() * (exact - found.log_softmax(-1))).sum(-1).mean())  # noqa: E731
    # Rounding scales to bfloat16 loses about as much as rounding weights to it.
    assert loss(logits(read(folder))) < 10 * loss(logits(read(plain, "none", "bfloat16"))) + 2e-3


@pytest.mark.parametrize("kind", ["qwen2", "phi3"])
def test_biases_and_fused_layers_are_read_as_they_are(tiny, tmp_path, kind):
    folder, target = tiny(kind, num_hidden_layers=2), tmp_path / "q"
    weights = write_quantized(folder, target, "gptq")
    plain = write_plain(folder, tmp_path / "plain", weights)
    assert torch.equal(logits(read(target, "none", "float32")), logits(read(plain, "none", "float32")))
    assert read(target).weights.formats == (("int4", len(weights)),)


def test_layers_that_the_module_keeps_transposed_are_refused(tiny, tmp_path):
    name = "transformer.h.0.attn.c_proj"
    write_quantized(
        tiny("gpt2", n_positions=512, num_hidden_layers=2), tmp_path / "q", "gptq", also=(f"{name}.weight",)
    )
    assert f"gptq quantized layer {name}, for which lean has no place" in refusal(read, tmp_path / "q")


# --- what a user sees ---


def test_no_flag_is_needed_and_the_start_up_line_says_what_was_packed(made):
    folder, _ = made("awq")
    llm = LLM(str(folder))
    assert llm.model.info.dtype is torch.bfloat16
    assert " bits in 14 int4, 2 unquantized (stored unquantized) tensors, " in start_up_line(llm)
    assert any("--dtype float16 keeps" in note for note in llm.notes)
    [out] = llm.generate([tokens(9)], SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(out.token_ids) == 3
    report = model_report(str(folder))
    assert report["quantized_by"] == "awq, 14 tensors"
    assert "14 int4, 2 unquantized (stored unquantized) tensors; with --quantization none " in report["weights"]
    assert report["weight_bytes_packed"] == llm.model.weights.quantized_bytes + llm.model.weights.exact_bytes


@pytest.mark.parametrize("quantization", [None, "auto"])
def test_other_dtypes_and_devices_dequantize_and_a_note_says_so(made, quantization):
    folder, _ = made("gptq")
    config = EngineConfig(quantization=quantization, dtype="float32")
    info = inspect_model(resolve(str(folder)), config)
    assert info.packing is None
    assert any("gptq quantized are dequantized in float32 on cpu" in note for note in info.notes)
    info = inspect_model(resolve(str(folder)), EngineConfig(quantization="none"))
    assert not any("dequantized" in note for note in info.notes)
    assert info.dtype is torch.float16


def test_a_gpu_with_the_packages_leaves_the_checkpoint_to_transformers(made, monkeypatch):
    folder, _ = made("gptq")
    gpu = torch.device("cuda")
    monkeypatch.setattr("lean.model.dtype._is_slow_in_bfloat16", lambda device: False)
    info = inspect_model(resolve(str(folder)), EngineConfig(), gpu)
    assert info.stored is not None
    assert any("dequantized in float16 on cuda" in note for note in info.notes)
    monkeypatch.setattr(model_info, "lacks_packages", lambda method: "")
    info = inspect_model(resolve(str(folder)), EngineConfig(), gpu)
    assert info.stored is None
    assert info.config.quantization_config["quant_method"] == "gptq"


def test_int4_keeps_the_codes_and_quantizes_the_rest(made):
    folder, _ = made("gptq")
    one, other = read(folder, "int4"), read(folder)
    assert one.weights.formats == (("int4", 14), ("int8", 2))
    assert torch.equal(one.module.get_submodule(Q_PROJ).codes, other.module.get_submodule(Q_PROJ).codes)
    assert "quantized already" in refusal(read, folder, "bnb-4bit")


def test_engines_with_other_weights_have_other_fingerprints(made):
    folder, _ = made("gptq")
    seen = []
    for quantization in (None, "none", "int4"):
        llm = LLM(str(folder), EngineConfig(quantization=quantization, dtype="bfloat16"))
        about = describe(llm.model, llm.config, llm.plan, llm.kernel_name, "weights")
        seen.append((about["quantization"], str(about["weight_formats"])))
    assert len(set(seen)) == 3


# --- heads, layers that stay, and biases ---


def test_a_quantized_head_is_packed_and_a_tied_one_is_the_embedding(tiny, tmp_path):
    weights = write_quantized(tiny("llama", **SHAPE), tmp_path / "head", "gptq", also=("lm_head.weight",))
    head = read(tmp_path / "head").module.get_output_embeddings()
    assert isinstance(head, Int4Linear)
    want = weights["lm_head"]
    assert (weight_of(head) - want).norm() < 0.005 * want.norm()
    change_config(tmp_path / "head", tie_word_embeddings=True)
    module = read(tmp_path / "head").module
    assert module.get_output_embeddings().weight is module.get_input_embeddings().weight


def test_layers_that_nobody_quantized_are_read_as_they_are(copy, tiny):
    folder, plain = copy("packed"), read(tiny("llama", **SHAPE), "none", "bfloat16").module

    def restore(tensors):
        for name in [name for name in tensors if name.startswith(f"{Q_PROJ}.")]:
            del tensors[name]
        tensors[f"{Q_PROJ}.weight"] = plain.get_submodule(Q_PROJ).weight

    change_tensors(folder, restore)
    model = read(folder)
    assert model.weights.formats == (("int4", 13),)
    assert torch.equal(model.module.get_submodule(Q_PROJ).weight, plain.get_submodule(Q_PROJ).weight)


def test_a_bias_of_zeros_that_the_model_lacks_is_dropped_and_another_is_refused(copy, caplog):
    folder = copy("gptq")
    change_tensors(folder, lambda tensors: tensors.update({f"{Q_PROJ}.bias": torch.zeros(128)}))
    assert read(folder).weights.formats == (("int4", 14),)
    assert "not used" not in caplog.text
    change_tensors(folder, lambda tensors: tensors.update({f"{Q_PROJ}.bias": torch.ones(128)}))
    assert f"{Q_PROJ}.bias is not 0" in refusal(read, folder)


def test_zeros_that_wrapped_around_in_their_word_are_undone(copy, made):
    """Writers subtract 1 from whole words: a zero of 0 borrows from its neighbour."""
    folder, weights = copy("gptq"), {}

    def borrow(tensors):
        zeros = tensors[f"{Q_PROJ}.qzeros"]
        zeros[:] = -(0x11111111)  # all zeros 0
        codes, scale = made("gptq")[1][Q_PROJ], tensors[f"{Q_PROJ}.scales"].double().t().repeat_interleave(32, 1)
        weights["all"] = scale, codes

    change_tensors(folder, borrow)
    got = read(folder, "none", "float32").module.get_submodule(Q_PROJ).weight
    assert (got >= 0).all()
    steps = got.double() / weights["all"][0]
    assert torch.equal(steps, steps.round())
    assert steps.max() == 15


# --- memory ---


@pytest.mark.parametrize("form", FORMS)
def test_the_bytes_stated_are_those_planned_and_weights_are_read_part_by_part(made, monkeypatch, form):
    """Before a weight is packed the module holds one number for it, and a few rows are decoded at a time."""
    folder, _ = made(form)
    make, parts, reading = packing._made, [], matrix.QuantizedMatrix.codes

    def seen(weight, old, fixed):
        assert old.weight.untyped_storage().nbytes() == 2, weight.path
        return make(weight, old, fixed)

    def counted(self, rows):
        for part in reading(self, rows):
            parts.append(len(part[0]))
            yield part

    monkeypatch.setattr(packing, "_made", seen)
    monkeypatch.setattr(matrix.QuantizedMatrix, "codes", counted)
    monkeypatch.setattr(packing, "rows_at_once", lambda inputs: 64)
    planned = inspect_model(resolve(str(folder)), EngineConfig()).weight_bytes
    use = read(folder).weights
    assert use.quantized_bytes + use.exact_bytes == planned
    assert set(parts) == {64}
