"""Weights of a file stay in its bits: what is packed equals the file, and what is not is counted with its reason."""

import shutil
from dataclasses import replace

import gguf_files
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf_files import write_gguf
from helpers import refusal
from tiny import tiny_checkpoint, tokens
from torch import nn

from lean import LLM, EngineConfig, SamplingParams
from lean.model import packing
from lean.model.info import inspect_model
from lean.model.load import load_model
from lean.quant import packed
from lean.quant.packed import Int4Linear, Int8Embedding, Int8Linear, rows_at_once
from lean.report import model_report, start_up_line, weights_line, weights_report
from lean.store.gguf import weights
from lean.store.gguf.file import read_gguf
from lean.store.gguf.tensors import dequantize
from lean.store.source import resolve

CPU = torch.device("cpu")
NARROW = {"num_hidden_layers": 2}
TIED = {**NARROW, "tie_word_embeddings": True}
Q4_0, Q4_1, Q4_K, Q8_0 = (GGMLQuantizationType[name] for name in ("Q4_0", "Q4_1", "Q4_K", "Q8_0"))


@pytest.fixture(autouse=True)
def never_slow(monkeypatch):
    monkeypatch.setattr(packing, "is_slow", lambda *_: False)


def q4_k(array, kind):
    """Random blocks of Q4_K with the spread of the array; the gguf package cannot write them."""
    random = np.random.default_rng(array.shape[0])
    blocks = random.integers(0, 256, (len(array), array.shape[1] // 256, 144), dtype=np.uint8)
    scale = (array.std() / 300 * random.uniform(0.5, 1, (*blocks.shape[:2], 2))).astype(np.float16)
    scale[..., 1] *= 7
    blocks[..., :4] = scale.view(np.uint8)
    return blocks.reshape(len(array), -1)


def file_of(folder, target, kind, monkeypatch, embedding=None):
    """A GGUF file whose layers, and with ``embedding`` whose embedding, have these types."""
    real = gguf_files.quants.quantize
    with monkeypatch.context() as patch:
        patch.setattr(gguf_files.quants, "quantize", lambda a, t: q4_k(a, t) if t == Q4_K else real(a, t))
        if embedding is not None:
            add = gguf_files.GGUFWriter.add_tensor

            def add_tensor(self, name, array, **options):
                if name in ("token_embd.weight", "output.weight"):
                    array, options = real(array, embedding), {"raw_dtype": embedding}
                add(self, name, array, **options)

            patch.setattr(gguf_files.GGUFWriter, "add_tensor", add_tensor)
        return write_gguf(folder, target / "tiny.gguf", quantization=kind)


def read(model, quantization="auto", deterministic=False, dtype="bfloat16"):
    config = EngineConfig(quantization=quantization, deterministic=deterministic, dtype=dtype)
    info = inspect_model(resolve(str(model)), config)
    return load_model(info, CPU, deterministic)


def weight_of(layer):
    """The weight of a layer as its product with the identity shows it, float64 [out, in]."""
    return layer(torch.eye(layer.in_features).bfloat16()).t().double()


def plain_weights(file):
    """The matrices of the file's model in float64, by the path of their modules."""
    module = read(file, "none", dtype="float32").module
    return {name.removesuffix(".weight"): w.double() for name, w in module.named_parameters() if w.dim() == 2}


# --- the weights of a file ---


@pytest.mark.parametrize("kind", [Q4_0, Q4_1, Q4_K], ids=lambda kind: kind.name)
def test_every_4bit_tensor_equals_the_file_up_to_the_rounding_to_bfloat16(tiny, tmp_path, monkeypatch, kind):
    folder = tiny("llama", **NARROW, hidden_size=256, head_dim=64, intermediate_size=512)
    file = file_of(folder, tmp_path, kind, monkeypatch)
    model, want = read(file, deterministic=True), plain_weights(file)
    layers = {path: part for path, part in model.module.named_modules() if isinstance(part, Int4Linear)}
    assert len(layers) == 14
    assert model.weights.formats == (("int4", 14),)
    for path, layer in layers.items():
        # Rounded are the scale, by which at most 8 is multiplied, the zero, and the weight that the product shows.
        scale, zero = layer.scales.double().unbind(-1)
        slack = ((8 * scale.abs() + zero.abs()).t().repeat_interleave(32, 1) + want[path].abs()) * 2**-8
        assert ((weight_of(layer) - want[path]).abs() <= slack + 1e-12).all(), path


def test_the_rows_of_q_and_k_are_in_the_order_of_the_module(tiny, tmp_path, monkeypatch):
    """A file of a llama has them in pairs. Any other order would be far off."""
    file = file_of(tiny("llama", **NARROW), tmp_path, Q4_1, monkeypatch)
    model, want = read(file), plain_weights(file)
    for name in ("q_proj", "k_proj"):
        path = f"model.layers.1.self_attn.{name}"
        got = weight_of(model.module.get_submodule(path))
        assert (got - want[path]).norm() < 0.005 * want[path].norm()


@pytest.mark.parametrize("tied", [False, True])
def test_other_quantized_tensors_become_int8_and_a_tied_head_shares_the_embedding(tiny, tmp_path, monkeypatch, tied):
    folder = tiny("llama", **NARROW, tie_word_embeddings=tied)
    file = file_of(folder, tmp_path, Q8_0, monkeypatch, embedding=Q8_0)
    model, want = read(file), plain_weights(file)
    module = model.module
    assert model.weights.formats == (("int8", 15 if tied else 16),)
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    assert isinstance(embedding, Int8Embedding)
    assert isinstance(head, Int8Linear)
    assert (head.codes is embedding.codes) == tied
    for path, layer in module.named_modules():
        if isinstance(layer, Int8Linear) and not (tied and layer is head):
            assert (weight_of(layer) - want[path]).norm() < 0.015 * want[path].norm(), path
    rows = embedding(torch.arange(264)).double()
    table = want["model.embed_tokens"]
    assert 0 < (rows - table).norm() < 0.015 * table.norm()
    if tied:
        assert (weight_of(head) - rows).norm() < 2**-8 * rows.norm()


def test_a_tensor_that_loses_too_much_as_int8_stays_exact(tiny, tmp_path, monkeypatch):
    """One number of a row far from the others takes the steps of the row with it."""
    array = np.random.default_rng(0).normal(0, 4, (64, 128)).astype(np.float32)
    array[:, 0] = 300
    with monkeypatch.context() as patch:
        convert = gguf_files.gguf_tensors
        patch.setattr(gguf_files, "gguf_tensors", lambda model: convert(model) | {"blk.0.ffn_down.weight": array})
        file = file_of(tiny("llama", **NARROW), tmp_path, Q8_0, monkeypatch)
    model = read(file)
    down = model.module.model.layers[0].mlp.down_proj
    assert type(down) is nn.Linear
    want = dequantize(read_gguf(file).tensors["blk.0.ffn_down.weight"], torch.bfloat16)
    assert torch.equal(down.weight, want)
    assert ("more than 1.5% of error as int8", 1) in model.weights.kept
    assert "1 unquantized (more than 1.5% of error as int8)" in weights_line(model.weights)


@pytest.mark.parametrize("kind", ["gemma2", "gpt2", "gpt_oss", "llama", "mixtral", "phi3", "qwen2"])
def test_a_packed_model_predicts_as_the_unpacked_one(tiny, tmp_path, monkeypatch, kind):
    """With fused tensors, experts, biases, scaled embeddings and transposed weights; what is not packed is said."""
    short = {"n_positions": 512} if kind == "gpt2" else {}
    file = file_of(tiny(kind, **NARROW, **short), tmp_path, Q4_1, monkeypatch, embedding=Q8_0)
    packed, ids = read(file), tokens(60)
    assert packed.weights.num_quantized == packed.weights.num_linear - sum(dict(packed.weights.kept).values())

    def predictions(model):
        llm = LLM(model, EngineConfig(kv_dtype="bf16"))
        return llm.logits(torch.cat([rows for _, rows in llm.hidden_states(ids)])).log_softmax(-1)

    want, got = predictions(read(file, "none")), predictions(packed)
    exact = predictions(read(file, "none", dtype="float32"))
    loss = lambda found: float((exact.exp() * (exact - found)).sum(-1).mean())  # noqa: E731
    assert loss(got) < 10 * loss(want) + 2e-3
    kept = dict(packed.weights.kept)
    if kind in ("gpt_oss", "mixtral"):
        assert dict(packed.weights.formats)["int4"] == 12, "two tensors of experts in each of two layers"
    if kind == "gpt2":
        assert kept["no linear layer"] >= 8
        assert packed.weights.formats == (("int8", 1),)


def test_unquantized_tensors_of_a_file_stay_as_they_are(tiny, tmp_path):
    file = write_gguf(tiny("llama", **NARROW), tmp_path / "tiny.gguf")
    model, plain = read(file), read(file, "none")
    assert model.weights.formats == ()
    assert dict(model.weights.kept) == {"stored as F32": 16}
    assert weights_line(model.weights).startswith("weights 16 unquantized (stored as F32) tensors, ")
    assert weights_report(model.weights)["bits"] == 0
    for (name, one), other in zip(model.module.named_parameters(), plain.module.parameters()):
        assert torch.equal(one, other), name


# --- what is held and said ---


def held(module):
    tensors = [*module.parameters(), *(b for p in module.modules() if hasattr(p, "codes") for b in p.buffers())]
    return sum({tensor.data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


@pytest.mark.parametrize("quantization", ["auto", "int4", "int8"])
def test_the_bytes_stated_are_the_bytes_held_and_those_planned(tiny, tmp_path, monkeypatch, quantization):
    file = file_of(tiny("qwen2", **TIED), tmp_path, Q4_0, monkeypatch, embedding=Q8_0)
    info = inspect_model(resolve(str(file)), EngineConfig(quantization=quantization))
    model = read(file, quantization)
    use = model.weights
    assert use.quantized_bytes + use.exact_bytes == held(model.module) == info.weight_bytes
    assert use.bits == 8 * use.quantized_bytes / use.num_weights
    assert model.info.packing is None, "the plan holds the file's metadata"


def test_the_start_up_line_and_the_reports_say_what_was_packed(tiny, tmp_path, monkeypatch):
    file = file_of(tiny("llama", **TIED), tmp_path, Q4_1, monkeypatch, embedding=Q8_0)
    llm = LLM(str(file), EngineConfig(quantization="auto"))
    assert "; weights " in start_up_line(llm)
    assert " bits in 14 int4, 1 int8 tensors, " in start_up_line(llm)
    assert weights_report(llm.model.weights)["tensors"] == {"int4": 14, "int8": 1}
    report = model_report(str(file))
    assert report["weight_bytes_packed"] == llm.model.weights.quantized_bytes + llm.model.weights.exact_bytes
    assert "with --quantization auto" in report["weights"]
    assert "14 int4, 1 int8 tensors" in report["weights"]
    plain = model_report(str(tiny("llama", **NARROW)))
    assert plain["weight_bytes_packed"] is None
    assert "--quantization" not in plain["weights"]


def test_a_file_is_read_part_by_part(tiny, tmp_path, monkeypatch):
    """Before a weight is packed the module holds one number for it, and a few rows of the file are read at a time."""
    file = file_of(tiny("llama", **TIED), tmp_path, Q4_1, monkeypatch, embedding=Q8_0)
    made, parts, reading = packing._made, [], weights.grouped_rows

    def seen(weight, old, fixed):
        assert old.weight.untyped_storage().nbytes() == 2, weight.path
        return made(weight, old, fixed)

    def counted(*args):
        for part in reading(*args):
            parts.append(len(part[0]))
            yield part

    monkeypatch.setattr(packing, "_made", seen)
    monkeypatch.setattr(weights, "grouped_rows", counted)
    monkeypatch.setattr(packing, "rows_at_once", lambda inputs: 64)
    use = read(file).weights
    assert use.num_quantized == 15
    assert set(parts) == {64, 32}
    assert rows_at_once(4096) * 4096 == 2**18, "a part of a large weight"


# --- other weights, other ways ---


@pytest.mark.parametrize(("quantization", "most"), [("int4", 0.12), ("int8", 0.015)])
def test_unquantized_checkpoints_are_quantized_at_load(tiny, quantization, most):
    folder = tiny("llama", **NARROW)
    model, plain = read(folder, quantization), read(folder, "none")
    layers = {path: part for path, part in model.module.named_modules() if isinstance(part, Int4Linear | Int8Linear)}
    assert len(layers) == 15
    for path, layer in layers.items():
        want = plain.module.get_submodule(path).weight.double()
        assert 0.001 < (weight_of(layer) - want).norm() / want.norm() < most, path
    head, embedding = model.module.get_output_embeddings(), model.module.get_input_embeddings()
    assert isinstance(head, Int8Linear)
    assert isinstance(embedding, Int8Embedding)
    [out] = LLM(model, EngineConfig()).generate([tokens(9)], SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(out.token_ids) == 3


def test_a_pulled_model_is_packed_from_the_file_that_lies_beside_its_checkpoint(tiny, tmp_path, monkeypatch):
    folder = shutil.copytree(tiny("llama", **NARROW), tmp_path / "pulled")
    file = file_of(folder, folder, Q4_1, monkeypatch)
    source = replace(resolve(str(folder)), original=file.name)
    info = inspect_model(source, EngineConfig(quantization="auto"))
    assert info.packing.formats == {"int4": 14}
    assert info.source.gguf_file == file.name
    for options in ({}, {"quantization": "auto", "dtype": "float32"}):
        assert inspect_model(source, EngineConfig(**options)).source == source


def test_layers_that_no_product_takes_stay_exact_and_are_counted(tmp_path):
    model = read(tiny_checkpoint(tmp_path, "llama", intermediate_size=100, **NARROW), "int8")
    assert dict(model.weights.kept) == {"100 inputs, no multiple of 32": 2}
    assert type(model.module.model.layers[0].mlp.down_proj) is nn.Linear
    narrow = tiny_checkpoint(tmp_path / "n", "llama", hidden_size=48, intermediate_size=100, head_dim=12, **NARROW)
    assert "no weight of n can be packed" in refusal(read, narrow, "int4")


def test_routers_stay_exact_and_a_model_without_norm_weights_is_packed(tmp_path):
    moe = read(tiny_checkpoint(tmp_path / "moe", "qwen3_moe"), "int8")
    assert dict(moe.weights.kept)["router of experts"] == moe.info.config.num_hidden_layers
    plain = LLM(str(tiny_checkpoint(tmp_path / "olmo", "olmo")), EngineConfig(quantization="int8", dtype="bfloat16"))
    assert plain.generate([tokens(20)], SamplingParams(max_tokens=3))[0].finish_reason


def test_a_layer_that_computes_in_float32_gets_float32_back():
    layer = nn.Linear(64, 32, dtype=torch.bfloat16)
    codes, scales, *_ = packed.pack_int8([layer.weight.detach()], 32, 64)
    made = Int8Linear(codes, scales, layer.bias, False)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    assert made(x).dtype is torch.float32
    assert torch.equal(made(x).bfloat16(), made(x.bfloat16()))


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int4", "int8"])
def test_packed_weights_can_be_compiled(tiny, quantization):
    options = {"quantization": quantization, "dtype": "bfloat16", "max_model_len": 128, "max_num_seqs": 2}
    folder = str(tiny("llama", **NARROW))
    answers = []
    for compiled in (True, False):
        llm = LLM(folder, EngineConfig(**options, compile=compiled))
        llm.wait_until_compiled()
        answers.append(llm.generate([tokens(20)], SamplingParams(max_tokens=8)))
    assert [out[0].finish_reason for out in answers] == ["length"] * 2
    assert answers[0][0].token_ids[0] == answers[1][0].token_ids[0]  # of the prompt, which is not compiled


def test_a_slow_product_is_not_used_unless_it_is_asked_for(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "is_slow", lambda kind, *_: kind == "int4")
    file = file_of(tiny("llama", **TIED), tmp_path, Q4_1, monkeypatch, embedding=Q8_0)
    model = read(file)
    assert model.weights.formats == (("int8", 1),)
    assert dict(model.weights.kept) == {"slower than bf16 on this CPU": 14}
    assert read(file, "int4").weights.formats == (("int4", 14), ("int8", 1))
    assert read(file, deterministic=True).weights.formats == (("int4", 14), ("int8", 1))


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_auto_means_none_in_another_dtype_and_says_so(tiny, tmp_path, monkeypatch, dtype):
    file = file_of(tiny("llama", **NARROW), tmp_path, Q4_1, monkeypatch)
    info = inspect_model(resolve(str(file)), EngineConfig(quantization="auto", dtype=dtype))
    assert info.quantization is info.packing is None
    assert any("no effect" in note and dtype in note for note in info.notes)
    if dtype != "float64":
        assert "bfloat16" in refusal(read, file, "int4", dtype=dtype)


def test_a_gpu_keeps_no_packed_weights():
    gpu = torch.device("cuda")
    assert packing.choose_method(EngineConfig(quantization="auto"), torch.bfloat16, gpu, None) is None
    message = refusal(packing.choose_method, EngineConfig(quantization="int4"), torch.bfloat16, gpu, None)
    assert "on cuda: use bnb-4bit" in message


def test_auto_on_a_checkpoint_without_a_gguf_file_has_no_effect_and_says_so(tiny):
    info = inspect_model(resolve(str(tiny("llama", **NARROW))), EngineConfig(quantization="auto", dtype="bfloat16"))
    assert info.packing is None
    assert any("no effect" in note for note in info.notes)


@pytest.mark.parametrize("form", [{}, {"kv_dtype": "k8v4", "kv_residual_length": 8, "sinks": 2}], ids=["int8", "k8v4"])
def test_deterministic_mode_keeps_every_bit_with_packed_weights(tiny, tmp_path, monkeypatch, form):
    file = file_of(tiny("llama", **TIED), tmp_path, Q4_1, monkeypatch, embedding=Q8_0)
    model, ids = read(file, deterministic=True), tokens(170)

    def logits(**options):
        llm = LLM(model, EngineConfig(deterministic=True, **form, **options))
        return llm.logits(torch.cat([rows for _, rows in llm.hidden_states(ids)]))

    want = logits()
    for chunk in (1, 7, 16, 150):
        assert torch.equal(logits(prefill_chunk=chunk), want)
    assert torch.equal(logits(threads=2), want)
    assert "--deterministic" in refusal(read(file).check_weights, "auto", True)
