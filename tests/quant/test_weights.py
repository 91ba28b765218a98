"""Quantized weights are bitsandbytes' own numbers in the decoder's linear layers, exact everywhere else, and stated."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
import yaml
from gguf_files import write_gguf
from helpers import refusal
from tiny import tiny_checkpoint, tokens
from torch import nn

from lean import LLM, EngineConfig, SamplingParams
from lean.cli.ending import run_to_end
from lean.cli.main import run_command
from lean.model import attention
from lean.model.info import inspect_model
from lean.model.load import LoadedModel, load_model
from lean.quant import weights
from lean.report import start_up_line, weights_line
from lean.store.source import resolve

CPU = torch.device("cpu")
NARROW = {"num_hidden_layers": 2}


def read(folder, quantization="bnb-4bit", dtype="bfloat16", deterministic=False) -> LoadedModel:
    info = inspect_model(resolve(str(folder)), EngineConfig(dtype=dtype, quantization=quantization))
    return load_model(info, CPU, deterministic)


def start(model, **config) -> LLM:
    return LLM(model, EngineConfig(**{"kv_dtype": "bf16", **config}))


def logits(llm, ids) -> torch.Tensor:
    return llm.logits(torch.cat([rows for _, rows in llm.hidden_states(ids)]))


@pytest.fixture(scope="module")
def bnb():
    return pytest.importorskip("bitsandbytes")


@pytest.fixture
def fused(bnb):
    if not bnb.functional.has_avx512bf16():
        pytest.skip("bitsandbytes has no fused 4-bit product for this CPU")


def dequantized(bnb, layer) -> torch.Tensor:
    return bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)


# --- the same numbers as transformers' own integration ---


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma3"])
def test_a_model_has_the_logits_of_transformers_own_4bit_model(bnb, tiny, kind):
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    folder, ids = tiny(kind, **NARROW), tokens(70)
    ours = read(folder)
    attention.register()
    theirs = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.bfloat16,
        attn_implementation=attention.NAME,
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        ),
    )
    assert sum(isinstance(module, bnb.nn.Linear4bit) for module in theirs.modules()) == ours.weights.num_quantized
    want = logits(start(LoadedModel(ours.info, theirs.eval(), ours.tokenizer, ours.eos_token_ids)), ids)
    assert torch.equal(logits(start(ours), ids), want)
    exact = logits(start(read(folder, "none")), ids)
    assert (exact - want).abs().max() > 1e-3, "the quantized model is not quantized"


def test_without_a_fused_product_weights_and_logits_are_transformers_too(bnb, tiny, monkeypatch):
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    folder = tiny("llama", **NARROW)
    ours = read(folder, dtype="float32")
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=config).eval()
    for (name, ours_layer), theirs_layer in zip(ours.module.named_modules(), theirs.modules()):
        if isinstance(theirs_layer, bnb.nn.Linear4bit):
            theirs_layer.support_avx512bf16_for_cpu = False  # it would compute in bfloat16
            assert torch.equal(dequantized(bnb, ours_layer), dequantized(bnb, theirs_layer)), name
    ids = tokens(70)
    with torch.inference_mode():
        want = theirs(torch.tensor([ids]), use_cache=False).logits[0]
    assert (logits(start(ours, kv_dtype="fp32"), ids) - want).abs().max() < 1e-5


@pytest.mark.parametrize(("inputs", "outputs"), [(64, 32), (128, 96), (576, 192)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_layer_multiplies_by_the_dequantized_weights(fused, bnb, inputs, outputs, bias):
    torch.manual_seed(0)
    linear = nn.Linear(inputs, outputs, bias).bfloat16().requires_grad_(False)
    layer = bnb.nn.Params4bit(linear.weight.data.clone(), False, compress_statistics=False, quant_type="nf4").to(CPU)
    weight = bnb.functional.dequantize_4bit(layer.data, layer.quant_state).double()
    packed = weights._nf4(bnb, linear, CPU)
    assert isinstance(packed, weights.PackedLinear)
    x = torch.randn(2, 5, inputs).bfloat16()
    want = nn.functional.linear(x.double(), weight, linear.bias.double() if bias else None)
    assert (packed(x) - want).norm() < 0.01 * want.norm()  # scales and sums are rounded to bfloat16


def test_the_8bit_layers_multiply_as_bitsandbytes_defines(bnb):
    """On a CPU they are refused at load; the layers are the same."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96).bfloat16().requires_grad_(False))
    exact, x = model[0], torch.randn(5, 64).bfloat16()
    use = weights.quantize_linears(model, model, "bnb-8bit", CPU)
    assert isinstance(model[0], bnb.nn.Linear8bitLt)
    assert (use.name, use.quantized_bytes, use.exact_bytes) == ("int8", 64 * 96 + 96 * 4, 96 * 2)
    assert not use.row_invariant
    want = exact(x.float().bfloat16()).float()
    assert 0 < (model(x).float() - want).norm() < 0.02 * want.norm()


