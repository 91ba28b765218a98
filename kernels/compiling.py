"""Triton as a package and as a compiler: its version, which kernels it compiles, and where it keeps them."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any


def triton_version() -> str | None:
    """The version of the Triton that Python imports; None without one.

    Its distribution has many names: triton, triton-rocm, pytorch-triton-rocm and others. Raises ImportError where the
    package is there and cannot be imported.
    """
    try:
        return str(import_module("triton").__version__)
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        return None


@dataclass
class Compiled:
    """Kernels that were compiled, by name, not taken from the cache; ``seconds`` is the time that it took, ``folder``
    the cache."""

    kernels: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    folder: str = ""

    def __str__(self) -> str:
        names = ", ".join(f"{name} {count}" for name, count in sorted(self.kernels.items()))
        return (
            f"compiled {self.kernels.total()} GPU kernels in {self.seconds:.0f} s ({names}); Triton keeps them for the "
            f"next start in {self.folder}"
        )


@contextmanager
def compiled_kernels(tell: Callable[[str, Compiled], None] | None = None) -> Iterator[Compiled]:
    """What Triton compiles inside. ``tell`` is called after each kernel with its name and all until then."""
    from triton import knobs

    found, other = Compiled(folder=knobs.cache.dir), knobs.compilation.listener

    def listen(*, metadata: dict[str, Any], times: Any, cache_hit: bool, **more: Any) -> None:
        if not cache_hit:
            found.kernels[metadata["name"]] += 1
            found.seconds += times.total / 1e6  # from microseconds
            if tell is not None:
                tell(metadata["name"], found)
        if other is not None:
            other(metadata=metadata, times=times, cache_hit=cache_hit, **more)

    knobs.compilation.listener = listen
    try:
        yield found
    finally:
        knobs.compilation.listener = other
