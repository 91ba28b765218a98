"""On a GPU where grouped products wait for the host, few rows are multiplied without it, with the same result."""

from collections import Counter

import pytest
import torch
from fake_gpus import Card, install
from tiny import tokens
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from lean import LLM, EngineConfig
from lean.model import experts
from lean.model.experts import groups_on_device, implementation, most_rows_without_host
from lean.model.info import inspect_model
from lean.model.load import load_model
from lean.store.source import resolve
from lean.units import ENDLESS

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
MIXTURE = AutoConfig.for_model("mixtral")
# Capability and dtype -> whether torch groups products on the device (aten/src/ATen/native/cuda/GroupedBlas.cpp).
ON_DEVICE = {
    (7, 5, torch.float16): False,
    (8, 0, torch.bfloat16): False,
    (8, 9, torch.bfloat16): False,
    (9, 0, torch.bfloat16): True,
    (9, 0, torch.float16): False,
    (9, 0, torch.float32): False,
    (10, 3, torch.bfloat16): True,
    (12, 0, torch.bfloat16): False,
}
# Operations that read on the host what the device computes.
HOST = ("_grouped_mm", "grouped_mm_fallback", "nonzero", "_local_scalar_dense", "item")


class Operations(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def config(kind: str, **extra):
    fields = {"hidden_size": 64, "intermediate_size": 128, "num_local_experts": 4, "num_experts_per_tok": 2}
    made = AutoConfig.for_model(kind, **fields, **extra)
    made._experts_implementation = implementation(made, CUDA, torch.bfloat16, False)
    return made


def layer_of(kind: str) -> torch.nn.Module:
    """The experts of one layer, in bfloat16."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return {"mixtral": MixtralExperts, "gpt_oss": GptOssExperts}[kind](config(kind))
    finally:
        torch.set_default_dtype(usual)


def operations(kind: str, rows: int) -> Counter[str]:
    """Those of one layer's experts, as a GPU would run them. No number is computed."""
    with FakeTensorMode(), torch.no_grad(), Operations() as seen:
        layer = layer_of(kind)
        chosen = torch.zeros(rows, 2, dtype=torch.int64)
        layer(torch.zeros(rows, 64, dtype=torch.bfloat16), chosen, torch.zeros(rows, 2, dtype=torch.bfloat16))
    return seen.count


@pytest.mark.parametrize(("case", "wanted"), ON_DEVICE.items(), ids=str)
def test_which_gpus_group_products_on_the_device(monkeypatch, case, wanted):
    major, minor, dtype = case
    install(monkeypatch, Card("a card", major, minor))
    assert groups_on_device(CUDA, dtype) is wanted
    assert implementation(MIXTURE, CUDA, dtype, deterministic=False) == (None if wanted else "lean")
    assert implementation(MIXTURE, CUDA, dtype, deterministic=True) == "eager"
    assert implementation(AutoConfig.for_model("llama"), CUDA, dtype, deterministic=False) is None


def test_amd_gpus_are_not_trusted_to_and_the_cpu_stays_as_it_is(monkeypatch):
    install(monkeypatch, Card("AMD Instinct MI300X", 9, 4, gcnArchName="gfx942"), hip="7.1")
    assert not groups_on_device(CUDA, torch.bfloat16)
    assert implementation(MIXTURE, CPU, torch.float32, deterministic=False) is None
    assert implementation(MIXTURE, CPU, torch.float64, deterministic=False) == "eager"


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_few_rows_are_multiplied_without_the_host(monkeypatch, kind):
    install(monkeypatch, Card("NVIDIA GeForce RTX 3090", 8, 6))
    expert = 2 * 64 * 128 * 3  # bytes in bfloat16
    monkeypatch.setattr(experts, "BYTES_PER_EXPERT", 2 * expert)  # 4 experts: 8 pairs of a row and an expert
    assert most_rows_without_host(layer_of(kind), CUDA, torch.bfloat16) == 4
    few, many = operations(kind, 4), operations(kind, 5)
    assert few["bmm"] == 2
    assert not any(few[name] for name in HOST)
    assert any(many[name] for name in HOST)


def test_large_experts_are_never_copied(monkeypatch):
    """Two experts of Mixtral 8x7B are 672 MiB in bfloat16."""
    install(monkeypatch, Card("NVIDIA GeForce RTX 3090", 8, 6))
    with torch.device("meta"):
        own = config("mixtral", num_hidden_layers=1)
        own.hidden_size, own.intermediate_size, own.num_local_experts = 4096, 14336, 8
        layer = torch.nn.ModuleList([MixtralExperts(own).bfloat16()])
    assert most_rows_without_host(layer, CUDA, torch.bfloat16) == 0


def test_a_model_without_experts_has_no_limit_and_a_loop_takes_none(monkeypatch, tiny):
    install(monkeypatch, Card("NVIDIA GeForce RTX 3090", 8, 6))
    assert most_rows_without_host(torch.nn.Linear(2, 2), CUDA, torch.bfloat16) == ENDLESS
    for name, wanted in (("eager", 0), ("grouped_mm", 0), ("batched_mm", ENDLESS)):
        own = config("mixtral")
        own._experts_implementation = name
        assert most_rows_without_host(MixtralExperts(own), CUDA, torch.bfloat16) == wanted


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize("limit", [0, 2**20], ids=["grouped", "batched"])
def test_both_products_of_lean_give_the_answers_of_the_usual_ones(monkeypatch, tiny, kind, limit):
    monkeypatch.setattr(experts, "BYTES_PER_EXPERT", limit)
    source, rows = resolve(str(tiny(kind, num_hidden_layers=2))), []
    for on_device in (True, False):
        monkeypatch.setattr(experts, "groups_on_device", lambda device, dtype, found=on_device: found)
        model = load_model(inspect_model(source, EngineConfig(dtype="float32")), CPU)
        llm = LLM(model, EngineConfig("fp32", max_model_len=64))
        assert model.module.config._experts_implementation == ("grouped_mm" if on_device else "lean")
        rows.append(torch.cat([part for _, part in llm.hidden_states(tokens(40))]))
    assert (rows[0] - rows[1]).abs().max() < 1e-5 * rows[0].abs().max()
