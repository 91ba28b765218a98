"""Which decode steps are recorded is decided before recording; the others run eagerly, and a line says why."""

from types import SimpleNamespace

import pytest
import torch
from fake_gpus import Card, install
from transformers import AutoConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from lean import EngineConfig
from lean.engine import assemble
from lean.engine.cuda_graphs import WaitsForDevice
from lean.engine.recordable import Recordable, recordable
from lean.kernels.layout import KVLayout
from lean.kernels.serving import backend, needs_of
from lean.model import experts
from lean.quant import parse_kv_dtype
from lean.units import ENDLESS

CUDA = torch.device("cuda", 0)


class Linear8bitLt(torch.nn.Module):
    """Named as bitsandbytes' layer."""


def answer(module: torch.nn.Module, kv_dtype: str = "int8", dim: int = 64, dtype: torch.dtype = torch.bfloat16):
    model = SimpleNamespace(module=module, device=CUDA, info=SimpleNamespace(dtype=dtype))
    needs = needs_of([KVLayout(*parse_kv_dtype(kv_dtype), 1, dim, dim, 16)], dtype)
    return recordable(model, needs, backend(CUDA, needs))


def mixture(products: str) -> torch.nn.Module:
    config = AutoConfig.for_model("mixtral", hidden_size=64, intermediate_size=128, num_local_experts=4)
    config._experts_implementation = products
    return MixtralExperts(config).bfloat16()


def test_a_plain_model_has_no_limit():
    assert answer(torch.nn.Linear(2, 2)) == (ENDLESS, "")


def test_kernels_weights_and_experts_that_read_on_the_host_are_not_recorded(monkeypatch):
    install(monkeypatch, Card())
    rows, why = answer(torch.nn.Linear(2, 2), "int4", 80)
    assert (rows, "int4 with head_dim 80" in why) == (0, True)
    rows, why = answer(torch.nn.Sequential(Linear8bitLt()))
    assert (rows, "bitsandbytes" in why) == (0, True)
    for products in ("eager", "grouped_mm"):
        rows, why = answer(mixture(products))
        assert (rows, "experts" in why) == (0, True)


def test_steps_whose_experts_are_copied_are_recorded_up_to_their_number(monkeypatch):
    install(monkeypatch, Card())
    products = experts.implementation(AutoConfig.for_model("mixtral"), CUDA, torch.bfloat16, deterministic=False)
    monkeypatch.setattr(experts, "BYTES_PER_EXPERT", 2 * 64 * 128 * 3)  # one copy of each expert: 4 pairs
    rows, why = answer(mixture(products))
    assert (rows, "experts" in why) == (2, True)


@pytest.fixture
def start(monkeypatch):
    """``start(found, **config)``: the parts of an engine on a stand-in for a GPU after its decode steps are prepared.

    ``found``: what can be recorded. ``parts.prepared``: for how many sequences steps were prepared, and whether they
    were recorded. ``waits``: recording finds that a step waits for the device.
    """
    install(monkeypatch, Card())
    monkeypatch.setattr(assemble, "CudaGraphs", lambda device: "graphs")

    def run(found: Recordable, *, waits: bool = False, **config):
        prepared = []

        def prepare_decode(rows, length, backend, record):
            prepared.append((rows, record is not None))
            if waits and record is not None:
                raise WaitsForDevice("modeling_x.py, line 7, waits for the device")
            return 0.0

        parts = SimpleNamespace(
            config=EngineConfig(**config), notes=[], kernel_name="Triton", cuda_graphs=False, graph_bytes=0,
            model=SimpleNamespace(device=CUDA), size=SimpleNamespace(max_model_len=64),
            runner=SimpleNamespace(prepare_decode=prepare_decode), prepared=prepared,
        )  # fmt: skip
        assemble.prepare_decode(parts, found)
        return parts

    return run


def test_without_a_limit_all_steps_are_recorded_and_nothing_is_said(start):
    parts = start(Recordable(ENDLESS, ""))
    assert (parts.prepared, parts.cuda_graphs, parts.notes) == ([(8, True)], True, [])


def test_what_cannot_be_recorded_is_never_tried(start):
    parts = start(Recordable(0, "a reason"))
    assert (parts.prepared, parts.cuda_graphs) == ([], False)
    assert parts.notes == ["decode steps run without CUDA graphs: a reason"]


def test_small_steps_are_recorded_where_large_ones_cannot_be(start):
    parts = start(Recordable(3, "a reason"))
    assert (parts.prepared, parts.cuda_graphs) == ([(3, True)], True)
    assert parts.notes == ["decode steps of more than 3 sequences run without CUDA graphs: a reason"]
    assert start(Recordable(3, "a reason"), max_num_seqs=3).notes == []


def test_a_wait_that_is_found_while_recording_begins_is_said_and_the_engine_starts(start):
    parts = start(Recordable(ENDLESS, ""), waits=True)
    assert (parts.prepared, parts.cuda_graphs) == ([(8, True)], False)
    assert parts.notes == ["decode steps run without CUDA graphs: modeling_x.py, line 7, waits for the device"]


def test_compiled_steps_of_all_sizes_stay_compiled(start):
    parts = start(Recordable(3, "a reason"), compile=True)
    assert parts.prepared == [(8, False)]
    parts = start(Recordable(ENDLESS, ""), compile=True, waits=True)
    assert parts.prepared == [(8, True), (8, False)]


def test_eager_steps_that_were_asked_for_need_no_line(start):
    parts = start(Recordable(0, "a reason"), enforce_eager=True)
    assert (parts.prepared, parts.notes) == ([], [])
