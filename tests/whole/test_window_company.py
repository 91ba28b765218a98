"""Under a window a request beside others, forked, preempted or continued gives the same as alone."""

import pytest
from engine_state import check_integrity, nothing_left, preempt
from tiny import tokens
from windowed import IDS, loader, start

from lean import LLM, SamplingParams


@pytest.fixture(scope="module")
def model(tiny):
    return loader(tiny)


def results(llm: LLM, ids: list[int], **params: object) -> list[tuple]:
    params = SamplingParams(
        **{"max_tokens": 30, "temperature": 0.9, "seed": 3, "ignore_eos": True, "logprobs": 0} | params
    )
    return [(out.token_ids, out.logprobs) for out in llm.generate([ids], params)]


FORMS = [("fp32", {}), ("fp8", {"kv_residual_length": 0}), ("int4", {"kv_residual_length": 8})]


@pytest.mark.parametrize(("kv_dtype", "rest"), FORMS)
@pytest.mark.parametrize("name", ["llama, 2 layers", "gemma3, mixed"])
def test_forked_and_preempted_requests_give_the_same_as_alone_under_a_window(model, name, kv_dtype, rest):
    """The request is preempted twice, once in the middle of its prompt. Blocks are forked, copied and evicted."""
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
            preempt(llm, first)
        parts += [part for part in llm.step() if part.request_id == first]
        check_integrity(llm)
        if not llm.has_work:
            break
    assert other != first
    assert llm.num_preemptions == 2
    assert ([t for p in parts for t in p.token_ids], [e for p in parts for e in p.logprobs or []]) == alone
    nothing_left(llm)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
@pytest.mark.parametrize("kept", [150, 149, 143, 128, 100])
def test_a_second_turn_gives_the_same_as_a_fresh_run_whether_its_beginning_is_cached_or_not(model, kv_dtype, kept):
    """A turn of three windows after the first window, then single steps.

    With ``kept`` 100 the blocks of its window were evicted, but nothing has been written into them since.
    """
    options = {"window": 40, "sinks": 4, "kv_residual_length": 8, "prefill_chunk": 64}
    ids = IDS[:kept] + tokens(3 * 40, seed=8)
    llm = start(model("gemma3, mixed"), kv_dtype, **options)
    llm.generate([IDS[:150]], SamplingParams(1, temperature=0, ignore_eos=True))
    params = SamplingParams(12, temperature=0, ignore_eos=True, logprobs=0)
    parts = list(llm.stream(ids, params))
    found = [token for part in parts for token in part.token_ids], [e for part in parts for e in part.logprobs]
    [fresh] = results(start(model("gemma3, mixed"), kv_dtype, **options), ids, max_tokens=12, temperature=0, seed=None)
    assert found == fresh
    assert parts[0].cached_tokens == kept // 32 * 32
    if kept < 150:
        return
    exact = start(model("gemma3, mixed"), "fp32", **options | {"kv_residual_length": None}).score(ids)
    quantized = start(model("gemma3, mixed"), kv_dtype, **options).score(ids)
    assert (quantized - exact).abs().max() < 0.1
