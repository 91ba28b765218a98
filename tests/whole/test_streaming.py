"""Under a window every row sees what StreamingLLM's cache would show it, at that cache's positions.

The oracle, support/streaming_oracle.py, shares nothing with lean but the weights.
"""

import functools
from pathlib import Path

import pytest
import torch
from engine_state import block_table, manager, runner
from helpers import refusal
from norms import exact_norms
from streaming_oracle import FixedOracle, StreamingOracle
from tiny import tokens

from lean import LLM, EngineConfig, SamplingParams
from lean.engine import selftest
from lean.engine.scheduler import Chunk
from lean.engine.selftest import try_rotation
from lean.errors import ModelError
from lean.model.attention import AttentionBatch, Observer
from lean.model.info import inspect_model
from lean.model.load import LoadedModel, load_model
from lean.model.sink_turn import SinkTurn
from lean.store.source import resolve

WINDOW, SINKS, STEPS = 28, 4, 500
TOLERANCE = 1e-9


def read(folder: Path) -> LoadedModel:
    info = inspect_model(resolve(str(folder)), EngineConfig(dtype="float64"))
    model = load_model(info, torch.device("cpu"), deterministic=True)
    exact_norms(model.module)
    return model


def start(model: LoadedModel, **config: object) -> LLM:
    options = {"kv_dtype": "fp64", "window": WINDOW, "sinks": SINKS, **config}
    return LLM(model, EngineConfig(**options))


def hidden(llm: LLM, ids: list[int]) -> torch.Tensor:
    return torch.cat([rows for _, rows in llm.hidden_states(ids)])


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.dtype == b.dtype == torch.float64
    return (a - b).abs().max().item()


