"""Decode steps on fixed tensors: a step compiled or recorded once serves all later steps and equals the eager step.

Lengths exceed the sliding window of 32 tokens, the user's window, the residual and the exact sinks.
"""

import functools
from collections.abc import Callable

import pytest
import torch
from engine_state import check_integrity, manager, runner, scheduler
from helpers import refusal
from tiny import KINDS, tokens
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from lean import LLM, EngineConfig, SamplingParams
from lean.engine import decode_steps
from lean.engine.cuda_graphs import Step
from lean.engine.decode_batch import DecodeBatch
from lean.engine.decode_steps import buckets, fit_compilers, keep_compiled_code
from lean.errors import KernelError
from lean.kernels.ops import paged_attention
from lean.machine.cpus import Cpus
from lean.model.info import inspect_model
from lean.model.load import LoadedModel, load_model
from lean.report import start_up_line
from lean.store.source import resolve

pytestmark = pytest.mark.usefixtures("home")  # compiled code lies beside the models

TWO_LAYERS = {"num_hidden_layers": 2}
SMALL = dict.fromkeys(KINDS, TWO_LAYERS) | {
    kind: {**TWO_LAYERS, "layer_types": ["sliding_attention", "full_attention"]} for kind in ("gemma2", "gemma3")
}
RESIDUAL = {"kv_residual_length": 8, "sinks": 2}
WINDOW = {"window": 40, "sinks": 2}
# The models are float64: another number of rows changes the last bits of a product, and in float64 that flips no code
# of the cache. Experts in float64 are a loop over the chosen ones, which is no fixed graph. So mixtures of experts are
# float32 and have an exact cache, which has no codes. Mistral's layers have a sliding window already.
KV = {kind: {"kv_dtype": "k8v4", **RESIDUAL, **WINDOW} for kind in KINDS} | {
    "mistral": {"kv_dtype": "int8", **RESIDUAL},
    "phi3": {"kv_dtype": "int4", **RESIDUAL, **WINDOW},
    "mixtral": {"kv_dtype": "fp32", **WINDOW},
    "gpt_oss": {"kv_dtype": "fp32", **WINDOW},
}


@pytest.fixture(scope="module")
def model(tiny):
    @functools.cache
    def read(kind: str, dtype: str | None = None) -> LoadedModel:
        dtype = dtype or ("float32" if kind in ("mixtral", "gpt_oss") else "float64")
        source = resolve(str(tiny(kind, **SMALL[kind])))
        return load_model(inspect_model(source, EngineConfig(dtype=dtype)), torch.device("cpu"))

    return read


class CountingBackend:
    """torch.compile's ``eager`` back end, counting the graphs it is given."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable:
        self.graphs += 1
        return graph.forward


class CalledAgain:
    """Stands in for CUDA graphs: a recorded step runs again on the same tensors and writes the same output."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def __call__(self, step: Step) -> Step:
        self.recorded += 1
        output = step().clone()

        def replay() -> torch.Tensor:
            self.replayed += 1
            return output.copy_(step())

        return replay

    def forget(self) -> None:
        pass


def start(model: LoadedModel, backend: object = None, record: object = None, **config: object) -> LLM:
    llm = LLM(model, EngineConfig(**{"max_num_seqs": 4, "max_model_len": 128, "block_size": 8, **config}))
    if backend is not None or record is not None:
        runner(llm).prepare_decode(llm.config.max_num_seqs, llm.size.max_model_len, backend, record)
    return llm


def answers(llm: LLM, lengths: tuple[int, ...] = (61, 3, 33), max_tokens: int = 24) -> list[list[tuple[int, float]]]:
    """Greedy tokens and their log-probabilities; the requests end at different times, so that rows become padding."""
    ids = [
        llm.add_request(
            tokens(length, seed=length), SamplingParams(max_tokens - 5 * i, temperature=0, ignore_eos=True, logprobs=0)
        )
        for i, length in enumerate(lengths)
    ]
    found: dict[int, list] = {number: [] for number in ids}
    while llm.has_work:
        for part in llm.step():
            found[part.request_id] += [(entry.token_id, entry.logprob) for entry in part.logprobs]
    return list(found.values())


def same(got: list, want: list) -> None:
    assert [[token for token, _ in row] for row in got] == [[token for token, _ in row] for row in want]
    for one, other in zip(got, want):
        assert [p for _, p in one] == pytest.approx([p for _, p in other], abs=1e-5)


def test_buckets_double_up_to_the_most_sequences():
    assert [buckets(n) for n in (1, 2, 3, 8, 12)] == [(1,), (1, 2), (1, 2, 3), (1, 2, 4, 8), (1, 2, 4, 8, 12)]


