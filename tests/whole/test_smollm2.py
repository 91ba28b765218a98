"""The demo model through lean's cache: text equal to transformers', fidelity as an independent simulation has it.

The figures of FIDELITY come from a dense simulation of the formats that shares no code with lean (float32, chunk 512,
the first 2,048 tokens of Python 3.11's help topics).
"""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import transformers
from helpers import one_sequence

from lean import LLM, EngineConfig, SamplingParams
from lean.eval.corpus import python_docs, text_hash
from lean.eval.score.fidelity import compare, read_reference
from lean.store.pull import pull

pytestmark = pytest.mark.slow

TEXT_SHA256 = "71f2ff5d99bdc1f9c48c5c2353ad138201c5ca1c377e0226857ef8fa89b8bcee"
PROMPTS = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Write a short story about a lighthouse keeper.",
    "How do I sort a list of numbers in Python?",
    "List five things to pack for a week in the mountains.",
)
# kv_dtype, residual length (None: the default 64 with 4 sinks), perplexity, mean KLD, allowed relative error of the KLD
FIDELITY = (
    ("fp32", None, 11.890, 0.0, 0.0),
    ("int8", 0, 11.886, 0.00024, 0.25),
    ("fp8", 0, 11.976, 0.0094, 0.25),
    ("k8v4", 0, 12.009, 0.0054, 0.25),
    ("int4", 0, 12.733, 0.050, 0.25),
    ("int8", None, 11.885, 0.00002, 0.15),
    ("int4", None, 11.982, 0.0049, 0.15),
    ("k6v4", None, 11.906, 0.00083, 0.15),
    ("pc4v3", None, 11.919, 0.0037, 0.15),
)


@pytest.fixture(autouse=True)
def _two_threads(_one_thread):
    torch.set_num_threads(2)


@pytest.fixture(scope="module")
def exact():
    """The exact engine: float32 weights, float32 cache. Others share its weights."""
    return LLM(str(pull("smollm2-135m")), EngineConfig(kv_dtype="fp32", dtype="float32"))


@pytest.fixture(scope="module")
def token_ids(exact):
    text = python_docs()
    if text_hash(text) != TEXT_SHA256:
        pytest.skip("another Python has other help topics, and the figures are of Python 3.11's")
    return exact.model.tokenizer(text[: 2048 * 6])["input_ids"][:2048]


def test_greedy_text_equals_transformers(exact):
    folder = exact.model.info.source.folder
    peer = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = [exact.encode(prompt) for prompt in PROMPTS]
    outputs = exact.generate(prompts, SamplingParams(max_tokens=48, temperature=0.0))
    for prompt, output in zip(prompts, outputs):
        ids = torch.tensor([prompt])
        result = peer.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=48,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        wanted = result.sequences[0, len(prompt) :].tolist()
        for step, (ours, theirs) in enumerate(zip(output.token_ids, wanted)):
            if ours != theirs:
                margin = float(result.logits[step][0, theirs] - result.logits[step][0, ours])
                assert margin < 1e-3, f"differs at step {step} by a logit margin of {margin}"
                break
        else:
            assert len(output.token_ids) == len(wanted)


@pytest.fixture(scope="module")
def reference(exact, token_ids):
    return read_reference(exact, one_sequence(token_ids))


@pytest.mark.parametrize(("kv_dtype", "residual", "perplexity", "kld", "tolerance"), FIDELITY)
def test_fidelity_is_that_of_the_independent_simulation(
    exact, reference, token_ids, kv_dtype, residual, perplexity, kld, tolerance
):
    engine = LLM(exact.model, EngineConfig(kv_dtype=kv_dtype, kv_residual_length=residual))
    result = compare(reference, engine)
    print(f"{kv_dtype} R={engine.plan.residual_length}: {result}")
    # Another CPU rounds products in another way, which flips codes: two caches of int4 differ by a standard error. The
    # simulation has that error too, and 1.4 of them is the error of a difference.
    assert result.ppl == pytest.approx(perplexity, rel=max(0.003, 2 * result.nll_delta_stderr))
    assert result.kld_mean == pytest.approx(kld, rel=tolerance, abs=1e-9)
    scored = float(engine.score(token_ids[:600]).double().mean())
    assert scored == pytest.approx(float(exact.score(token_ids[:600]).double().mean()), rel=0.05)


@pytest.mark.parametrize("kv_dtype", ["k8v4", "int4"])
def test_another_chunk_changes_less_than_the_format_does(exact, token_ids, kv_dtype):
    text = one_sequence(token_ids[:512])
    whole = LLM(exact.model, EngineConfig(kv_dtype=kv_dtype))
    chunked = LLM(exact.model, EngineConfig(kv_dtype=kv_dtype, prefill_chunk=64))
    chunk = compare(read_reference(whole, text), chunked).kld_mean
    own = compare(read_reference(exact, text), whole).kld_mean
    print(f"{kv_dtype}: KLD of chunk 64 against 512 {chunk:.2e}, of the format {own:.2e}")
    assert chunk < own


