"""Mixtures of experts in 4 and 8 bits: every expert is packed, and a row's answer does not depend on the others."""

from types import SimpleNamespace

import pytest
import torch
from gguf import GGMLQuantizationType
from gguf_files import write_gguf
from helpers import refusal
from quantized_checkpoints import write_plain, write_quantized
from safetensors.torch import load_file
from tiny import tokens
from torch import nn

from lean import LLM, EngineConfig, SamplingParams
from lean.model import packing
from lean.model.info import inspect_model
from lean.model.load import load_model
from lean.quant.packed_experts import PackedExperts
from lean.store.gguf import weights as gguf_weights
from lean.store.prequantized import stack
from lean.store.source import resolve

CPU = torch.device("cpu")
FIELDS = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "decoder_sparse_step": 1},
    "gpt_oss": {},
}
KINDS = tuple(FIELDS)
Q4_0, Q4_1, Q8_0 = (GGMLQuantizationType[name] for name in ("Q4_0", "Q4_1", "Q8_0"))


@pytest.fixture(autouse=True)
def never_slow(monkeypatch):
    monkeypatch.setattr(packing, "is_slow", lambda *_: False)


@pytest.fixture
def folder(tiny):
    return lambda kind: tiny(kind, num_hidden_layers=2, **FIELDS[kind])


def read(model, quantization="none", dtype="bfloat16", deterministic=False, **options):
    config = EngineConfig(quantization=quantization, dtype=dtype, deterministic=deterministic, **options)
    return load_model(inspect_model(resolve(str(model)), config), CPU, deterministic)


def logits(model, **options):
    llm = LLM(model, EngineConfig(kv_dtype="auto", **options))
    return llm.logits(torch.cat([rows for _, rows in llm.hidden_states(tokens(100))]))


def packed_of(model):
    """The packed tensors of experts by path, and whether their modules hold weights transposed."""
    parts = dict(model.module.named_modules())
    return {
        path: (part, parts[path.rpartition(".")[0]].is_transposed)
        for path, part in parts.items()
        if isinstance(part, PackedExperts)
    }


def weights_of(part, transposed):
    """[experts, ...] as the module's own parameter has it, float64, as products with the identity show it."""
    eye = torch.eye(part.shape[2]).bfloat16()
    shown = torch.stack([part.product(expert, eye) for expert in range(part.shape[0])]).double()
    return shown if transposed else shown.transpose(1, 2)


# --- unquantized checkpoints, and GGUF files ---


@pytest.mark.parametrize(("quantization", "most"), [("int4", 0.12), ("int8", 0.015)])
@pytest.mark.parametrize("kind", KINDS)
def test_experts_are_quantized_at_load(folder, kind, quantization, most):
    model, plain = read(folder(kind), quantization), read(folder(kind), dtype="float32")
    found = packed_of(model)
    assert len(found) == 4
    for path, (part, transposed) in found.items():
        assert part.kind == quantization
        want = plain.module.get_parameter(path).double()
        assert 0.001 < (weights_of(part, transposed) - want).norm() / want.norm() < most, path
    exact = logits(plain).log_softmax(-1)
    loss = float((exact.exp() * (exact - logits(model).log_softmax(-1))).sum(-1).mean())
    assert loss < (0.05 if quantization == "int4" else 0.005)
    assert model.weights.kept == (("router of experts", 2),)


@pytest.mark.parametrize(("kind", "stored"), [("mixtral", Q4_0), ("qwen3_moe", Q4_0), ("gpt_oss", Q4_1)])
def test_the_experts_of_a_gguf_file_keep_its_codes(folder, tmp_path, kind, stored):
    file = write_gguf(folder(kind), tmp_path / "tiny.gguf", quantization=stored)
    model, plain = read(file, "auto"), read(file, dtype="float32")
    found = packed_of(model)
    assert len(found) == 4
    for path, (part, transposed) in found.items():
        assert part.kind == "int4"
        want = plain.module.get_parameter(path).double()
        assert (weights_of(part, transposed) - want).norm() < 0.005 * want.norm(), path


def test_experts_of_another_type_become_int8(folder, tmp_path):
    file = write_gguf(folder("mixtral"), tmp_path / "tiny.gguf", quantization=Q8_0)
    model, plain = read(file, "auto"), read(file, dtype="float32")
    for path, (part, transposed) in packed_of(model).items():
        assert part.kind == "int8"
        want = plain.module.get_parameter(path).double()
        assert (weights_of(part, transposed) - want).norm() < 0.015 * want.norm(), path


def test_experts_that_lose_too_much_as_int8_stay_exact(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "MOST_ERROR", 1e-4)
    file = write_gguf(folder("mixtral"), tmp_path / "tiny.gguf", quantization=Q8_0)
    model, plain = read(file, "auto"), read(file)
    assert not packed_of(model)
    path = "model.layers.1.mlp.experts.down_proj"
    assert torch.equal(model.module.get_parameter(path), plain.module.get_parameter(path))


# --- rows do not depend on each other ---


@pytest.mark.parametrize(("kind", "quantization"), [("mixtral", "int4"), ("qwen3_moe", "int8"), ("gpt_oss", "int4")])
def test_deterministic_mode_keeps_every_bit(folder, kind, quantization):
    model = read(folder(kind), quantization, deterministic=True)
    want = logits(model, deterministic=True)
    for chunk in (1, 7):
        assert torch.equal(logits(model, deterministic=True, prefill_chunk=chunk), want)
    assert torch.equal(logits(model, deterministic=True, threads=2), want)


