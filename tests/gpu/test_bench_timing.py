"""On a GPU benchmarks time kernels, not their launches from Python, and wait for the GPU that they measure.

A stand-in for torch.cuda notes what is asked of it.
"""

import pytest
import torch

from lean.eval.bench import memory, replay, timing
from lean.eval.bench.attention import _recordable
from lean.eval.bench.shape import Shape

SECOND = torch.device("cuda", 1)


@pytest.fixture
def waited(monkeypatch):
    """The devices that were waited for."""
    found = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: found.append(device))
    return found


def test_a_measurement_waits_for_its_own_gpu_before_and_after(waited):
    timing.seconds_of(lambda: waited.append("call"), SECOND)
    assert waited == [SECOND, "call", SECOND]
    waited.clear()
    timing.take_turns({"a": list, "b": list}, 2, SECOND)
    assert set(waited) == {SECOND}
    waited.clear()
    timing.seconds_of(list, torch.device("cpu"))
    assert waited == []


@pytest.fixture
def recorded(monkeypatch):
    """Stands in for CUDA graphs: (device, step) of what was recorded. A replay calls nothing of Python."""
    found = []

    class Recorder:
        def __init__(self, device):
            self.device = device

        def __call__(self, step):
            step()
            found.append((self.device, step))
            return lambda: None

    monkeypatch.setattr(replay, "CudaGraphs", Recorder)
    return found


def test_short_calls_are_recorded_once_and_replayed_until_the_wait_is_small(waited, recorded):
    made = []
    calls = [lambda: made.append("first"), lambda: made.append("second")]
    turn = replay.as_one(calls, SECOND)
    assert made == ["first", "second"]
    assert [device for device, _ in recorded] == [SECOND]
    assert set(waited) == {SECOND}
    turn.run()
    assert made == ["first", "second"]
    assert turn.calls == 2 * replay._MOST_REPLAYS  # these replays take no time


def test_long_calls_are_replayed_once(waited, recorded, monkeypatch):
    monkeypatch.setattr(replay, "seconds_of", lambda call, device: 0.1)
    assert replay.as_one([list, list, list], SECOND).calls == 3


def test_on_a_cpu_and_with_the_reference_the_calls_are_made_themselves(recorded):
    for place, record in ((torch.device("cpu"), True), (SECOND, False)):
        made = []
        turn = replay.as_one([lambda made=made: made.append(1)] * 3, place, record)
        turn.run()
        assert (len(made), turn.calls, recorded) == (3, 3, [])


def test_what_the_reference_serves_is_not_recorded(monkeypatch):
    def recordable(contender, dim=64):
        return _recordable(contender, Shape(2, 1, dim), torch.bfloat16, SECOND)

    assert recordable("int8")
    assert recordable("k=int8,v=int4 R 64")
    assert recordable("sdpa")
    assert not recordable("int4", 80)
    assert not recordable("bf16", 512)
    monkeypatch.setenv("LEAN_KERNELS", "reference")
    assert not recordable("int8")
    assert recordable("sdpa")


@pytest.mark.parametrize("gib", [0.5, 6, 8, 24])
def test_buffers_for_bandwidths_fit_beside_what_a_small_card_already_holds(gib, monkeypatch):
    free = int(gib * 2**30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 24 * 2**30))
    for count in (1, 2):
        taken = memory.buffer_bytes(SECOND, count)
        assert count * taken <= free / 2
        assert taken == 2**30 or 2 * count * taken == free