AT_64 = {"original_max_position_embeddings": 64}
ROPES = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 8.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **AT_64},
    "yarn": {"rope_type": "yarn", "factor": 8.0, **AT_64},
}
HALF = {"rope_theta": 1e4, "partial_rotary_factor": 0.5}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8, **AT_64}
TWO_LAYERS = {"num_hidden_layers": 2}
LOCAL_AND_GLOBAL = {**TWO_LAYERS, "layer_types": ["sliding_attention", "full_attention"]}
GLOBAL_AND_LOCAL = {**TWO_LAYERS, "layer_types": ["full_attention", "sliding_attention"]}
GLOBAL_LINEAR = {
    "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


def llama(num_layers: int, rope: str) -> tuple[str, dict]:
    return "llama", {"num_hidden_layers": num_layers, "rope_parameters": {"rope_theta": 1e4, **ROPES[rope]}}


LONG = {
    "llama": llama(1, "default"),
    "llama, 2 layers": llama(2, "default"),
    "llama3, 2 layers": llama(2, "llama3"),
    "yarn": llama(1, "yarn"),
    "yarn, 2 layers": llama(2, "yarn"),
    "linear, 2 layers": llama(2, "linear"),
    "phi3, half of the dims": ("phi3", {"rope_parameters": HALF, "num_hidden_layers": 1}),
}
GLM = {**TWO_LAYERS, "head_dim": 16}
MLA = {
    **TWO_LAYERS, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 24, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "head_dim": 8, "moe_intermediate_size": 32, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 2, "mlp_layer_types": ["dense"] * 2,
}  # fmt: skip
# What the oracle must know of a kind.
ROTATIONS: dict[str, dict] = {
    "cohere": {"pairs": True},
    "glm": {"pairs": True},
    "glm4": {"pairs": True},
    "ernie4_5": {"pairs": True},
    "smollm3": {"still": (1,)},
    "cohere2": {"pairs": True, "still": (1,)},
    "nanochat": {"sign": -1},
    "glm4_moe_lite": {"start": 16},
}
SHORT = {
    "qwen2": ("qwen2", TWO_LAYERS),
    "qwen3": ("qwen3", TWO_LAYERS),
    "mistral": ("mistral", TWO_LAYERS),
    "gemma2": ("gemma2", GLOBAL_AND_LOCAL),
    "gemma3": ("gemma3", LOCAL_AND_GLOBAL),
    "phi3": ("phi3", TWO_LAYERS),
    "mixtral": ("mixtral", TWO_LAYERS),
    "gpt_oss": ("gpt_oss", TWO_LAYERS),
    "cohere, interleaved": ("cohere", TWO_LAYERS),
    "glm, angles in halves, dims in pairs": ("glm", GLM),
    "glm4, angles in halves, dims in pairs": ("glm4", GLM),
    "ernie4_5, angles in halves, dims in pairs": ("ernie4_5", TWO_LAYERS),
    "smollm3, no rotation in layer 1": ("smollm3", {**TWO_LAYERS, "no_rope_layers": [1, 0]}),
    "cohere2, no rotation in the global layer": ("cohere2", {**LOCAL_AND_GLOBAL, "sliding_window": 32}),
    "nanochat, backwards": ("nanochat", TWO_LAYERS),
    "glm4_moe_lite, the last dims": ("glm4_moe_lite", MLA),
    "olmo2": ("olmo2", TWO_LAYERS),
}


@pytest.fixture(scope="module")
def model(tiny):
    return functools.cache(lambda name: read(tiny(kind_of(name)[0], **kind_of(name)[1])))


def kind_of(name: str) -> tuple[str, dict]:
    return {**LONG, **SHORT}[name]


@pytest.fixture(scope="module")
def oracle(tiny):
    """``oracle(name, window, sinks, steps)``: rows of the first ``steps`` tokens."""

    @functools.cache
    def rows(name: str, window: int, sinks: int, steps: int) -> torch.Tensor:
        kind, config = kind_of(name)
        streaming = StreamingOracle(tiny(kind, **config), window, sinks, **ROTATIONS.get(kind, {}))
        return streaming.hidden(tokens(steps))

    return rows


@pytest.mark.parametrize("name", LONG)
def test_every_row_of_500_equals_a_cache_that_numbers_its_keys_anew(model, oracle, name):
    """In one chunk and in several. Keys of upper layers depend on what the windows of lower layers showed."""
    want = oracle(name, WINDOW, SINKS, STEPS)
    for chunk in (512, 33):
        assert distance(hidden(start(model(name), prefill_chunk=chunk), tokens(STEPS)), want) < TOLERANCE


@pytest.mark.parametrize(("name", "steps"), [("llama", STEPS), ("yarn, 2 layers", 150)])
def test_every_step_of_decode_equals_that_cache_too(model, oracle, name, steps):
    want = oracle(name, WINDOW, SINKS, STEPS)[:steps]
    assert distance(hidden(start(model(name), prefill_chunk=1), tokens(steps)), want) < TOLERANCE


def test_generated_tokens_are_those_of_the_oracle(model, tiny):
    """Greedy decode by `generate`, 60 tokens past a full window, each fed back."""
    [answer] = start(model("llama, 2 layers")).generate(
        [tokens(40)], SamplingParams(60, temperature=0, ignore_eos=True)
    )
    streaming = StreamingOracle(tiny("llama", **LONG["llama, 2 layers"][1]), WINDOW, SINKS)
    rows = streaming.hidden(tokens(40) + answer.token_ids[:-1])[39:]
    with torch.inference_mode():
        most_likely = streaming.model.lm_head(rows)[:, :259].argmax(-1)  # lean never draws rows that belong to no token
    assert answer.token_ids == most_likely.tolist()


@pytest.mark.parametrize("name", SHORT)
def test_sinks_work_on_every_kind_of_model(model, oracle, name):
    """Layers with a sliding window keep their 32 tokens and have no visible sinks."""
    want = oracle(name, WINDOW, SINKS, 160)
    assert distance(hidden(start(model(name), prefill_chunk=37), tokens(160)), want) < TOLERANCE


def test_global_layers_keep_their_own_scaling_under_a_window(tiny):
    """Linear scaling belongs to Gemma's global layers only, and so does the turn for the sinks."""
    folder, ids = tiny("gemma3", rope_parameters=GLOBAL_LINEAR, **LOCAL_AND_GLOBAL), tokens(400)
    want = StreamingOracle(folder, WINDOW, SINKS).hidden(ids)
    assert distance(hidden(start(read(folder), prefill_chunk=64), ids), want) < TOLERANCE


@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (1, 1), (1, 40), (2, 1), (31, 40), (32, 1), (33, 0), (100, 4)])
def test_any_window_and_any_number_of_sinks(model, oracle, window, sinks):
    """Windows of one token, sinks longer than the window, and the lengths around a block."""
    llm = start(model("llama, 2 layers"), window=window, sinks=sinks)
    want = oracle("llama, 2 layers", window, sinks, 180)
    assert distance(hidden(llm, tokens(180)), want) < TOLERANCE


def test_the_oracle_notices_sinks_at_their_true_positions(model, oracle):
    """Without the turn of the query, rows differ as soon as a token has left the window."""
    llm = start(model("llama"))
    runner(llm).sink_rotary = None
    found, want = hidden(llm, tokens(STEPS)), oracle("llama", WINDOW, SINKS, STEPS)
    assert distance(found[: WINDOW + SINKS], want[: WINDOW + SINKS]) < TOLERANCE
    assert (found - want)[WINDOW + SINKS :].abs().amax(-1).min() > 1e-4


