"""Which device lean takes, and what of its memory is free. GPUs are stand-ins."""

import pytest
import torch
from engine_state import forbid_reading_weights
from fake_gpus import GIB, WHEEL, Card, install
from helpers import refusal

from lean import LLM, EngineConfig
from lean.device import choose_device, free_bytes, lacks_code, passed_over, runs

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
PASCAL = {"name": "NVIDIA GeForce GTX 1080", "major": 6, "minor": 1}
VOLTA = {"name": "NVIDIA TITAN V", "major": 7, "minor": 0}
# Card -> whether torch's wheel has code for it.
NVIDIA = {
    (6, 1): False, (7, 0): False, (7, 5): True, (8, 0): True, (8, 6): True, (8, 9): True, (9, 0): True, (10, 3): True,
    (12, 0): True, (12, 1): True, (13, 0): True,
}  # fmt: skip


@pytest.mark.parametrize(("capability", "served"), NVIDIA.items(), ids=str)
def test_a_gpu_is_used_where_torch_has_machine_code_or_ptx_for_it(monkeypatch, capability, served):
    major, minor = capability
    install(monkeypatch, Card("a card", major, minor))
    assert (lacks_code(CUDA) is None) == served
    assert choose_device("auto") == (CUDA if served else CPU)


@pytest.mark.parametrize(
    ("code", "target", "served"),
    [
        ("sm_80", "sm_86", True), ("sm_86", "sm_80", False), ("sm_80", "sm_90", False), ("compute_80", "sm_90", True),
        ("compute_90", "sm_86", False), ("sm_90a", "sm_90", True), ("compute_90a", "sm_100", False),
        ("sm_100f", "sm_103", True), ("sm_100f", "sm_120", False), ("gfx90a", "gfx90a", True),
        ("gfx1100", "gfx1101", False), ("gfx11-generic", "gfx1101", True), ("gfx10-3-generic", "gfx1030", True),
        ("gfx10-3-generic", "gfx1010", False), ("sm_80", "gfx90a", False), ("something new", "sm_80", False),
    ],
)  # fmt: skip
def test_what_code_runs_where(code, target, served):
    assert runs(code, target) is served


def test_of_amd_gpus_the_name_decides(monkeypatch):
    card = Card("AMD Radeon RX 6700 XT", 10, 3, gcnArchName="gfx1031")
    install(monkeypatch, card, codes=("gfx90a", "gfx1030"), hip="7.1")
    assert "gfx1031" in lacks_code(CUDA)
    card = Card("AMD Instinct MI210", 9, 0, gcnArchName="gfx90a:sramecc+:xnack-")
    install(monkeypatch, card, codes=("gfx90a", "gfx1030"), hip="7.1")
    assert lacks_code(CUDA) is None


def test_a_torch_that_names_no_code_is_trusted(monkeypatch):
    install(monkeypatch, Card(**PASCAL), codes=())
    assert choose_device("auto") == CUDA


def test_auto_takes_the_first_gpu_that_can_be_used_and_says_so(monkeypatch):
    install(monkeypatch, Card(**PASCAL), Card())
    chosen = choose_device("auto")
    assert chosen == torch.device("cuda", 1)
    [line] = passed_over(chosen)
    assert line.startswith("running on cuda:1: NVIDIA GeForce GTX 1080 is sm_61")
    install(monkeypatch, Card(), Card(**PASCAL))
    assert passed_over(choose_device("auto")) == []


def test_an_engine_on_the_cpu_says_why_the_gpu_is_not_used(monkeypatch, tiny):
    folder = str(tiny("llama"))
    install(monkeypatch, Card(**VOLTA))
    llm = LLM(folder, EngineConfig(max_model_len=64))
    assert llm.model.device == CPU
    [note] = [note for note in llm.notes if "TITAN" in note]
    assert note.startswith("running on cpu: NVIDIA TITAN V is sm_70, and torch ")
    assert note.endswith(f"has code for {', '.join(WHEEL)} only")


def test_a_gpu_that_is_asked_for_by_name_is_refused_before_weights_are_read(monkeypatch, tiny):
    folder = str(tiny("llama"))
    install(monkeypatch, Card(**VOLTA))
    monkeypatch.setattr(torch, "empty", lambda *_, device: type("OnGpu", (), {"device": CUDA}))
    forbid_reading_weights(monkeypatch)
    message = refusal(LLM, folder, EngineConfig(device="cuda"))
    assert message.startswith("device 'cuda' cannot be used: NVIDIA TITAN V is sm_70")
    assert "--device cpu" in message


def test_memory_that_torch_keeps_unused_is_free(monkeypatch):
    card = Card(total=24 * GIB, used=1 * GIB)
    install(monkeypatch, card)
    card.allocate(20 * GIB)
    assert free_bytes(CUDA) == 3 * GIB
    card.free(20 * GIB)  # an engine that is gone: the driver has 3 GiB, torch keeps 20
    assert card.info[0] == 3 * GIB
    assert free_bytes(CUDA) == 23 * GIB
    card.split = 2 * GIB  # torch cannot give back parts of a segment
    assert free_bytes(CUDA) == 21 * GIB
