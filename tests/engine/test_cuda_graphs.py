"""CUDA graphs follow the rules of torch for memory pools and streams, which a stand-in for torch.cuda keeps."""

import contextlib
import warnings

import pytest
import torch

from lean.engine.cuda_graphs import CudaGraphs, WaitsForDevice


class FakeCuda:
    """What `CudaGraphs` uses of torch.cuda.

    The allocator's rule (c10/cuda/CUDACachingAllocator.cpp, create_or_incref_pool): a pool whose last graph is gone
    stays known while memory is left in it, and recording into it again is an internal error.
    """

    def __init__(self) -> None:
        self.devices = [0]
        self.streams: list[FakeStream] = []
        self.current: list[FakeStream] = [FakeStream(0)]
        self.users: dict[object, int] = {}
        self.recorded_on: list[FakeStream] = []
        self.sync_debug_mode = "default"

    def get_sync_debug_mode(self) -> str:
        return self.sync_debug_mode

    def set_sync_debug_mode(self, mode: str) -> None:
        self.sync_debug_mode = mode

    def wait(self) -> None:
        """What torch does when the host reads what the device computes."""
        if self.sync_debug_mode == "warn":
            warnings.warn("called a synchronizing CUDA operation", stacklevel=2)

    def Stream(self) -> "FakeStream":
        self.streams.append(FakeStream(self.devices[-1]))
        return self.streams[-1]

    def current_stream(self) -> "FakeStream":
        return self.current[-1]

    @contextlib.contextmanager
    def device(self, device: torch.device):
        self.devices.append(device.index)
        yield
        self.devices.pop()

    @contextlib.contextmanager
    def stream(self, stream: "FakeStream"):
        assert stream.device == self.devices[-1], "a stream of another device"
        self.current.append(stream)
        yield
        self.current.pop()

    def graph_pool_handle(self) -> object:
        return object()

    def CUDAGraph(self) -> "FakeGraph":
        return FakeGraph(self)

    @contextlib.contextmanager
    def graph(self, graph: "FakeGraph", pool: object, stream: "FakeStream"):
        assert self.users.get(pool, 1) > 0, "INTERNAL ASSERT FAILED: use_count > 0"
        self.users[pool] = self.users.get(pool, 0) + 1
        graph.pool = pool
        self.recorded_on.append(stream)
        with self.stream(stream):
            yield


class FakeStream:
    def __init__(self, device: int) -> None:
        self.device = device

    def wait_stream(self, other: "FakeStream") -> None:
        pass


class FakeGraph:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.pool = cuda, None

    def replay(self) -> None:
        pass

    def __del__(self) -> None:
        if self.pool is not None:
            self.cuda.users[self.pool] -= 1


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    names = ("Stream", "current_stream", "device", "stream", "graph_pool_handle", "CUDAGraph", "graph")
    for name in (*names, "get_sync_debug_mode", "set_sync_debug_mode"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    return fake


def step() -> torch.Tensor:
    return torch.zeros(1)


def test_steps_can_be_recorded_again_after_all_are_gone(cuda):
    graphs = CudaGraphs(torch.device("cuda", 0))
    for _ in range(3):
        steps = [graphs(step), graphs(step)]
        assert [count for count in cuda.users.values() if count] == [2], "recorded steps share one pool"
        del steps
        graphs.forget()


def test_all_steps_warm_up_and_are_recorded_on_one_stream(cuda):
    graphs = CudaGraphs(torch.device("cuda", 0))
    seen = []

    def watched() -> torch.Tensor:
        seen.append(cuda.current_stream())
        return step()

    kept = [graphs(watched) for _ in range(3)]
    assert set(seen) == set(cuda.recorded_on) == set(cuda.streams)
    assert len(kept) == len(cuda.recorded_on) == 3
    assert len(cuda.streams) == 1


def test_each_device_has_a_stream_of_its_own(cuda):
    kept = [CudaGraphs(torch.device("cuda", index))(step) for index in (0, 1)]
    assert [stream.device for stream in cuda.recorded_on] == [0, 1]
    assert len(kept) == 2


def test_a_step_that_waits_for_the_device_is_refused_before_it_is_recorded(cuda):
    def waits() -> torch.Tensor:
        cuda.wait()
        return step()

    with pytest.raises(WaitsForDevice, match=r"^test_cuda_graphs\.py, line \d+, waits for the device$"):
        CudaGraphs(torch.device("cuda", 0))(waits)
    assert cuda.recorded_on == []
    assert cuda.sync_debug_mode == "default"
    assert CudaGraphs(torch.device("cuda", 0))(step)


def test_the_first_call_of_a_step_may_wait(cuda):
    """Kernels are compiled and constants are made there; it is not recorded."""
    calls = []

    def waits_once() -> torch.Tensor:
        if not calls:
            cuda.wait()
        calls.append(None)
        return step()

    CudaGraphs(torch.device("cuda", 0))(waits_once)
    assert len(calls) == 3
    assert len(cuda.recorded_on) == 1


def test_other_warnings_of_a_step_are_still_shown(cuda):
    def warns() -> torch.Tensor:
        warnings.warn("look out", stacklevel=1)
        return step()

    with pytest.warns(UserWarning, match="look out"):
        CudaGraphs(torch.device("cuda", 0))(warns)