# --- which layers, and what they hold ---


@pytest.mark.parametrize("kind", ["llama", "gemma3", "mixtral"])
def test_embeddings_head_and_norms_stay_untouched(bnb, tiny, kind):
    ours, exact = read(tiny(kind, **NARROW)), read(tiny(kind, **NARROW), "none")
    kept = dict(exact.module.named_parameters())
    for name, weight in ours.module.named_parameters():
        if "_proj" not in name or kept[name].dim() == 3:
            assert torch.equal(weight, kept[name]), name
    assert type(ours.module.get_output_embeddings()) is nn.Linear
    assert ours.weights.num_quantized == ours.weights.num_linear > 0


def test_layers_that_fill_no_block_stay_exact_and_are_counted(bnb, tmp_path):
    odd = read(tiny_checkpoint(tmp_path, "llama", intermediate_size=100, **NARROW))
    assert (odd.weights.num_quantized, odd.weights.num_linear) == (8, 14)
    assert type(odd.module.model.layers[0].mlp.down_proj) is nn.Linear
    assert "in 8 of 14 linear layers" in weights_line(odd.weights)
    assert logits(start(odd), tokens(20)).isfinite().all()


def test_a_model_without_any_such_layer_is_refused(bnb, tmp_path):
    folder = tiny_checkpoint(tmp_path, "llama", hidden_size=48, intermediate_size=100, head_dim=16, **NARROW)
    assert "none of 14 linear layers" in refusal(read, folder)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_bytes_stated_are_the_bytes_held(bnb, tiny, dtype):
    model = read(tiny("qwen2", **NARROW), dtype=dtype)
    logits(start(model, kv_dtype="auto"), tokens(5))  # bitsandbytes may repack at the first product
    held: dict[int, int] = {}

    def hold(tensor):
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()

    for module in model.module.modules():
        for tensor in module._parameters.values():
            if tensor is not None:
                hold(tensor)
                if state := getattr(tensor, "quant_state", None):
                    hold(state.absmax)
                    hold(state.code)
        if isinstance(module, weights.PackedLinear):
            for tensor in module._buffers.values():
                hold(tensor)
    use = model.weights
    assert use.quantized_bytes + use.exact_bytes == sum(held.values())
    assert use.bits == 8 * use.quantized_bytes / use.num_weights
    assert 4.25 <= use.bits < 5
    text = start_up_line(start(model, kv_dtype="auto"))
    assert f"weights {use.bits:.2f} bits NF4 in 14 linear layers" in text
    assert ("slow" in text) == (not use.fused)
    assert dtype == "bfloat16" or not use.fused


