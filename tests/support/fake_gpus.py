"""Stand-ins for GPUs: what torch.cuda says about cards, and an account of their memory. No kernel runs on them."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

GIB = 2**30
WHEEL = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")  # torch 2.11 for CUDA 13


@dataclass
class Card:
    """A GPU as torch.cuda describes it, with memory in bytes.

    Attributes:
        used: held outside torch's allocator: by other programs, by libraries and by loaded kernels.
        allocated: in tensors. reserved: taken from the driver by torch's allocator, tensors included.
        peak_allocated, peak_reserved: their largest values since they were reset.
    """

    name: str = "NVIDIA GeForce RTX 3090"
    major: int = 8
    minor: int = 6
    gcnArchName: str = ""  # torch's spelling
    multi_processor_count: int = 82
    total: int = 24 * GIB
    used: int = 0
    allocated: int = 0
    reserved: int = 0
    split: int = 0  # free parts of segments that are in use
    peak_allocated: int = field(default=0, init=False)
    peak_reserved: int = field(default=0, init=False)

    def allocate(self, nbytes: int) -> None:
        """Torch's allocator: what is reserved and unused serves first. Raises OutOfMemoryError."""
        more = max(0, self.allocated + nbytes - self.reserved)
        if self.used + self.reserved + more > self.total:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.allocated, self.reserved = self.allocated + nbytes, self.reserved + more
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def free(self, nbytes: int) -> None:
        self.allocated -= nbytes

    @property
    def info(self) -> tuple[int, int]:
        return self.total - self.used - self.reserved, self.total

    @property
    def stats(self) -> dict[str, int]:
        return {
            "reserved_bytes.all.current": self.reserved,
            "active_bytes.all.current": self.allocated,
            "inactive_split_bytes.all.current": self.split,
        }

    def empty_cache(self) -> None:
        self.reserved = self.allocated

    def reset_peaks(self) -> None:
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved


def install(patch: pytest.MonkeyPatch, *cards: Card, codes: tuple[str, ...] = WHEEL, hip: str | None = None) -> None:
    """From here on torch.cuda has these cards. ``codes``: what torch is compiled for."""

    def card(device: Any = None) -> Card:
        index = device.index if isinstance(device, torch.device) else device
        return cards[index or 0]

    def capability(device: Any = None) -> tuple[int, int]:
        return card(device).major, card(device).minor

    fake = SimpleNamespace(
        is_available=lambda: bool(cards),
        device_count=lambda: len(cards),
        get_device_properties=card,
        get_device_capability=capability,
        get_device_name=lambda device=None: card(device).name,
        get_arch_list=lambda: list(codes),
        mem_get_info=lambda device=None: card(device).info,
        memory_allocated=lambda device=None: card(device).allocated,
        memory_reserved=lambda device=None: card(device).reserved,
        memory_stats=lambda device=None: card(device).stats,
        max_memory_allocated=lambda device=None: card(device).peak_allocated,
        max_memory_reserved=lambda device=None: card(device).peak_reserved,
        reset_peak_memory_stats=lambda device=None: card(device).reset_peaks(),
        empty_cache=lambda: [own.empty_cache() for own in cards],
        synchronize=lambda device=None: None,
    )
    for name, value in vars(fake).items():
        patch.setattr(torch.cuda, name, value)
    patch.setattr(torch.version, "hip", hip)