def test_positions_and_shifts_of_sinks_do_not_depend_on_evicted_blocks(model):
    """Positions are the true ones. For every row the last sink stands right before the first token of the window."""
    llm, rows, shifts, evicted = start(model("llama"), block_size=8, prefill_chunk=5), [], [], []
    make, rotary = runner(llm).batch, runner(llm).sink_rotary

    class Watched:
        def back(self, moved: torch.Tensor, device: torch.device) -> SinkTurn:
            shifts[-len(moved) :] = moved.tolist()
            return rotary.back(moved, device)

    def watched(chunks: list[Chunk], observer: Observer | None) -> AttentionBatch:
        [chunk] = chunks
        rows.extend(range(chunk.start, chunk.end))
        shifts.extend([0] * (chunk.end - chunk.start))
        evicted.append(block_table(llm, chunk.request.seq_id, 0).count(0))
        made = make(chunks, observer)
        assert made.positions.tolist() == rows[chunk.start :]
        return made

    runner(llm).batch, runner(llm).sink_rotary = watched, Watched()
    hidden(llm, tokens(100))
    assert len(set(evicted)) > 4
    for position, moved in zip(rows, shifts, strict=True):
        to_last_sink, to_first_key = position - moved - (SINKS - 1), min(position, WINDOW - 1)
        gone = position >= WINDOW + SINKS
        assert to_last_sink == (to_first_key + 1 if gone else position - (SINKS - 1))
        assert (moved > 0) == gone


# --- frequencies that depend on the length ---


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_frequencies_that_change_with_the_length_are_fixed_at_load_and_then_streamed(tiny, name):
    """A window takes any length, so frequencies are those of the longest length that the model supports."""
    if name == "dynamic":
        rope = {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 4.0}
        folder = tiny("llama", rope_parameters=rope, max_position_embeddings=64, **TWO_LAYERS)
    else:
        rope = {"rope_theta": 1e4, **LONGROPE}
        folder = tiny("phi3", rope_parameters=rope, **{"max_position_embeddings": 256, **AT_64, **TWO_LAYERS})
    llm, ids = start(read(folder), prefill_chunk=64), tokens(300)
    assert any(name in note and "256" in note for note in llm.notes)
    assert distance(hidden(llm, ids), FixedOracle(folder, WINDOW, SINKS).hidden(ids)) < TOLERANCE


# --- positions that cannot be turned back ---


NORM_AFTER_ROTATION = {**TWO_LAYERS, "head_dim": 16}
REFUSED = {
    "a norm behind the rotation": ("hunyuan_v1_dense", NORM_AFTER_ROTATION, "layer 0"),
    "learned positions": ("gpt2", {**TWO_LAYERS, "n_positions": 512}, "no rotary"),
    "learned, with an offset": ("opt", {**TWO_LAYERS, "ffn_dim": 64}, "no rotary"),
}


@pytest.mark.parametrize("sinks", [0, SINKS])
@pytest.mark.parametrize("name", REFUSED)
def test_positions_that_cannot_be_turned_back_are_refused_with_a_window_and_served_without(tiny, name, sinks):
    kind, config, reason = REFUSED[name]
    folder = tiny(kind, **config)
    message = refusal(LLM, str(folder), EngineConfig(window=WINDOW, sinks=sinks))
    assert reason in message
    assert "--window" in message
    if not sinks:
        assert LLM(str(folder), EngineConfig(kv_dtype="fp32")).score(tokens(40)).isfinite().all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_positions_that_cannot_be_turned_back_are_found_in_every_dtype(tiny, dtype):
    folder = tiny("hunyuan_v1_dense", **NORM_AFTER_ROTATION)
    assert "turn back" in refusal(LLM, str(folder), EngineConfig(window=WINDOW, dtype=dtype))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["llama, 2 layers", "yarn, 2 layers", "gemma3", "phi3", "cohere, interleaved"])
def test_rounding_of_narrow_dtypes_is_not_taken_for_a_wrong_rotation(tiny, name, dtype):
    kind, config = kind_of(name)
    assert LLM(str(tiny(kind, **config)), EngineConfig(window=WINDOW, dtype=dtype)).score(tokens(80)).isfinite().all()


def test_a_turn_by_wrong_frequencies_fails_the_self_test(model, monkeypatch):
    """The self-test must find an error of 1% in a single frequency."""
    llm = start(model("llama"))
    [right] = selftest.all_frequencies(llm.model.module)
    wrong = right * torch.tensor([1.01] + [1.0] * (len(right) - 1))
    monkeypatch.setattr(selftest, "all_frequencies", lambda module: [wrong])
    with pytest.raises(ModelError, match="layer 0"):
        try_rotation(runner(llm), manager(llm))
    monkeypatch.setattr(selftest, "all_frequencies", lambda module: [wrong, right])
    assert torch.equal(try_rotation(runner(llm), manager(llm)).inv_freq, right)