def test_a_gguf_file_is_quantized_to_the_same_weights(bnb, tiny, tmp_path):
    folder = tiny("llama", **NARROW)
    file = write_gguf(folder, tmp_path / "tiny.gguf")
    model, ids = read(file), tokens(40)
    assert model.weights == read(folder).weights
    assert torch.equal(logits(start(model), ids), logits(start(read(folder)), ids))


# --- deterministic mode ---


@pytest.mark.parametrize("form", [{}, {"kv_dtype": "k8v4", "kv_residual_length": 8, "sinks": 2}], ids=["bf16", "k8v4"])
def test_deterministic_mode_keeps_every_bit_with_the_packed_layers(fused, tiny, form):
    model = read(tiny("llama", **NARROW), deterministic=True)
    assert model.weights.row_invariant
    ids = tokens(70)
    want = logits(start(model, deterministic=True, **form), ids)
    for chunk in (1, 7, 16, 33):
        assert torch.equal(logits(start(model, deterministic=True, prefill_chunk=chunk, **form), ids), want)
    assert torch.equal(logits(start(model, deterministic=True, threads=2, **form), ids), want)


@pytest.mark.parametrize(("inputs", "outputs"), [(64, 32), (576, 192), (1536, 576), (2048, 512)])
def test_a_row_of_a_packed_layer_does_not_depend_on_its_company(fused, bnb, inputs, outputs):
    torch.manual_seed(0)
    packed = weights._nf4(bnb, nn.Linear(inputs, outputs, False).bfloat16().requires_grad_(False), CPU)
    x = torch.randn(200, inputs).bfloat16()
    want = packed(x)
    for rows in (1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 64, 100):
        for first in (0, 13, 100):
            assert torch.equal(packed(x[first : first + rows]), want[first : first + rows])
    torch.set_num_threads(2)
    assert torch.equal(packed(x), want)


def test_deterministic_mode_is_refused_where_the_product_depends_on_the_rows(bnb, tiny):
    message = refusal(read, tiny("llama", **NARROW), dtype="float32", deterministic=True)
    assert all(word in message for word in ("--deterministic", "bnb-4bit", "float32"))
    loaded = read(tiny("llama", **NARROW), dtype="float32")
    assert "--deterministic" in refusal(loaded.check_weights, "none", True)


# --- refusals ---


def test_8bit_weights_on_a_cpu_are_refused_with_figures(tiny):
    message = refusal(read, tiny("llama", **NARROW), "bnb-8bit")
    assert "bnb-4bit" in message
    assert any(character.isdigit() for character in message.replace("8bit", "").replace("4bit", ""))


def test_without_bitsandbytes_the_message_names_the_extra(tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.delitem(sys.modules, "bitsandbytes")
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "meta_path", [])
    message = refusal(read, tiny("llama", **NARROW))
    assert "lean-inference[bnb]" in message


