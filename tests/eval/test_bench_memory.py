"""The read bandwidth is measured with what memory an engine leaves."""

import pytest
import torch
from fake_gpus import Card, install

from lean.eval.bench import memory
from lean.eval.bench.memory import COLD_BYTES, read_bandwidth

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("free", "wanted"), [(24 * 2**30, 2**30), (2**30, 2**29), (2 * COLD_BYTES, COLD_BYTES), (COLD_BYTES, None)]
)
def test_the_buffer_takes_half_of_what_is_free_and_never_fits_a_cache(monkeypatch, free, wanted):
    install(monkeypatch, Card(total=free))
    monkeypatch.setattr(memory, "seconds_of", lambda call, device: 1.0)
    monkeypatch.setattr(torch, "ones", lambda count, device: torch.empty(count, dtype=torch.float32, device="meta"))
    assert read_bandwidth(CUDA) == wanted
