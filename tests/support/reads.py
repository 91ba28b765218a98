"""What makes the host wait for a device, or lets a device's values decide on shapes."""

from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
_READS = {_aten._local_scalar_dense, _aten.nonzero, _aten.equal, _aten.masked_select, _aten.unique_dim, _aten._unique2}


class HostReads(TorchDispatchMode):
    """Counts operators, by name, that read a tensor's values on the host: item, bool, nonzero, masks as indices.

    On a CPU a copy to the host is none, so `lean.engine.host.to_host` is not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        packet = func.overloadpacket
        masks = packet is _aten.index and any(i is not None and i.dtype is torch.bool for i in args[1])
        if packet in _READS or masks:
            self.count[func.name()] += 1
        return func(*args, **(kwargs or {}))
