"""lm-eval's clients of servers, unchanged: over HTTP they give the figures that lean's own back end gives."""

from dataclasses import replace

import pytest

pytest.importorskip("lm_eval")
pytest.importorskip("tenacity", reason="lm-eval's clients of servers are not installed: pip install 'lm-eval[api]'")

from harness import instances
from http_server import chat_checkpoint, loader, served
from lm_eval import simple_evaluate
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager

from lean import LLM
from lean.eval.harness.cloze import TASKS_FOLDER
from lean.eval.harness.model import LeanLM
from lean.store.pull import pull

KEY = "secret"
# Deterministic: the bits do not depend on which requests run together, nor on what the prefix cache gives.
TINY = {"max_model_len": 1024, "num_blocks": 320, "dtype": "float32", "deterministic": True}


@pytest.fixture(scope="module")
def tiny_folder(tiny, tmp_path_factory):
    """Long enough for the contexts of the task, whose tokens are bytes."""
    source = tiny("llama", num_hidden_layers=1, max_position_embeddings=1024)
    return chat_checkpoint(source, tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def server(tiny_folder):
    with served(loader(tiny_folder, **TINY), api_key=(KEY,)) as running:
        yield running
        running.assert_idle()


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def over_http(server, kind, path, **options):
    """Name and arguments of one of lm-eval's clients."""
    arguments = {"model": server.service.names[0], "base_url": server.url + path, "max_retries": 1, **options}
    return {"model": kind, "model_args": arguments}


def in_process(server, **options):
    """lean's back end with the server's weights and options, and a cache of its own."""
    llm = LLM(server.llm.model, replace(server.llm.config, **options))
    return {"model": LeanLM(llm, progress=False)}


def evaluated(model, task, limit, **options):
    """Metrics of a task, and the model's answers to its items."""
    manager = TaskManager(include_path=str(TASKS_FOLDER), include_defaults=False)
    found = simple_evaluate(**model, tasks=[task], task_manager=manager, limit=limit, bootstrap_iters=0, **options)
    metrics = {name: value for name, value in found["results"][task].items() if not name.startswith("alias")}
    return metrics, [sample["filtered_resps"] for sample in found["samples"][task]]


def assert_scored_alike(http, own, tolerance):
    assert http[0] == own[0]
    for theirs, ours in zip(http[1], own[1], strict=True):
        assert [greedy for _, greedy in theirs] == [greedy for _, greedy in ours]
        assert [score for score, _ in theirs] == pytest.approx([score for score, _ in ours], abs=tolerance)


def test_scores_over_http_are_those_of_the_back_end(server, tiny_folder):
    """The answers differ in length, and the cache is quantized. Only lm-eval's sums may round differently."""
    assert server.llm.config.kv_dtype == "int8"
    # Both keep the last 159 tokens: lm-eval leaves room for one more, lean's back end does not run the last one.
    own = evaluated(in_process(server, max_model_len=158), "lean_cloze", 2)
    for way in ({"batch_size": 4}, {"num_concurrent": 3}):
        arguments = {"tokenizer": str(tiny_folder), "max_length": 160, **way}
        client = over_http(server, "local-completions", "/v1/completions", **arguments)
        assert_scored_alike(evaluated(client, "lean_cloze", 2), own, 1e-9)


def test_texts_of_chats_over_http_are_those_of_the_back_end(server):
    client = over_http(server, "local-chat-completions", "/v1/chat/completions")
    http = evaluated(client, "lean_cloze_text", 1, apply_chat_template=True)
    own = evaluated(in_process(server), "lean_cloze_text", 1, apply_chat_template=True)
    assert http == own
    assert all(text for (text,) in http[1])


@pytest.mark.slow
def test_the_demo_model_over_http_has_the_figures_of_the_back_end():
    folder = str(pull("smollm2-135m"))
    options = {"dtype": "float32", "max_model_len": 1024, "num_blocks": None}
    with served(loader(folder, **options), names=("smollm2",), api_key=(KEY,)) as server:
        client = over_http(server, "local-completions", "/v1/completions", tokenizer=folder, num_concurrent=4)
        own = in_process(server)
        assert_scored_alike(evaluated(client, "lean_cloze", 1), evaluated(own, "lean_cloze", 1), 1e-4)
        pairs = instances("loglikelihood", [("1, 2, 3, 4, 5,", " 6, 7, 8"), ("1, 2, 3, 4, 5,", " 9, 7")])
        ours, theirs = own["model"].loglikelihood(pairs), get_model(client["model"])(**client["model_args"])
        assert_scored_alike((None, [theirs.loglikelihood(pairs)]), (None, [ours]), 1e-4)
        assert [greedy for _, greedy in ours] == [True, False]
