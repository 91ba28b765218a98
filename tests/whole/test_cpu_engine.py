"""A whole model on the C++ kernels: its perplexity, and the memory that a decode step allocates."""

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny import tokens
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lean import LLM, EngineConfig, SamplingParams
from lean.eval.corpus import Corpus
from lean.eval.score.perplexity import perplexity, prepare
from lean.kernels.cpu import binding, build

pytestmark = pytest.mark.skipif(build.find_library() is None, reason=f"not built: {build.HOW}")
TEXT = Corpus("sample", "The quick brown fox\n\njumps over the lazy dog, é😀! " * 8, "repeated")
SCORE = """
import sys, torch
from test_cpu_engine import ppl
torch.set_num_threads(int(sys.argv[2]))
print(*(f"{ppl(sys.argv[1], kv_dtype):.4g}" for kv_dtype in ("int8", "int4")))
"""


def ppl(folder: str, kv_dtype: str) -> float:
    llm = LLM(folder, EngineConfig(kv_dtype=kv_dtype, dtype="float32", max_num_seqs=1))
    nll = perplexity(llm, prepare(llm, TEXT)).nll
    return float(nll.double().mean().exp())


@pytest.fixture
def own_choice() -> Iterator[None]:
    yield
    binding.choose()


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8", "int4", "k8v4"])
def test_perplexity_has_four_equal_digits_on_every_path_and_number_of_threads(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, own_choice: None, kv_dtype: str
) -> None:
    """Speed tests never see a path that computes nonsense (https://github.com/ggml-org/llama.cpp/issues/23044)."""
    folder, found = str(tiny("llama")), {}
    for isa in (*binding.ISAS, "reference"):
        monkeypatch.setenv("LEAN_KERNELS", "reference" if isa == "reference" else "")
        monkeypatch.setenv("LEAN_CPU_ISA", "" if isa == "reference" else isa)
        try:
            binding.choose()
        except ValueError:
            continue
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found[isa, threads] = ppl(folder, kv_dtype)
    monkeypatch.undo()
    assert len(found) >= 4
    assert len({f"{value:.4g}" for value in found.values()}) == 1, found


@pytest.mark.slow
def test_perplexity_has_four_equal_digits_on_every_instruction_set_of_torch(tiny: Any) -> None:
    folder, found = str(tiny("llama")), {}
    known = ["default", "avx2", "avx512"]  # a CPU has those up to its own
    for capability in known[: known.index(torch.backends.cpu.get_cpu_capability().lower()) + 1]:
        for threads in ("1", "8") if capability == "avx2" else ("1",):
            paths = os.pathsep.join([os.path.dirname(__file__), *sys.path])
            environment = os.environ | {"ATEN_CPU_CAPABILITY": capability, "PYTHONPATH": paths}
            command = [sys.executable, "-c", SCORE, folder, threads]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            found[capability, threads] = done.stdout.split()
    assert len(set(map(tuple, found.values()))) == 1, found
    assert len(found["default", "1"]) == 2


class Allocated(TorchDispatchMode):
    """The bytes of all storages that torch's operators make, and the largest of them."""

    def __init__(self) -> None:
        super().__init__()
        self.total = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in known:
                self.total += tensor.untyped_storage().nbytes()
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("kv_dtype", ["int8", "k8v4"])
def test_a_decode_step_makes_nothing_of_the_size_of_the_cache(tiny: Any, kv_dtype: str) -> None:
    """No dequantized copy of what is cached (https://github.com/turboderp-org/exllamav2/issues/499), at any context."""
    folder = str(tiny("llama", max_position_embeddings=8192))
    used = {}
    for context in (512, 8000):
        llm = LLM(folder, EngineConfig(kv_dtype=kv_dtype, dtype="float32", max_num_seqs=1))
        llm.add_request(tokens(context), SamplingParams(max_tokens=8, ignore_eos=True))
        while not llm.step():
            pass
        llm.step()
        with Allocated() as allocated:
            assert len(llm.step()) == 1
        used[context] = allocated
    one_layer = (8000 - 512) * 2 * 16 * 4  # K of the further tokens in float32
    assert 0 < used[512].total <= used[8000].total < used[512].total + one_layer // 8
    assert used[8000].largest < one_layer // 8