def test_an_answer_is_the_same_alone_and_in_company(folder):
    model = read(folder("qwen3_moe"), "int4", deterministic=True)
    llm, params = LLM(model, EngineConfig(deterministic=True)), SamplingParams(max_tokens=12, ignore_eos=True)
    prompts = [tokens(count, seed) for seed, count in enumerate((5, 40, 17))]
    together = [out.token_ids for out in llm.generate(prompts, params)]
    assert together == [llm.generate([prompt], params)[0].token_ids for prompt in prompts]


# --- checkpoints that others quantized ---


def expert_layers(folder):
    return tuple(key for key in load_file(folder / "model.safetensors") if ".experts." in key)


@pytest.mark.parametrize(
    ("kind", "form"), [("mixtral", "gptq"), ("mixtral", "packed8"), ("qwen3_moe", "awq"), ("qwen3_moe", "packed_asym")]
)
def test_experts_that_were_quantized_one_by_one_keep_their_codes(folder, tmp_path, kind, form):
    weights = write_quantized(folder(kind), tmp_path / "q", form, also=expert_layers(folder(kind)))
    plain = write_plain(folder(kind), tmp_path / "plain", weights)
    exact, model = read(tmp_path / "q", "none", "float32"), read(tmp_path / "q", None, "auto")
    for path, want in read(plain, dtype="float32").module.named_parameters():
        assert torch.equal(exact.module.get_parameter(path), want), path
    found = packed_of(model)
    assert len(found) == 4
    for path, (part, transposed) in found.items():
        want = exact.module.get_parameter(path).double()
        assert (weights_of(part, transposed) - want).norm() < 0.005 * want.norm(), path


def test_experts_of_which_one_is_not_quantized_are_refused(folder, tmp_path):
    write_quantized(folder("mixtral"), tmp_path / "q", "gptq", also=expert_layers(folder("mixtral"))[1:])
    assert "lean has no place" in refusal(read, tmp_path / "q")


# --- what is held, and what cannot be packed ---


@pytest.mark.parametrize("quantization", ["int4", "int8"])
def test_no_tensor_of_all_experts_is_put_together(folder, monkeypatch, quantization):
    """Files have a matrix for each expert. The module holds one number for all of them before they are packed."""
    make, read_parts, sizes = packing._made_experts, stack.ExactMatrix.values, []

    def seen(weight, old, fixed):
        assert getattr(old, weight.name).untyped_storage().nbytes() == 2, weight.path
        return make(weight, old, fixed)

    def counted(self, rows):
        for part in read_parts(self, rows):
            if ".experts." in self.key:
                sizes.append(part.numel())
            yield part

    monkeypatch.setattr(packing, "_made_experts", seen)
    monkeypatch.setattr(stack.ExactMatrix, "values", counted)
    planned = inspect_model(resolve(str(folder("mixtral"))), EngineConfig(quantization=quantization, dtype="bfloat16"))
    use = read(folder("mixtral"), quantization).weights
    assert use.quantized_bytes + use.exact_bytes == planned.weight_bytes
    assert max(sizes) <= 64 * 128, "one matrix of one expert"


def test_a_gguf_file_is_read_expert_by_expert(folder, tmp_path, monkeypatch):
    file = write_gguf(folder("mixtral"), tmp_path / "tiny.gguf", quantization=Q4_1)
    sizes, reading = [], gguf_weights.grouped_rows

    def counted(*args):
        for part in reading(*args):
            sizes.append(len(part[0]))
            yield part

    monkeypatch.setattr(gguf_weights, "grouped_rows", counted)
    assert packed_of(read(file, "auto"))
    assert max(sizes) == 128


def test_compiled_steps_keep_their_experts_unpacked_and_say_so(folder):
    info = inspect_model(
        resolve(str(folder("mixtral"))), EngineConfig("int8", quantization="int4", dtype="bfloat16", compile=True)
    )
    assert info.packing.kept["experts, which compiled steps multiply unpacked"] == 4
    model = read(folder("mixtral"), "int4")
    assert "--compile" in refusal(model.check_weights, None, False, True)


def test_experts_that_a_model_multiplies_in_its_own_way_stay_exact(folder, monkeypatch):
    monkeypatch.setattr(packing, "follows_interface", lambda module: False)
    model = read(folder("mixtral"), "int8")
    assert dict(model.weights.kept)["experts that the model multiplies in its own way"] == 4
    assert isinstance(model.module.get_parameter("model.layers.0.mlp.experts.down_proj"), nn.Parameter)


@pytest.mark.parametrize("other", [("coarse", 32), ("int4", 64)], ids=["other bits", "another group"])
def test_experts_that_are_stored_in_several_ways_get_the_kind_that_all_can_have(folder, other):
    module = read(folder("mixtral")).module
    [path, owner] = next((path, part) for path, part in module.named_modules() if path.endswith("experts"))

    class Stored:
        def expert(self, index):
            kind, group = other if index == 2 else ("int4", 32)
            return SimpleNamespace(kind=kind, group=group, format="text")

    found = packing._choose_experts(owner, path, "down_proj", owner.down_proj, "stored", Stored())
    assert (found.kind, found.experts) == ("int8", len(owner.down_proj))
