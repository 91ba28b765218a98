"""A first start says which kernels Triton compiles, and where it keeps them; its version is that of the module."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
from failing_kernels import Kernel, gpu_back_end
from triton import knobs

from lean import LLM, EngineConfig
from lean.cli import doctor
from lean.cli.ending import run_to_end
from lean.cli.main import run_command
from lean.kernels.compiling import compiled_kernels, triton_version


def compiled(name, cache_hit):
    """Triton has compiled a kernel in two seconds, or found it in its cache."""
    times = SimpleNamespace(total=2_000_000)
    if knobs.compilation.listener is not None:
        knobs.compilation.listener(
            src=None, metadata={"name": name}, metadata_group={}, times=times, cache_hit=cache_hit
        )


@pytest.fixture
def on_gpu(monkeypatch, tmp_path):
    """``on_gpu(events)``: inside, launches report ``events``, pairs of a kernel and whether it was kept."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.setattr("lean.engine.assemble.backend", lambda *_: "Triton")

    def enter(events):
        left = iter(events)
        return gpu_back_end(Kernel(lambda: [compiled(*event) for event in left]))

    return enter


FIRST = [("kv_write", False), ("decode", False), ("merge", True), ("decode", False)]
SAID = "compiled 3 GPU kernels in 6 s (decode 2, kv_write 1); Triton keeps them for the next start in "


def test_a_first_start_says_what_it_compiles_and_where_that_is_kept(on_gpu, tiny, tmp_path, monkeypatch, capsys):
    folder = str(tiny("llama", num_hidden_layers=1))
    monkeypatch.setattr("sys.argv", ["lean", "run", folder, "hi", "--no-probe", "--max-tokens", "2"])
    with on_gpu(FIRST):
        assert run_to_end(run_command) == 0
    lines = capsys.readouterr().err.splitlines()
    assert "note: compiling GPU kernels; later starts find them compiled" in lines
    assert f"note: {SAID}{tmp_path / 'kept'}" in lines
    assert knobs.compilation.listener is None


def test_a_start_that_finds_its_kernels_says_nothing(on_gpu, tiny):
    config = EngineConfig(max_num_seqs=1, max_model_len=64)
    with on_gpu([("decode", True)] * 3):
        assert not [note for note in LLM(str(tiny("llama", num_hidden_layers=1)), config).notes if "GPU" in note]


def test_programs_are_told_of_each_kernel_and_find_the_note(on_gpu, tiny):
    told = []
    with on_gpu(FIRST):
        llm = LLM(
            str(tiny("llama", num_hidden_layers=1)),
            EngineConfig(max_num_seqs=1, max_model_len=64),
            on_compile=lambda name, all_until_then: told.append((name, all_until_then.kernels.total())),
        )
    assert told == [("kv_write", 1), ("decode", 2), ("decode", 3)]
    assert [note for note in llm.notes if note.startswith(SAID)]


def test_a_listener_of_the_program_still_hears_everything(monkeypatch):
    heard = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda **event: heard.append(event["cache_hit"]))
    with compiled_kernels() as found:
        compiled("decode", True)
        compiled("decode", False)
    assert (heard, found.kernels.total()) == ([True, False], 1)


def packages(monkeypatch, module):
    monkeypatch.setitem(sys.modules, "triton", module)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    return next(finding for finding in doctor.packages() if finding.topic == "triton")


def test_the_version_of_triton_is_the_modules_whatever_its_distribution_is_called(monkeypatch):
    """On ROCm the distribution is triton-rocm or pytorch-triton-rocm."""
    rocm = ModuleType("triton")
    rocm.__version__ = "3.6.0+rocm7.0"  # type: ignore[attr-defined]

    def no_such_distribution(name):
        raise doctor.PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "version", no_such_distribution)
    found = packages(monkeypatch, rocm)
    assert (found.level, found.text) == ("ok", "3.6.0+rocm7.0")
    assert triton_version() == "3.6.0+rocm7.0"


def test_a_triton_that_is_missing_or_broken_is_said_to_be_that(monkeypatch):
    found = packages(monkeypatch, None)
    assert (found.level, found.text) == ("note", "not installed")

    def broken(name):
        raise ImportError("libtriton.so: version `GLIBC_2.38' not found")

    monkeypatch.setattr("lean.kernels.compiling.import_module", broken)
    found = packages(monkeypatch, None)
    assert (found.level, "GLIBC_2.38" in found.text) == ("problem", True)