def test_bitsandbytes_is_imported_without_fetching_kernels_and_without_a_word(bnb):
    """Its import asks the hub for a compiled kernel where a package `kernels` offers get_kernel."""
    code = """
import sys, types, logging
logging.basicConfig(level=logging.WARNING)
kernels = types.ModuleType("kernels")
kernels.get_kernel = lambda *a, **k: sys.exit("a kernel was fetched")
sys.modules["kernels"] = kernels
from lean.quant import weights
weights._bitsandbytes("bnb-4bit")
assert sys.modules["kernels"] is kernels
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_float64_is_refused(tiny):
    assert "float64" in refusal(EngineConfig, quantization="bnb-4bit", dtype="float64")
    assert "float64" in refusal(read, tiny("llama", **NARROW), dtype="float64")


CONFIGS = {
    "4 bits": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "old": {"load_in_8bit": True, "load_in_4bit": False},
    "other": {"quant_method": "gptq", "bits": 4},
}


@pytest.mark.parametrize("found", CONFIGS)
def test_a_checkpoint_that_is_quantized_already_is_refused(tiny, tmp_path, found):
    folder = shutil.copytree(tiny("llama", **NARROW), tmp_path / "quantized")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": CONFIGS[found]}))
    source = resolve(str(folder))
    assert "quantized already" in refusal(inspect_model, source, EngineConfig(quantization="bnb-4bit"))
    if found != "other":
        assert "quantized already" in refusal(inspect_model, source, EngineConfig())


@pytest.mark.parametrize("value", ["bnb", "int2", "", "4", 4, True])
def test_an_unknown_quantization_is_refused_by_name(value):
    message = refusal(EngineConfig, quantization=value)
    assert "quantization" in message
    assert repr(value) in message


# --- from the outside ---


def test_the_engine_loads_quantized_weights_and_an_engine_that_shares_them_agrees(bnb, tiny):
    folder = tiny("llama", **NARROW)
    llm = LLM(str(folder), EngineConfig(quantization="bnb-4bit", dtype="bfloat16"))
    assert llm.model.weights.num_quantized == 14
    LLM(llm.model, EngineConfig(quantization="bnb-4bit"))
    LLM(llm.model, EngineConfig())
    exact = read(folder, "none")
    assert "bnb-4bit" in refusal(LLM, exact, EngineConfig(quantization="bnb-4bit"))
    other = read(folder, dtype="float32")
    assert "--deterministic" in refusal(LLM, other, EngineConfig(deterministic=True))
    [output] = llm.generate([tokens(5)], SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(output.token_ids) == 3


@pytest.fixture
def lean(monkeypatch, capsys):
    """``lean(*arguments)`` of ``lean run`` -> (exit code, stdout, stderr)."""
    monkeypatch.setenv("COLUMNS", "400")

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["lean", "run", *arguments])
        return run_to_end(run_command), *capsys.readouterr()

    return call


def test_the_command_line_takes_it_prints_it_and_reports_it(bnb, tiny, tmp_path, lean):
    model, file = str(tiny("llama", **NARROW)), tmp_path / "options.yaml"
    file.write_text("quantization: bnb-4bit\ndtype: bfloat16\nmax_tokens: 3\n")
    printed = yaml.safe_load(lean(model, "x", "--config", str(file), "--print-config")[1])
    assert printed["quantization"] == "bnb-4bit"
    code, out, err = lean(model, "x", "--config", str(file), "--json")
    assert code == 0
    report = json.loads(out)["weights"]
    assert report["format"] == "NF4"
    assert report["layers_quantized"] == report["layers_linear"] == 14
    assert report["bits"] == pytest.approx(8 * report["bytes_quantized"] / (2 * (64 * 64 * 3 + 64 * 128 * 3)), abs=1e-3)
    assert f"weights {report['bits']:.2f} bits NF4 in 14 linear layers" in err


def test_the_command_line_refuses_8bit_weights_on_a_cpu_in_one_line(tiny, lean):
    code, out, err = lean(str(tiny("llama", **NARROW)), "x", "--quantization", "bnb-8bit", "--device", "cpu")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "bnb-4bit" in err


# --- int8 on a GPU ---


def test_int8_products_in_bfloat16_log_no_line_each(bnb, caplog):
    product = bnb.autograd._functions.MatMul8bitLt
    weight = bnb.nn.Int8Params(torch.randn(32, 64), requires_grad=False, has_fp16_weights=False)
    state = bnb.MatmulLtState()
    state.threshold, state.has_fp16_weights = weights.OUTLIER, False
    out = product.apply(torch.randn(2, 64).bfloat16(), weight, None, None, state)
    assert out.shape == (2, 32)
    assert "cast" not in caplog.text


def test_int8_products_are_known_to_wait_for_the_host(bnb):
    layer = bnb.nn.Linear8bitLt(64, 32, False, has_fp16_weights=False, device="meta")
    assert weights.waits_for_host(nn.Sequential(nn.Linear(2, 2), layer))
    assert not weights.waits_for_host(nn.Linear(2, 2))
