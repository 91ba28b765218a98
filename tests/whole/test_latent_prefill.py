"""Long prompt chunks of latent attention, whose keys are expanded, compute what absorbed queries compute.

Reference: the absorbed path, which other tests hold to transformers and to the formula.
"""

from collections.abc import Sequence
from dataclasses import replace

import census_models
import pytest
import torch
from attention_oracle import FILLS, error, same_bits
from engine_state import manager, runner
from tiny import tokens

from lean import LLM, EngineConfig, SamplingParams
from lean.engine.request import Request
from lean.engine.scheduler import Chunk
from lean.model import expansion
from lean.model.attention import AttentionBatch, LayerInputs, attend_latent
from lean.model.expansion import PromptRows, heads_at_once, pays
from lean.model.info import inspect_model
from lean.model.latent import LatentProjection
from lean.model.load import LoadedModel, load_model
from lean.store.source import resolve

FORMATS = ("fp32", "bf16", "int8", "fp8", "int4")
GLM = LatentProjection(torch.nn.Parameter(torch.empty(20 * (192 + 256), 512, device="meta")), 192, 256, False)
NO_RESIDUAL = {"kv_residual_length": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("latent") / "deepseek_v3"
    census_models.build("deepseek_v3", folder)
    return folder


@pytest.fixture(scope="module")
def model(folder) -> LoadedModel:
    return load_model(inspect_model(resolve(str(folder)), EngineConfig(dtype="float32")), torch.device("cpu"))


def engine(model: LoadedModel, kv_dtype: str = "fp32", **config: object) -> LLM:
    quantized = kv_dtype in ("int8", "fp8", "int4")
    config = {"max_model_len": 320, "max_num_seqs": 4, "block_size": 16, "kv_residual_length": 24, **config}
    return LLM(model, EngineConfig(kv_dtype=kv_dtype, **(config if quantized else {**config, **NO_RESIDUAL})))


class Layer:
    """The first layer of an engine, with random inputs for sequences, whose tokens are the same in every engine."""

    def __init__(self, llm: LLM, fill: str = "0xff") -> None:
        self.llm, self.layer = llm, llm.cache.layers[0]
        pattern = torch.tensor(FILLS[fill], dtype=torch.uint8)
        for arena in llm.cache.arenas:
            arena.copy_(pattern.repeat(arena.numel() // len(pattern)).view_as(arena))
        module = next(part for part in llm.model.module.modules() if isinstance(part, LatentProjection))
        self.projection = module
        self.inputs = []
        for seq in range(4):
            generator = torch.Generator().manual_seed(seq)
            query, key = (torch.randn(320, *shape, generator=generator) for shape in ((4, 24), (1, 40)))
            self.inputs.append((3 * query, key + 0.5))

    def batch(self, parts: Sequence[tuple[int, int, int]]) -> AttentionBatch:
        """(sequence, start, end) of every chunk."""
        chunks = []
        for seq, start, end in parts:
            manager(self.llm).append(seq, end - start)
            chunks.append(Chunk(Request(seq, [0] * end, SamplingParams()), start, end, False))
        return runner(self.llm).batch(chunks)

    @torch.inference_mode()
    def attend(self, parts: Sequence[tuple[int, int, int]], expand: bool) -> torch.Tensor:
        batch = self.batch(parts)
        query, key = (torch.cat([self.inputs[seq][i][start:end] for seq, start, end in parts]) for i in (0, 1))
        inputs = LayerInputs(0, query, key, key[..., :32], 0.2, 0.0, None)
        batch = batch if expand else replace(batch, prompts=())
        return attend_latent(self.projection, inputs, self.layer, batch)


@pytest.fixture
def expanded_rows(monkeypatch) -> list[PromptRows]:
    """The rows whose keys have been expanded, layer by layer."""
    found = []
    attend = expansion.attend_expanded

    def note(projection, query, rows, *args, **kwargs):
        found.append(rows)
        return attend(projection, query, rows, *args, **kwargs)

    monkeypatch.setattr("lean.model.attention.attend_expanded", note)
    return found


@pytest.mark.parametrize("pool_bytes", [1, 2**17, 2**25], ids=["one head", "two heads", "all heads"])
@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_a_long_chunk_beside_others_equals_the_absorbed_one(model, expanded_rows, monkeypatch, kv_dtype, pool_bytes):
    """Two long chunks, one of them behind 90 tokens, beside a token that decodes and a short chunk."""
    monkeypatch.setattr(expansion, "POOL_BYTES", pool_bytes)
    found = []
    for expand in (True, False):
        layer = Layer(engine(model, kv_dtype))
        layer.attend([(1, 0, 90), (2, 0, 45)], expand=False)
        found.append(layer.attend([(0, 0, 133), (2, 45, 46), (1, 90, 240), (3, 0, 5)], expand))
    assert expanded_rows == [PromptRows(0, 0, 133, 133), PromptRows(2, 134, 150, 240)]
    assert found[0].isfinite().all()
    assert error(found[0], found[1].double()) < 4e-6


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_a_chunk_alone_equals_the_absorbed_one_whatever_the_residual(model, expanded_rows, kv_dtype):
    """A residual that is shorter than the chunk, as long as all tokens, and none; and sinks beyond the first block."""
    for residual, sinks, start in ((24, 4, 64), (24, 20, 0), (300, 4, 64), (0, 0, 64)):
        config = {"kv_residual_length": residual, "sinks": sinks if residual and kv_dtype in FORMATS[2:] else None}
        found = []
        for expand in (True, False):
            layer = Layer(engine(model, kv_dtype, **config))
            layer.attend([(0, 0, start)] if start else [(1, 0, 1)], expand=False)
            found.append(layer.attend([(0, start, 200)], expand))
        assert error(found[0], found[1].double()) < 4e-6
    assert len(expanded_rows) == 4


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_what_the_pools_held_before_changes_no_bit(model, expanded_rows, kv_dtype):
    rows = []
    for fill in FILLS:
        layer = Layer(engine(model, kv_dtype), fill)
        layer.attend([(1, 0, 70)], expand=True)
        rows.append(layer.attend([(0, 0, 100), (1, 70, 207)], expand=True))
    assert len(expanded_rows) == 3 * len(FILLS)
    assert rows[0].isfinite().all()
    assert all(same_bits(rows[0], other) for other in rows[1:])


@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16"])
def test_one_shot_equals_chunks_and_single_tokens(model, expanded_rows, kv_dtype):
    ids = tokens(130)
    rows, counts = [], []
    for chunk in (None, 65, 1):
        rows.append(torch.cat([part for _, part in engine(model, kv_dtype, prefill_chunk=chunk).hidden_states(ids)]))
        counts.append(len(expanded_rows))
    assert counts == [4, 4 + 8, 4 + 8]  # four layers, two chunks of 65
    if kv_dtype == "fp32":  # another order of additions moves a bf16 number to its neighbour
        assert all((other - rows[0]).abs().max() < 1e-5 * rows[0].abs().max() for other in rows[1:])
    else:
        assert all((other - rows[0]).norm() < 1e-2 * rows[0].norm() for other in rows[1:])


def test_a_long_prompt_beside_running_sequences_changes_no_answer(model, expanded_rows):
    greedy = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    prompts = [tokens(count, seed) for seed, count in enumerate((9, 20, 300))]
    alone = [engine(model).generate([ids], greedy)[0].token_ids for ids in prompts]
    expanded_rows.clear()
    llm = engine(model, prefill_chunk=150, max_num_batched_tokens=160)
    found = {llm.add_request(ids, greedy): [] for ids in prompts[:2]}
    for _ in range(3):
        for output in llm.step():
            found[output.request_id] += output.token_ids
    found[llm.add_request(prompts[2], greedy)] = []
    while llm.has_work:
        for output in llm.step():
            found[output.request_id] += output.token_ids
    assert list(found.values()) == alone
    assert {(rows.seq, rows.num_rows) for rows in expanded_rows} == {(2, 150)}


@pytest.mark.parametrize("config", [{"deterministic": True}, {"window": 64}, {"window": 64, "sinks": 4}], ids=str)
def test_deterministic_mode_and_windows_stay_absorbed_in_chunks_of_512(folder, model, expanded_rows, config):
    if "deterministic" in config:
        info = inspect_model(resolve(str(folder)), EngineConfig(dtype="float32"))
        model = load_model(info, torch.device("cpu"), deterministic=True)
    llm = engine(model, **config)
    assert llm.config.chunk_tokens == llm.config.step_tokens == 512
    list(llm.hidden_states(tokens(230)))
    assert not expanded_rows


def test_an_observer_of_a_long_chunk_sees_absorbed_queries(model, expanded_rows):
    llm, seen = engine(model), []

    def observe(inputs: LayerInputs, outcome: torch.Tensor) -> torch.Tensor:
        seen.append((inputs.query.shape, outcome.shape))
        return outcome

    manager(llm).append(0, 100)
    runner(llm).run([Chunk(Request(0, tokens(100), SamplingParams()), 0, 100, False)], observe)
    assert seen == [((100, 4, 40), (100, 4, 32))] * 4
    assert not expanded_rows


def test_latent_prompts_are_read_in_chunks_of_2048_unless_the_user_chose(model):
    assert [engine(model).config.chunk_tokens, engine(model).config.step_tokens] == [2048, 2048]
    chosen = engine(model, prefill_chunk=100, max_num_batched_tokens=120).config
    assert [chosen.chunk_tokens, chosen.step_tokens] == [100, 120]


@pytest.mark.parametrize(
    ("count", "context", "residual", "expands"),
    [(2048, 0, 0, True), (512, 1536, 0, True), (2048, 6144, 64, True), (256, 8192, 0, False), (1, 8192, 0, False)],
)
def test_what_takes_less_arithmetic_is_chosen(model, count, context, residual, expands):
    """GLM-4.7-Flash: a vector costs as much to expand as 400 queries save with it."""
    own = replace(engine(model).cache.layers[0].group, residual_length=residual)
    rows = PromptRows(0, 0, count, context + count)
    assert pays(GLM, rows, 576, own) is expands
    assert not pays(GLM, rows, 576, replace(own, window=4096))


def test_heads_are_taken_together_in_equal_parts_that_fit():
    mebibyte = 2**20
    assert 32 * mebibyte == expansion.POOL_BYTES
    assert [heads_at_once(20, size * mebibyte) for size in (1, 4, 5, 16, 17, 500)] == [20, 5, 5, 2, 1, 1]
    assert heads_at_once(7, 5 * mebibyte) == 1


@pytest.fixture
def held(monkeypatch) -> list[int]:
    """Bytes of the vectors and of the expanded K/V, of each layer and chunk that is expanded."""
    found = []
    attend, pool_for = expansion.attend_expanded, expansion._Vectors.pool_for

    def begun(*args, **kwargs):
        found.append(0)
        return attend(*args, **kwargs)

    def made(vectors, layout):
        pool = pool_for(vectors, layout)
        found[-1] += vectors.latent.nbytes + pool.arena.nbytes
        return pool

    monkeypatch.setattr("lean.model.attention.attend_expanded", begun)
    monkeypatch.setattr(expansion._Vectors, "pool_for", made)
    return found


@pytest.mark.parametrize("kv_dtype", ["fp32", "int8"])
def test_memory_of_the_longest_prompt_is_kept_free(model, held, monkeypatch, kv_dtype):
    monkeypatch.setattr(expansion, "POOL_BYTES", 2**17)
    llm = engine(model, kv_dtype, prefill_chunk=160)
    list(llm.hidden_states(tokens(320)))
    assert max(held) == llm.engine.parts.working_bytes > 2**15
    assert len(held) == 8


@pytest.mark.parametrize("config", [{"window": 64}, {"deterministic": True}, {"prefill_chunk": 32}], ids=str)
def test_no_memory_is_kept_where_nothing_is_expanded(folder, config):
    llm = LLM(str(folder), EngineConfig(dtype="float32", max_model_len=320, **config))
    assert llm.engine.parts.working_bytes == 0
