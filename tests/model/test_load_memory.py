"""Loading quantized weights takes the memory of the loaded model and of its largest tensor, and little more."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType
from gguf_files import write_gguf
from quantized_checkpoints import write_quantized
from tiny import tiny_checkpoint

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads the peak memory from /proc")

SHAPE = {"num_hidden_layers": 3, "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16}
LARGEST = 2 * 1024 * 2816  # bytes in bfloat16
MORE = 10 * 2**20  # parts of a weight in float32, and what Python allocates
CHECKPOINTS = ("awq", "gptq", "int8", "packed")
FILES = ("Q4_1",)

SCRIPT = """
    import ctypes, gc, json, sys
    sys.path.append(TESTS)
    import resident
    import torch
    from tiny import EOS, byte_tokenizer
    from lean import EngineConfig
    from lean.model import load
    from lean.model.info import inspect_model
    from lean.store.source import resolve

    load.load_gguf_tokenizer = lambda file: (byte_tokenizer(), frozenset({EOS}))
    torch.set_num_threads(1)

    def loaded(path):
        # No product is timed, so that the CPU does not decide what is packed.
        config = EngineConfig(quantization="auto", dtype="bfloat16", deterministic=True)
        info = inspect_model(resolve(path), config)
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        resident.restart_peak()
        before = resident.now()
        use = load.load_model(info, torch.device("cpu"), True).weights
        return resident.peak() - before, use.quantized_bytes + use.exact_bytes, dict(use.formats)

    for path in WARM_UP:  # what is imported and allocated once
        loaded(path)
    for path in PATHS:
        print(json.dumps(loaded(path)))
"""


@pytest.fixture(scope="module")
def loads(tmp_path_factory):
    """By form: (peak of the resident memory that loading added, bytes of the loaded weights, their formats)."""
    folder = tmp_path_factory.mktemp("loads")
    forms, warm_up = [*CHECKPOINTS, *FILES], []
    for size, shape in (("small", {}), ("large", SHAPE)):
        plain = tiny_checkpoint(folder / size, "llama", **shape)
        for form in CHECKPOINTS:
            write_quantized(plain, folder / f"{size}-{form}", form)
        for form in FILES:
            write_gguf(plain, folder / f"{size}-{form}", quantization=GGMLQuantizationType[form])
        warm_up = warm_up or [str(folder / f"{size}-{form}") for form in forms]
    paths = [str(folder / f"large-{form}") for form in forms]
    given = f"TESTS = {str(Path(__file__).parents[1] / 'support')!r}\nWARM_UP, PATHS = {warm_up!r}, {paths!r}\n"
    run = subprocess.run([sys.executable, "-c", given + textwrap.dedent(SCRIPT)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return dict(zip(forms, map(json.loads, run.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("form", sorted([*CHECKPOINTS, *FILES]))
def test_the_peak_is_the_final_size_and_the_largest_tensor(loads, form):
    peak, final, formats = loads[form]
    print(f"{form}: peak {peak / 2**20:.1f} MiB, loaded {final / 2**20:.1f} MiB, {formats}")
    assert formats.get("int8" if form == "int8" else "int4", 0) >= 21
    assert peak <= final + LARGEST + MORE