@pytest.mark.parametrize("kind", KINDS)
def test_layers_that_are_alike_are_compiled_once_per_bucket_and_equal_eager_ones(model, kind):
    backend = CountingBackend()
    compiled = start(model(kind), backend, **KV[kind])
    alike = 1 if kind not in ("gemma2", "gemma3", "gpt_oss") else 2  # sliding and full layers
    assert backend.graphs == alike * len(buckets(4))
    same(answers(compiled), answers(start(model(kind), **KV[kind])))
    assert backend.graphs == alike * len(buckets(4)), "longer sequences compiled again"


def hidden(llm: LLM, count: int) -> torch.Tensor:
    """Hidden states of a text that runs token by token: every step is a decode step."""
    return torch.cat([rows for _, rows in llm.hidden_states(tokens(count))])


@pytest.mark.parametrize("way", ["compiled", "recorded", "compiled and recorded"])
def test_a_crowd_that_is_preempted_gets_the_tokens_of_eager_steps(model, way):
    few = {**KV["llama"], "window": None, "num_blocks": 17, "max_num_batched_tokens": 24}
    backend = "eager" if "compiled" in way else None
    record = CalledAgain() if "recorded" in way else None
    eager, other = start(model("llama"), **few), start(model("llama"), backend, record, **few)
    lengths = (30, 21, 9, 40, 1, 17)
    same(answers(other, lengths, 48), answers(eager, lengths, 48))
    assert other.num_preemptions == eager.num_preemptions > 0
    check_integrity(other)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_recorded_step_is_made_once_per_bucket_and_run_again_for_every_token(model, deterministic):
    record, config = CalledAgain(), {"prefill_chunk": 1, "deterministic": deterministic, **KV["llama"]}
    llm = start(model("llama"), record=record, **config)
    assert record.recorded == len(buckets(4))
    ready = record.replayed
    # One sequence in bucket 1 has no padding: the same products, the same bits. No later step overwrites a row.
    assert torch.equal(hidden(llm, 100), hidden(start(model("llama"), **config), 100))
    assert (record.recorded, record.replayed) == (len(buckets(4)), ready + 100)


def test_recorded_steps_reach_little_further_than_the_sequences(model, monkeypatch):
    """A recorded grid covers all positions of the block tables: those of a short sequence must be narrow."""
    monkeypatch.setattr("lean.engine.decode_steps.SHORTEST_REACH", 16)
    record = CalledAgain()
    config = {"prefill_chunk": 1, **KV["llama"], "max_model_len": 300, "max_num_seqs": 1}
    llm = start(model("llama"), record=record, **config)
    want, reached = hidden(start(model("llama"), **config), 150), []

    def watched(query, pool, block_tables, starts, seq_lens, **rule):
        reached.append((block_tables.shape[1] * pool.layout.block_size, int(seq_lens.max())))
        return paged_attention(query, pool, block_tables, starts, seq_lens, **rule)

    monkeypatch.setattr("lean.model.attention.paged_attention", watched)
    assert torch.equal(hidden(llm, 150), want)
    assert record.recorded == 4  # tables for 304, 16, 64 and 256 tokens
    assert all(width <= max(16, 4 * length) for width, length in reached if length)
    assert max(length for _, length in reached) == 150


def test_padding_changes_no_bit_in_deterministic_mode(model):
    config = {**KV["llama"], "deterministic": True}
    recorded = answers(start(model("llama"), record=CalledAgain(), **config))
    assert recorded == answers(start(model("llama"), **config))


def test_prompts_and_mixed_steps_stay_eager(model):
    record = CalledAgain()
    llm = start(model("llama"), record=record, prefill_chunk=8, **KV["llama"])
    ready = record.replayed
    llm.add_request(tokens(17), SamplingParams(max_tokens=20))
    for taken in (0, 0, 1, 2):  # two chunks of the prompt, its last token alone, a token
        llm.step()
        assert record.replayed == ready + taken
    llm.add_request(tokens(30), SamplingParams(max_tokens=2))
    llm.step()
    assert record.replayed == ready + 2


def test_making_steps_ready_leaves_the_cache_as_it_was(model):
    llm = start(model("llama"), **KV["llama"])
    before = [arena.clone() for arena in llm.cache.arenas]
    runner(llm).prepare_decode(4, 128, None, CalledAgain())
    assert all(torch.equal(arena, was) for arena, was in zip(llm.cache.arenas, before))


