"""How long OpenMP's threads compute nothing but wait: they spin for work, then sleep.

A thread that spins takes the CPU from other processes, and uses up a CPU quota. The runtime reads its variables once,
when it is loaded, which `import torch` does.

Sources: https://gcc.gnu.org/onlinedocs/libgomp/GOMP_005fSPINCOUNT.html (GNU) and
https://openmp.llvm.org/design/Runtimes.html (LLVM, Intel)
"""

import os
import sys
from collections.abc import MutableMapping

SPIN = {"GOMP_SPINCOUNT": "5000", "KMP_BLOCKTIME": "1"}  # rounds of waiting (GNU); milliseconds (LLVM, Intel)
_POLICY = "OMP_WAIT_POLICY"

_set_here: list[str] = []


def bound_spin(environ: MutableMapping[str, str] = os.environ) -> None:
    """Bound the spin of the OpenMP runtime that torch will load. What the user set stays.

    Does nothing if torch is loaded already.
    """
    if "torch" in sys.modules or environ.get(_POLICY):
        return
    for name, value in SPIN.items():
        if not environ.get(name):
            environ[name] = value
            _set_here.append(name)


def spin_settings() -> dict[str, str]:
    """The variables that bound or set the spin, each with its value and who set it; none: threads spin long."""
    values = {name: os.environ[name] for name in (_POLICY, *SPIN) if os.environ.get(name)}
    return {name: f"{value} ({'lean' if name in _set_here else 'environment'})" for name, value in values.items()}
