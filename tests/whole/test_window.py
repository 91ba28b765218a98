"""A user's window over a whole model: exactly W keys and S sinks, in constant memory, whatever chunk and company.

How far each rule reaches inside the attention op is in test_reach.py, and what it computes in test_streaming.py.
"""

import functools
import sys
from pathlib import Path

import pytest
import resident
import torch
from helpers import refusal
from tiny import WINDOW as OWN_WINDOW
from tiny import tokens
from transformers import AutoModelForCausalLM

from lean import LLM, EngineConfig, SamplingParams
from lean.engine import engine
from lean.errors import RequestError
from lean.kernels.reference import read_slots
from lean.model.info import inspect_model
from lean.model.load import LoadedModel, load_model
from lean.report import kv_report, start_up_line
from lean.store.source import resolve

ONE, TWO = {"num_hidden_layers": 1}, {"num_hidden_layers": 2}
FULL, SLIDING = {"layer_types": ["full_attention"]}, {"layer_types": ["sliding_attention"]}
LOCAL_AND_GLOBAL = {**TWO, "layer_types": ["sliding_attention", "full_attention"]}
MODELS = {
    "llama": ("llama", ONE),
    "llama, 2 layers": ("llama", TWO),
    "llama, 4 layers": ("llama", {"num_hidden_layers": 4}),
    "qwen2": ("qwen2", ONE),
    "qwen2, 2 layers": ("qwen2", TWO),
    "phi3": ("phi3", ONE),
    "phi3, half of the dims": ("phi3", {**ONE, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    "mistral": ("mistral", ONE),
    "gemma2": ("gemma2", {**ONE, **FULL}),
    "gemma3": ("gemma3", {**ONE, **FULL}),
    "gemma3, sliding": ("gemma3", {**ONE, **SLIDING}),
    "gemma3, mixed": ("gemma3", LOCAL_AND_GLOBAL),
    "gpt_oss": ("gpt_oss", {**ONE, **FULL}),
    "gpt_oss, mixed": ("gpt_oss", LOCAL_AND_GLOBAL),
}


@pytest.fixture(scope="module")
def model(tiny):
    @functools.cache
    def read(name: str) -> LoadedModel:
        kind, config = MODELS[name]
        source = resolve(str(tiny(kind, **config)))
        return load_model(inspect_model(source, EngineConfig(dtype="float32")), torch.device("cpu"), True)

    return read


def start(model: LoadedModel, kv_dtype: str = "fp32", **config: object) -> LLM:
    return LLM(model, EngineConfig(**{"deterministic": True, "kv_dtype": kv_dtype, "max_num_seqs": 2, **config}))


def hidden(llm: LLM, ids: list[int]) -> torch.Tensor:
    return torch.cat([rows for _, rows in llm.hidden_states(ids)])


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """To the bit, and finite."""
    return bool(a.isfinite().all()) and torch.equal(a.view(torch.int32), b.view(torch.int32))


def residual(kv_dtype: str, length: int) -> dict[str, int]:
    return {} if kv_dtype in ("fp32", "fp16") else {"kv_residual_length": length}


# --- reach ---

LENGTH = 181
IDS, LAST = tokens(LENGTH), LENGTH - 1
WINDOWS, ALL_SINKS, RESIDUALS = (1, 2, 31, 32, 33, 100), (0, 1, 4, 40), (0, 1, 32, 64)
QUANTIZED = ("int8", "fp8", "k8v4", "int4")
EVERY = [
    (window, sinks, RESIDUALS[(w + s) % 4], QUANTIZED[(w + 2 * s + w // 4) % 4])
    for w, window in enumerate(WINDOWS)
    for s, sinks in enumerate(ALL_SINKS)
]
SOME = [(1, 40, 0, "int8"), (33, 4, 32, "k8v4"), (100, 1, 1, "fp8")]
REACH = [("llama", *rule) for rule in EVERY]
REACH += [(name, *rule) for name in ("qwen2", "phi3, half of the dims", "gemma2", "gemma3", "gpt_oss") for rule in SOME]
REACH += [("mistral", 1, 40, 0, "int8"), ("mistral", 100, 4, 8, "int8")]


class Probe:
    """The last row of a prompt, in one chunk longer than the window and as a decode step behind evicted blocks."""

    def __init__(self, model: LoadedModel, kv_dtype: str, **config: object) -> None:
        chunks = (512, LAST // 4)  # 181 = 4 x 45 + 1
        self.engines = [start(model, kv_dtype, prefill_chunk=chunk, block_size=16, **config) for chunk in chunks]
        self.plain = self.rows(IDS)

    def rows(self, ids: list[int]) -> list[torch.Tensor]:
        return [hidden(llm, ids)[-1] for llm in self.engines]

    def changed(self, flipped: set[int], by: int = 1) -> bool:
        """Whether the last row changes with these tokens, in prefill and in decode alike."""
        ids = [3 + (token - 3 + by) % 256 if j in flipped else token for j, token in enumerate(IDS)]
        found = {not same(row, plain) for row, plain in zip(self.rows(ids), self.plain)}
        assert len(found) == 1, "prefill and decode disagree"
        return found.pop()

    def depends_on(self, j: int) -> bool:
        """A key may weigh too little to change a bit; of several other tokens one has to."""
        return any(self.changed({j}, by) for by in (1, 77, 130, 200))

    def reaches_exactly(self, visible: set[int], each: set[int]) -> None:
        assert not self.changed(set(range(LENGTH)) - visible), "tokens that nobody may see matter"
        for j in each & visible:
            assert self.depends_on(j), f"token {j} does not matter"
        for j in each - visible:
            assert not self.changed({j}), f"token {j} matters"


def edges(window: int, sinks: int) -> set[int]:
    found = {0, sinks - 1, sinks, LAST - window, LAST - window + 1, LAST}
    return {j for j in found if 0 <= j <= LAST}


@pytest.mark.parametrize(("name", "window", "sinks", "length", "kv_dtype"), REACH)
def test_the_last_row_depends_on_the_window_and_the_sinks_and_on_nothing_else(
    model, name, window, sinks, length, kv_dtype
):
    """W01. Distance W - 1 matters and W does not, in prefill and in decode; Mistral's own window stays its own."""
    if name == "mistral":
        seen, first = OWN_WINDOW, 0
    else:
        seen, first = window, sinks
    probe = Probe(model(name), kv_dtype, window=window, sinks=sinks, **residual(kv_dtype, length))
    visible = {j for j in range(LENGTH) if LAST - j < seen or j < first}
    probe.reaches_exactly(visible, edges(seen, first))


@pytest.mark.parametrize(("kv_dtype", "length"), [("int4", 8), ("fp8", 0)])
def test_every_single_visible_token_matters(model, kv_dtype, length):
    """W01."""
    probe = Probe(model("llama"), kv_dtype, window=20, sinks=3, **residual(kv_dtype, length))
    visible = {*range(3), *range(LAST - 19, LENGTH)}
    probe.reaches_exactly(visible, visible | {3, 4, LAST - 20, LAST - 21, 90})


@pytest.mark.parametrize("name", ["gemma3, mixed", "gpt_oss, mixed"])
@pytest.mark.parametrize(("window", "sinks", "length", "kv_dtype"), [(40, 4, 0, "int8"), (70, 1, 8, "k8v4")])
def test_mixed_layers_reach_as_far_as_their_windows_together(model, name, window, sinks, length, kv_dtype):
    """Sliding below, the user's window above: what the upper layer sees, and the 31 tokens before each of these."""
    probe = Probe(model(name), kv_dtype, window=window, sinks=sinks, **residual(kv_dtype, length))
    first = LAST - (window - 1) - (OWN_WINDOW - 1)
    visible = {j for j in range(LENGTH) if j >= first or j < sinks}
    probe.reaches_exactly(visible, {0, sinks - 1, sinks, first - 1, LAST})
    assert probe.depends_on(first) or probe.depends_on(first + 1)  # its way leads through one key of each layer


def test_a_layer_that_slides_on_its_own_is_no_different_under_a_users_window(model):
    plain = hidden(start(model("mistral"), "k8v4", kv_residual_length=8), IDS)
    for window in (5, 100):
        assert same(hidden(start(model("mistral"), "k8v4", kv_residual_length=8, window=window), IDS), plain)


@pytest.mark.parametrize("name", ["llama, 2 layers", "gemma3, mixed"])
@pytest.mark.parametrize("kv_dtype", ["fp32", "k8v4"])
def test_a_window_that_nothing_has_left_yet_changes_nothing(model, name, kv_dtype):
    """At a length of window + sinks the last row still sees everything at its true distance, one later it does not.

    Sinks are added in an order of their own: only without any are the bits the same.
    """
    rest, ids = residual(kv_dtype, 8), IDS[:74]
    plain = hidden(start(model(name), kv_dtype, sinks=0, **rest), ids)
    assert same(hidden(start(model(name), kv_dtype, window=74, sinks=0, **rest), ids), plain)
    exact = hidden(start(model(name)), ids)
    assert (hidden(start(model(name), window=70, sinks=4), ids) - exact).abs().max() < 2e-5
    moved = (hidden(start(model(name), window=69, sinks=4), ids) - exact).abs().amax(1)
    assert moved[:73].max() < 2e-5
    assert moved[73] > 1e-4


def test_a_window_that_reaches_no_layer_is_not_taken_in_silence(model):
    """W20, U06: Mistral slides in every layer, so a user's window does nothing; somebody has to say so."""
    llm = start(model("mistral"), window=100)  # or a refusal
    assert any("window" in note for note in llm.notes)
    assert "window 100" not in start_up_line(llm)


def test_a_window_longer_than_the_positions_of_the_model_is_not_taken_in_silence(tiny):
    """Under it a row sees keys at distances that the model was never made for, as far as any text without one."""
    folder = tiny("llama", max_position_embeddings=64, **TWO)
    llm = LLM(str(folder), EngineConfig(window=500))  # or a refusal
    assert any("500" in note and "64" in note for note in llm.notes)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8", "k8v4", "int4"])
def test_learned_sink_logits_and_a_quantized_cache_are_not_taken_for_a_wrong_rotation(tiny, kv_dtype):
    """W19: with sink logits a lone token's attention depends on the rounding of its key, and so on its position."""
    folder = tiny("gpt_oss", num_hidden_layers=8)
    assert (
        LLM(str(folder), EngineConfig(kv_dtype=kv_dtype, kv_residual_length=0, window=100)).score(IDS).isfinite().all()
    )


# --- against an explicit mask ---


@functools.cache
def eager(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@torch.inference_mode()
def banded(folder: Path, ids: list[int], window: int) -> torch.Tensor:
    """transformers' logits under a band mask."""
    i, j = torch.arange(len(ids))[:, None], torch.arange(len(ids))
    seen = (j <= i) & (i - j < window)
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
    return eager(folder)(torch.tensor([ids]), attention_mask=mask, use_cache=False).logits[0].clone()


@pytest.mark.parametrize(
    ("prompt", "window", "chunk"), [(512, 128, 128), (384, 128, 128), (300, 128, 128), (128, 128, 32), (300, 20, 512)]
)
def test_a_prompt_longer_than_the_window_equals_a_band_mask(tiny, model, prompt, window, chunk):
    """W03, and 40 steps of decode behind it."""
    ids = tokens(prompt, seed=3)
    llm = start(model("llama, 2 layers"), window=window, sinks=0, prefill_chunk=chunk)
    want = banded(tiny("llama", **TWO), ids, window)
    assert (llm.logits(hidden(llm, ids)) - want).abs().max() < 1e-5
    [answer] = llm.generate([ids], SamplingParams(40, temperature=0, ignore_eos=True, logprobs=0))
    want = banded(tiny("llama", **TWO), ids + answer.token_ids[:-1], window)[prompt - 1 :]
    want = want[:, :259].log_softmax(-1)  # the others belong to no token
    found = torch.tensor([entry.logprob for entry in answer.logprobs])
    assert (found - want.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]).abs().max() < 1e-5


# --- chunks ---

GRID = [
    (kv_dtype, *rule)
    for kv_dtype in ("fp32", *QUANTIZED)
    for rule in [(33, 4, 0), (70, 1, 16), (20, 40, 32)]
    if kv_dtype != "fp32" or not rule[2]
]


@pytest.mark.parametrize(("kv_dtype", "window", "sinks", "length"), GRID)
def test_one_shot_chunked_and_stepwise_are_the_same_bits_under_a_window(model, kv_dtype, window, sinks, length):
    """Chunks longer than the window, W <= R, one token; stepwise for the length of two windows and more."""
    options = {"window": window, "sinks": sinks, **residual(kv_dtype, length)}
    want = hidden(start(model("llama, 2 layers"), kv_dtype, **options), IDS)
    for chunk in (7, 33, 64):
        got = hidden(start(model("llama, 2 layers"), kv_dtype, prefill_chunk=chunk, **options), IDS)
        assert same(got, want), f"chunk {chunk}"
    steps = 50 if window < 40 else 76
    assert same(
        hidden(start(model("llama, 2 layers"), kv_dtype, prefill_chunk=1, **options), IDS[:steps]), want[:steps]
    )


@pytest.mark.parametrize(("kv_dtype", "length"), [("int4", 8), ("fp8", 0), ("k8v4", 64)])
@pytest.mark.parametrize("name", ["gemma3, mixed", "gpt_oss, mixed", "phi3, half of the dims"])
def test_chunks_change_no_bit_of_other_models_under_a_window(model, name, kv_dtype, length):
    options = {"window": 40, "sinks": 4, **residual(kv_dtype, length)}
    want = hidden(start(model(name), kv_dtype, **options), IDS)
    for chunk in (7, 64):
        assert same(hidden(start(model(name), kv_dtype, prefill_chunk=chunk, **options), IDS), want)


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_chunks_and_threads_change_no_bit_of_bfloat16_models_under_a_window(tiny, kind, kv_dtype):
    """The query that is turned back is rounded to bfloat16 row by row."""
    folder = tiny(kind, **{"llama": TWO, "gemma3": LOCAL_AND_GLOBAL}[kind])
    info = inspect_model(resolve(str(folder)), EngineConfig(dtype="bfloat16"))
    narrow = load_model(info, torch.device("cpu"), True)
    rest = residual(kv_dtype, 8) if kv_dtype == "int8" else {}
    want = hidden(start(narrow, kv_dtype, window=40, **rest), IDS)
    assert same(hidden(start(narrow, kv_dtype, window=40, prefill_chunk=7, **rest), IDS), want)
    assert same(hidden(start(narrow, kv_dtype, window=40, prefill_chunk=64, threads=2, **rest), IDS), want)


@pytest.mark.parametrize("window", [1, 31, 33])
@pytest.mark.parametrize("sinks", [0, 3])
def test_prefill_and_decode_agree_around_the_length_of_the_window(model, window, sinks):
    """W02: every length from W - 1 to W + S + 2, its last row in one shot and as a step of its own."""
    options = {"window": window, "sinks": sinks, "kv_residual_length": 0}
    one_shot, stepwise = (start(model("llama"), "int8", prefill_chunk=c, **options) for c in (512, 1))
    steps = hidden(stepwise, IDS[: window + sinks + 2])
    for length in range(max(1, window - 1), window + sinks + 3):
        assert same(hidden(one_shot, IDS[:length])[-1], steps[length - 1])


@pytest.mark.parametrize("length", [127, 128, 129, 1023])
def test_the_last_piece_of_a_prompt_evicts_nothing_too_early(model, length):
    """W05: no padding enters the cache, which counts the tokens that are there."""
    ids = tokens(length, seed=5)
    options = {"window": 64, "sinks": 4, "kv_residual_length": 16}
    llm = start(model("llama"), "int8", prefill_chunk=128, **options)
    llm.add_request(ids, keep_hidden=True, keep_cache=True)
    rows = []
    while llm.has_work:
        rows += [output.hidden for output in llm.step()]
    chunk = 1 if length == 129 else 9
    assert same(torch.cat(rows), hidden(start(model("llama"), "int8", prefill_chunk=chunk, **options), ids))
    assert llm.stats().tokens_held == length
    quantized, exact = llm.stats().pools
    assert quantized.tokens_held == length - (length - 64 + 1) // 32 * 32  # sinks lie in the exact pool alone
    assert exact.tokens_held == length - max(0, (length - 16 + 1) // 32 - 1) * 32  # and keep its first block


# --- company ---


def results(llm: LLM, ids: list[int], **params: object) -> list[tuple]:
    params = SamplingParams(
        **{"max_tokens": 30, "temperature": 0.9, "seed": 3, "ignore_eos": True, "logprobs": 0} | params
    )
    return [(out.token_ids, out.logprobs) for out in llm.generate([ids], params)]


FORMS = [("fp32", {}), ("fp8", {"kv_residual_length": 0}), ("int4", {"kv_residual_length": 8})]


@pytest.mark.parametrize(("kv_dtype", "rest"), FORMS)
@pytest.mark.parametrize("name", ["llama, 2 layers", "gemma3, mixed"])
def test_forked_and_preempted_requests_are_the_request_alone_under_a_window(model, name, kv_dtype, rest):
    """N19 too: e4m3 blocks are forked, copied and evicted. Preempted twice, once in the middle of the prompt."""
    options = {"window": 40, "sinks": 4, "block_size": 8, "prefill_chunk": 30, **rest}
    [alone] = results(start(model(name), kv_dtype, **options), IDS[:77])
    llm = start(model(name), kv_dtype, **options)
    forked = results(llm, IDS[:77], n=2)
    assert forked[0] == alone
    assert forked[1] != alone
    params = SamplingParams(30, temperature=0.9, seed=3, ignore_eos=True, logprobs=0)
    first = llm.add_request(IDS[:77], params)
    other = llm.add_request(IDS[20:150], params)
    parts = []
    for step in range(200):
        if step in (2, 20):
            running = {request.seq_id: request for request in llm._scheduler.running}
            llm._scheduler._preempt(running[first])
        parts += [part for part in llm.step() if part.request_id == first]
        llm._manager.check_integrity()
        if not llm.has_work:
            break
    assert other != first
    assert llm.num_preemptions == 2
    assert ([t for p in parts for t in p.token_ids], [e for p in parts for e in p.logprobs or []]) == alone
    assert all(pool.num_used == 0 for pool in llm._manager.pools)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
@pytest.mark.parametrize("kept", [150, 149, 143, 128, 100])
def test_a_second_turn_is_a_fresh_run_whether_its_beginning_is_still_there_or_not(model, kv_dtype, kept):
    """W09: a turn of three windows behind the first, then single steps. From token 100 on the window is gone."""
    options = {"window": 40, "sinks": 4, "kv_residual_length": 8, "prefill_chunk": 64}
    ids = IDS[:kept] + tokens(3 * 40, seed=8)
    llm = start(model("gemma3, mixed"), kv_dtype, **options)
    request_id = llm.add_request(IDS[:150], SamplingParams(1, temperature=0, ignore_eos=True), keep_cache=True)
    while llm.has_work:
        llm.step()
    params = SamplingParams(12, temperature=0, ignore_eos=True, logprobs=0)
    parts = list(llm.stream(ids, params, continues=request_id))
    found = [token for part in parts for token in part.token_ids], [e for part in parts for e in part.logprobs]
    [fresh] = results(start(model("gemma3, mixed"), kv_dtype, **options), ids, max_tokens=12, temperature=0, seed=None)
    assert found == fresh
    assert parts[0].cached_tokens in (0, kept)
    assert parts[0].cached_tokens == kept or kept < 143
    if kept < 150:
        return
    exact = start(model("gemma3, mixed"), "fp32", **options | {"kv_residual_length": None}).score(ids)
    quantized = start(model("gemma3, mixed"), kv_dtype, **options).score(ids)
    assert (quantized - exact).abs().max() < 0.1


# --- memory ---


@pytest.mark.parametrize(
    ("kv_dtype", "sinks", "length"), [("int8", 4, 16), ("fp8", 40, 0), ("k8v4", 0, 64), ("int4", 4, 100)]
)
def test_blocks_in_use_are_constant_once_the_window_is_full(model, kv_dtype, sinks, length):
    """W18, N19: no end, no growth, and what the plan says is the most that is ever held."""
    options = {"window": 64, "sinks": sinks, "max_num_seqs": 1, **residual(kv_dtype, length)}
    llm = start(model("llama"), kv_dtype, prefill_chunk=32, **options)
    request_id = llm.add_request(tokens(3000), keep_hidden=True)
    used = []
    while llm.has_work:
        llm.step()
        used.append(tuple(pool.num_used for pool in llm._manager.pools))
    assert request_id not in llm._requests
    full = used[8:-2]
    assert len(set(full)) == 1
    assert sum(n * pool.block_bytes for n, pool in zip(full[0], llm.plan.pools)) <= llm.plan.bytes_at(2**31)
    # In decode the number of blocks goes up and down by one, never further.
    llm = start(model("llama"), kv_dtype, block_size=8, **options)
    llm.add_request(tokens(200), SamplingParams(100, ignore_eos=True))
    counts = []
    while llm.has_work:
        llm.step()
        counts.append(tuple(pool.num_used for pool in llm._manager.pools))
    for own in zip(*counts[3:-1]):
        assert max(own) - min(own) <= 1
    assert llm.peak_use.bytes_held <= llm.size.nbytes


def test_window_and_quantization_save_memory_together(model):
    """W20: neither option wins over the other; both effects multiply, up to block rounding."""
    held = {}
    for kv_dtype in ("fp32", "int8"):
        for window in (None, 60):
            llm = start(model("llama, 2 layers"), kv_dtype, window=window, prefill_chunk=32, **residual(kv_dtype, 0))
            llm.add_request(tokens(480), SamplingParams(1), keep_cache=True)
            while llm.has_work:
                llm.step()
            held[kv_dtype, window] = llm.stats().bytes_held
            [pool] = kv_report(llm)["pools"]
            assert (pool["format"], pool["window"]) == (kv_dtype, window or 0)
    by_format = held["fp32", None] / held["int8", None]
    by_window = held["fp32", None] / held["fp32", 60]
    assert by_format == pytest.approx(64 / 18, rel=0.01)
    assert by_window >= 480 / (60 + 2 * 32 + 32)  # a window may touch one block more on each side, sinks one
    assert held["fp32", None] / held["int8", 60] == pytest.approx(by_format * by_window, rel=0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak memory from /proc")
def test_the_workspace_does_not_grow_with_the_prompt_under_a_window(model):
    """W27: a mask of all pairs alone would take 256 MiB here, a chunk's scores 128 MiB."""
    llm = start(model("llama"), "int8", window=64, deterministic=False, max_num_seqs=1)
    for _ in llm.hidden_states(tokens(2048)):  # what is allocated once
        pass
    ids = tokens(16_384)
    resident.restart_peak()
    before = resident.now()
    for _ in llm.hidden_states(ids):
        pass
    assert resident.peak() - before < 32 * 2**20
    assert llm.size.nbytes < 2**20


@pytest.mark.parametrize("kv_dtype", ["fp32", "int8", "fp8", "k8v4", "int4"])
@pytest.mark.parametrize("name", ["llama, 2 layers", "gemma3, mixed"])
def test_what_the_cache_held_before_does_not_matter_under_a_window(model, name, kv_dtype):
    """0x7F bytes are NaN in e4m3 and fp16, all ones in every float; evicted blocks are taken again and again."""
    for window, sinks, length in [(33, 4, 16), (20, 40, 0)]:
        found = []
        for pattern in (0, 0x7F7F, -1):
            options = {"window": window, "sinks": sinks, "prefill_chunk": 50, "block_size": 8}
            llm = start(model(name), kv_dtype, **options, **residual(kv_dtype, length))
            for arena in llm.cache.arenas:
                arena.view(torch.int16).fill_(pattern)
            found.append(torch.cat([hidden(llm, IDS), hidden(llm, IDS[:3]), hidden(llm, IDS[90:])]))
        assert all(same(rows, found[0]) for rows in found)


# --- no drift ---


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8", "int4"])
@pytest.mark.parametrize("length", [0, 16])
def test_a_thousand_evictions_move_no_visible_key(model, kv_dtype, length):
    """W18: keys are written once. The sinks, and the oldest keys of the window, hold the bytes of their first day."""
    window, sinks, count = 64, 4, 1_100
    options = {"window": window, "sinks": sinks, "block_size": 8, "kv_residual_length": length}
    ids = tokens(count)

    def stored(llm: LLM, ids: list[int], positions: list[int], pool: int) -> torch.Tensor:
        request_id = llm.add_request(ids, keep_hidden=True, keep_cache=True)
        while llm.has_work:
            llm.step()
        table = llm._manager.table(request_id, pool)
        assert all(table[p // 8] for p in positions)
        slots = torch.tensor([table[p // 8] * 8 + p % 8 for p in positions])
        layer = llm.cache.layers[0]
        own = layer.pool if pool == layer.group.pool_id else layer.exact
        rows = torch.cat(read_slots(own.arena, own.layout, own.offset, slots), dim=-1)
        llm.release(request_id)
        return rows

    llm = start(model("llama"), kv_dtype, prefill_chunk=100, **options)
    pool = 1 if length else 0  # with a residual the sinks are kept exact
    first_day = stored(llm, ids[:6], list(range(sinks)), pool)
    assert same(stored(llm, ids, list(range(sinks)), pool), first_day)
    oldest = [count - window, count - window + 1, count - window + 2]
    late = stored(llm, ids, oldest, 0)
    try:
        llm._runner.position_offset = oldest[0]
        assert same(stored(llm, ids[oldest[0] :][:3], [0, 1, 2], 0), late)
    finally:
        llm._runner.position_offset = 0


@pytest.mark.parametrize(("kv_dtype", "length"), [("int8", 0), ("fp8", 0), ("int4", 0), ("int4", 16)])
def test_rows_behind_a_thousand_evictions_are_as_accurate_as_the_first(model, kv_dtype, length):
    """W18: the error against the exact cache does not grow."""
    options = {"window": 64, "sinks": 4, "prefill_chunk": 256}
    ids = tokens(1_200)
    exact = hidden(start(model("llama"), **options), ids)
    error = (hidden(start(model("llama"), kv_dtype, **options, kv_residual_length=length), ids) - exact).norm(dim=1)
    early, late = error[68:268].mean(), error[1000:].mean()
    assert 0 < late < 1.25 * early


def test_the_same_tokens_far_away_give_the_same_rows(model):
    """Attention is relative: what lies 5,000,000 positions behind a text changes nothing but rounding."""
    llm, found = start(model("llama, 2 layers"), "fp32", window=40), []
    try:
        for offset in (0, 5_000_000):
            llm._runner.position_offset = offset
            found.append(hidden(llm, IDS))
    finally:
        llm._runner.position_offset = 0
    assert (found[0] - found[1]).abs().max() < 1e-4


# --- lengths ---


def test_a_text_longer_than_the_model_is_refused_without_a_window_and_served_with_one(tiny):
    """W17."""
    folder = tiny("llama", max_position_embeddings=64, **TWO)
    plain = LLM(str(folder))
    # The last token of a text is only predicted, so it needs no place in the cache.
    for call in (lambda: plain.score(tokens(201)), lambda: plain.generate([tokens(200)])):
        with pytest.raises(RequestError) as caught:
            call()
        assert all(word in str(caught.value) for word in ("200", "64", "shorten the prompt"))
    assert "--window" in refusal(LLM, str(folder), EngineConfig(max_model_len=200))
    llm = LLM(str(folder), EngineConfig(window=32, sinks=4))
    assert llm.score(tokens(200)).isfinite().all()
    [answer] = llm.generate([tokens(100)], SamplingParams(300, temperature=0, ignore_eos=True, logprobs=0))
    assert len(answer.token_ids) == 300
    assert all(entry.logprob > -100 for entry in answer.logprobs)
    assert refusal(LLM(str(folder), EngineConfig(window=32, max_model_len=150)).score, tokens(200))


# --- the grid of options ---


@pytest.mark.parametrize("kv_dtype", ["fp16", "int8", "fp8", "int4"])
@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("window", [None, 32])
@pytest.mark.parametrize("name", ["llama, 2 layers", "gemma3, mixed", "qwen2, 2 layers"])
def test_every_cell_of_the_grid_works_or_is_refused_before_loading(
    tiny, model, monkeypatch, name, window, sinks, kv_dtype
):
    """W19, N19: nothing fails at the first request."""
    rests = [{}, residual(kv_dtype, 0), residual(kv_dtype, 40)]
    if not window and sinks:
        rest = {"kv_dtype": kv_dtype, **rests.pop(1)}
        monkeypatch.setattr(engine, "load_model", lambda *args: pytest.fail("the weights were read"))
        kind, config = MODELS[name]
        folder = str(tiny(kind, **config))
        assert "sinks 4" in refusal(LLM, folder, EngineConfig(sinks=sinks, **rest))
        rests = rests if kv_dtype != "fp16" else []
    for rest in rests if kv_dtype != "fp16" else rests[:1]:
        llm = start(model(name), kv_dtype, window=window, sinks=sinks, deterministic=False, **rest)
        params = SamplingParams(6, temperature=0, ignore_eos=True, n=2, logprobs=0)
        answers = llm.generate([IDS[:90], IDS[:10]], params)
        assert [answer.finish_reason for answer in answers] == ["length"] * 4
        assert all(pool.num_used == 0 for pool in llm._manager.pools)