def test_rows_behind_the_sequences_are_padding(model):
    llm = start(model("llama"), **KV["llama"])
    for length in (61, 3):
        llm.add_request(tokens(length), SamplingParams(max_tokens=9, ignore_eos=True))
    llm.step()
    chunks = scheduler(llm).schedule()
    batch = DecodeBatch(manager(llm), 4, 128, torch.device("cpu"), torch.float64, runner(llm).sink_rotary)
    batch.fill(chunks, [20, 0])
    found, want = batch.inputs(batch.width).batch, runner(llm).batch(chunks)
    assert found.query_start_loc.tolist() == [0, 1, 2, 2, 2]
    assert found.seq_lens.tolist() == [62, 4, 0, 0]
    assert torch.equal(found.positions[:2], want.positions)
    for slots, own in zip(found.slot_mapping, want.slot_mapping):
        assert torch.equal(slots, torch.cat((own, torch.tensor([-1, -1]))))
    for tables, own in zip(found.block_tables, want.block_tables):
        assert tables.shape == (4, 16)  # as wide as 128 tokens need
        assert torch.equal(tables[:2, : own.shape[1]], own)
        assert not tables[:2, own.shape[1] :].any()
        assert not tables[2:].any()
    assert torch.equal(found.sink_turn.cos[:2], want.sink_turn.cos)
    assert torch.equal(found.sink_turn.sin[:2], want.sink_turn.sin)
    assert (found.sink_turn.cos[2:] == 1).all()
    assert not found.sink_turn.sin[2:].any()


def test_without_a_max_model_len_block_tables_grow_and_nothing_compiles_again(model, monkeypatch):
    monkeypatch.setattr("lean.engine.decode_batch.FIRST_REACH", 32)
    backend, record = CountingBackend(), CalledAgain()
    config = {"prefill_chunk": 1, **KV["llama"], "max_model_len": None, "max_num_seqs": 1}
    llm = start(model("llama"), backend, record, **config)
    got, want = hidden(llm, 150), hidden(start(model("llama"), **config), 150)
    assert (got - want).abs().max() < 1e-12
    assert (backend.graphs, record.recorded) == (1, 4)  # reaching over 32, 64, 128 and 256 tokens


def test_a_model_that_is_no_single_graph_is_refused_with_the_reason(tiny):
    source = resolve(str(tiny("llama", **TWO_LAYERS)))
    broken = load_model(inspect_model(source, EngineConfig(dtype="float32")), torch.device("cpu"))
    layer = broken.module.model.layers[1]
    forward = layer.mlp.forward
    layer.mlp.forward = lambda x: forward(x) if x.sum() > 0 else x
    llm = start(broken)
    message = refusal(runner(llm).prepare_decode, 1, 128, "eager", None)
    assert "cannot be compiled layer by layer (Data-dependent" in message
    assert "--compile" in message


def test_a_step_that_cannot_be_recorded_is_refused_with_what_to_do(model):
    def record(step: Step) -> Step:
        raise RuntimeError("operation not permitted when stream is capturing\nCompile with TORCH_USE_CUDA_DSA")

    message = refusal(runner(start(model("llama"))).prepare_decode, 1, 128, None, record)
    assert "(operation not permitted when stream is capturing)" in message
    assert "--enforce-eager" in message


def test_a_kernel_that_cannot_be_compiled_is_no_fault_of_recording(model):
    failure = KernelError("too little shared memory", "use another format")

    def record(step: Step) -> Step:
        raise failure

    assert refusal(runner(start(model("llama"))).prepare_decode, 1, 128, None, record) == str(failure)


def test_compile_and_deterministic_exclude_each_other():
    assert "--deterministic" in refusal(EngineConfig, compile=True, deterministic=True)


def test_compiled_code_is_kept_beside_the_models_unless_the_environment_names_a_folder(home, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    assert keep_compiled_code() == str(home / "compiled")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())  # as torch leaves it
    assert keep_compiled_code() == str(home / "compiled")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    assert keep_compiled_code() == "/elsewhere"


def test_compiling_processes_are_no_more_than_the_cpus_of_the_quota(monkeypatch):
    from torch._inductor import config

    monkeypatch.setattr(decode_steps, "find_cpus", lambda: Cpus(64, 64, 2.0))
    with config.patch(compile_threads=32):  # the setting cannot be put back in another way
        monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "32")
        fit_compilers()
        assert config.compile_threads == 32
        monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS")
        fit_compilers()
        assert config.compile_threads == 2
    with config.patch(compile_threads=1):
        fit_compilers()
        assert config.compile_threads == 1


@pytest.mark.slow
def test_compiled_by_inductor_an_engine_says_so_and_answers_as_the_eager_one(model, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    llm = start(model("gemma2"), compile=True, **{**KV["gemma2"], "max_num_seqs": 2})
    [note] = [note for note in llm.notes if note.startswith("decode steps are compiled while")]
    assert note.endswith(f"; the compiled code is kept for the next run in {tmp_path / 'compiled'}")
    assert "compiled decode" in start_up_line(llm)
    llm.wait_until_compiled()
    assert any((tmp_path / "compiled").iterdir())
    same(answers(llm), answers(start(model("gemma2"), **{**KV["gemma2"], "max_num_seqs": 2})))