def test_deterministic_mode_is_bit_identical_in_bfloat16():
    model = LLM(str(pull("smollm2-135m")), EngineConfig(deterministic=True)).model
    ids = model.tokenizer(python_docs()[:900])["input_ids"][:40]

    def hidden(chunk):
        engine = LLM(model, EngineConfig(kv_dtype="k8v4", deterministic=True, prefill_chunk=chunk))
        return torch.cat([rows for _, rows in engine.hidden_states(ids)])

    once = hidden(40)
    assert all(torch.equal(once, hidden(chunk)) for chunk in (17, 1))


RESIDENT = """
    import ctypes
    import sys
    sys.path.append(TESTS)
    import resident
    from lean import LLM, EngineConfig, SamplingParams
    from lean.eval.corpus import python_docs
    from lean.store.pull import pull
    from lean.scoring import score_workspace_bytes

    def start(**options):
        # Many CPUs have no products in bfloat16: a prompt then takes five times as long.
        usual = {"dtype": "float32", "max_num_seqs": 1, "max_model_len": LENGTH, "threads": 2}
        llm = LLM(str(pull("smollm2-135m")), EngineConfig(**usual | options))
        llm.wait_until_compiled()
        ids = llm.model.tokenizer(python_docs()[:30000])["input_ids"][:LENGTH]
        ctypes.CDLL(None).malloc_trim(0)  # what the load has left over would hide as much of what comes
        resident.restart_peak()
        return llm, ids, resident.now()
"""
SCORE = """
    llm, ids, before = start()
    llm.score(ids)
    print(resident.peak() - before, llm.size.nbytes, score_workspace_bytes(llm.model))
"""
DECODE = """
    llm, ids, before = start(**OPTIONS)
    params = SamplingParams(max_tokens=33, temperature=0.0, ignore_eos=True)
    llm.add_request(ids[: LENGTH - params.max_tokens], params)
    while not llm.step():
        pass
    prefill = resident.peak() - before
    ctypes.CDLL(None).malloc_trim(0)  # how much of the prefill's memory malloc keeps differs from run to run
    resident.restart_peak()
    while llm.has_work:
        llm.step()
    assert llm.peak_use.tokens_held > LENGTH - 100
    print(prefill, resident.peak() - before, llm.size.nbytes)
"""
QUANTIZED = {"kv_dtype": "int4", "quantization": "bnb-4bit", "compile": True, "dtype": "bfloat16"}
reads_proc = pytest.mark.skipif(sys.platform != "linux", reason="reads the peak memory from /proc")


def measured(script: str, length: int, options: dict | None = None) -> list[int]:
    """The numbers of bytes that the script prints in a new process. ``length``: tokens."""
    given = f"TESTS, OPTIONS = {str(Path(__file__).parents[1] / 'support')!r}, {options!r}\nLENGTH = {length}\n"
    text = given + textwrap.dedent(RESIDENT) + textwrap.dedent(script)
    # One arena: what malloc keeps in those of other threads, 10 to 60 MiB, differs from run to run and from CPU to CPU.
    environment = os.environ | {"MALLOC_ARENA_MAX": "1"}
    run = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    return [int(number) for number in run.stdout.split()]


@reads_proc
def test_scoring_a_long_text_needs_the_pools_and_the_stated_slices():
    peak, pools, workspace = measured(SCORE, 4096)
    print(f"peak {peak / 2**20:.1f} MiB, pools {pools / 2**20:.1f} MiB, slices {workspace / 2**20:.1f} MiB")
    assert peak <= pools + workspace + 64 * 2**20


@reads_proc
@pytest.mark.parametrize(("options", "length", "more"), [({}, 4096, 32), (QUANTIZED, 1024, 64)], ids=str)
def test_decode_behind_a_long_text_needs_the_pools_and_next_to_nothing_more(options, length, more):
    """``more``: MiB. A compiled step of bnb-4bit unpacks the weights of a layer, of all layers they are 212 MiB."""
    if "quantization" in options:
        pytest.importorskip("bitsandbytes")
    prefill, peak, pools = measured(DECODE, length, options)
    print(f"prefill {prefill / 2**20:.1f} MiB, decode {peak / 2**20:.1f} MiB, pools {pools / 2**20:.1f} MiB")
    assert peak <= pools + more * 2**20
    assert peak <= prefill + 8 * 2**20
