"""A run that ends early keeps every finished row, and the next run answers the others."""

import os
import signal

import pytest
from batches import PARAMS, TEXTS, Engine, results, rows_of

from lean.cli.batch import BatchSummary, run_batch
from lean.cli.batch_results import read_done
from lean.cli.batch_rows import read_rows
from lean.config import EngineConfig
from lean.errors import EngineError
from lean.llm import LLM


@pytest.fixture(scope="module")
def llm(tiny):
    config = EngineConfig(kv_dtype="bf16", max_num_seqs=3, max_model_len=128, deterministic=True)
    return LLM(str(tiny("llama", num_hidden_layers=1)), config)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError("kernel"), MemoryError])
@pytest.mark.parametrize("when", range(1, 12))
def test_an_end_in_the_middle_loses_the_running_rows_only_and_the_next_run_goes_on(out, console, error, when):
    def end(step):
        if step == when:
            raise error

    engine = Engine(2, end)
    rows = rows_of(*TEXTS, "bad one")
    with pytest.raises(type(error) if isinstance(error, Exception) else error):
        run_batch(engine, rows, out, PARAMS, None, console)
    assert not engine.requests
    written = results(out)
    started = len(engine.encoded)
    assert len(written) == started - len(engine.aborted) + (9 in written)
    assert len(engine.aborted) <= 4
    assert f"{len(written)} of 9 rows are in {out}" in console.file.getvalue()
    summary = run_batch(Engine(2), rows, out, PARAMS, None, console)
    assert (summary.skipped, summary.done + summary.failed) == (len(written), 9 - len(written))
    assert {key: value.get("text") for key, value in results(out).items()} == {
        **{number: text[:4].upper() for number, text in enumerate(TEXTS, 1)},
        9: None,
    }


def test_a_killed_run_goes_on_where_it_was(out, console):
    rows = rows_of(*TEXTS)
    child = os.fork()
    if child == 0:
        try:
            run_batch(
                Engine(2, lambda step: step == 7 and os.kill(os.getpid(), signal.SIGKILL)),
                rows,
                out,
                PARAMS,
                None,
                console,
            )
        finally:
            os._exit(1)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    written = results(out)
    assert 0 < len(written) < 8
    assert read_done(out) == set(written)
    assert run_batch(Engine(2), rows, out, PARAMS, None, console).skipped == len(written)
    assert set(results(out)) == set(range(1, 9))


def test_a_resumed_run_gives_what_an_unbroken_one_gives(llm, prompts, out, console, monkeypatch):
    rows = read_rows(prompts(*({"prompt": text} for text in TEXTS)))
    run_batch(llm, rows, out, PARAMS, None, console)
    whole = results(out)
    out.unlink()
    step, steps = llm.step, iter(range(7))

    def interrupted():
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_batch(llm, rows, out, PARAMS, None, console)
    monkeypatch.undo()
    assert 0 < len(results(out)) < 8
    assert llm.stats().tokens_held == 0
    run_batch(llm, rows, out, PARAMS, None, console)
    assert results(out) == whole


def test_an_engine_that_loses_a_request_ends_the_run(out, console):
    engine = Engine()
    engine.step = lambda: engine.requests.clear() or []
    with pytest.raises(EngineError, match="lost 2 requests"):
        run_batch(engine, rows_of("a", "b"), out, PARAMS, None, console)


def test_a_run_with_nothing_to_do_says_so(out, console):
    rows = rows_of("a", "b")
    run_batch(Engine(), rows, out, PARAMS, None, console)
    data = out.read_bytes()
    assert run_batch(None, rows, out, PARAMS, None, console) == BatchSummary(0, 2, 0, 0, 0.0)
    assert f"nothing to do: all 2 rows are in {out}" in console.file.getvalue()
    assert out.read_bytes() == data
