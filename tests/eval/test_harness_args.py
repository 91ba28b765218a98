"""Arguments of lm-eval, what is too long, what is refused, and conversations."""

import logging

import pytest
from helpers import refusal
from tiny import tokens

pytest.importorskip("lm_eval")

from harness import instances, lean
from lm_eval.api.instance import Instance

from lean import EngineConfig
from lean.eval.harness.args import engine_config
from lean.eval.harness.model import LeanLM
from lean.eval.score.continuations import score_continuations


@pytest.fixture(scope="module")
def folder(tiny):
    return tiny("llama", vocab_size=259)  # no rows without a token: hf generates such ids, lean never does


@pytest.fixture(scope="module")
def exact(folder):
    return lean(folder)


def test_truncation_is_from_the_left_counted_by_item_and_logged(exact, folder, caplog):
    model = LeanLM(exact.llm, progress=False)
    long = "".join(map(chr, (97 + index % 26 for index in range(600))))
    pairs = [("short", " one"), (long, " a"), (long, " bcd"), ("also short", " two")]
    requests = [
        Instance("loglikelihood", {}, pair, 0, ("task", item, 1))
        for pair, item in zip(pairs, (0, 1, 1, 2), strict=True)
    ]
    with caplog.at_level(logging.WARNING, "lean"):
        found = model.loglikelihood(requests)
    assert "1 of 3 items truncated (max 91 tokens dropped)" in caplog.text
    assert model.truncated("task") == {"items": 1, "of": 3, "max_tokens_dropped": 604 - 513}
    assert model.get_model_info()["truncated"]["task"]["items"] == 1
    ids = model.tok_encode(long + " bcd")[-513:]
    assert found[2][0] == pytest.approx(float(exact.llm.score(ids)[-4:].sum()), abs=1e-4)


def test_impossible_requests_are_refused(exact):
    def ask(kind, *arguments):
        return refusal(getattr(exact, kind), instances(kind, [arguments]))

    assert "512" in ask("loglikelihood", "a", "b" * 600)
    assert "no token" in ask("loglikelihood", "a", "")
    assert "no room" in ask("generate_until", "a", {"until": [], "max_gen_toks": 512})
    assert "num_beams" in ask("generate_until", "a", {"until": [], "num_beams": 4})
    assert "temperature" in ask("generate_until", "a", {"until": [], "temperature": -1.0, "do_sample": True})
    assert "0 of 2" in refusal(lambda: list(score_continuations(exact.llm, [(tokens(2), 0)])))
    assert exact.llm.stats().tokens_held == 0
    assert not exact.llm.has_work


def test_conversations_are_rendered_by_the_models_template(exact, monkeypatch):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert "chat template" in refusal(exact.apply_chat_template, messages)
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    monkeypatch.setattr(exact.tokenizer, "chat_template", template)
    assert exact.apply_chat_template(messages) == "[user]Hi[assistant]"
    messages[-1]["role"] = "assistant"
    assert exact.apply_chat_template(messages, add_generation_prompt=False) == "[assistant]Hi"
    assert exact.chat_template(True) == template
    monkeypatch.setattr(exact.tokenizer, "chat_template", "{{ 'x' * 1000000000 }}")
    assert "512 MiB" in refusal(exact.apply_chat_template, messages)
    monkeypatch.setattr(exact.tokenizer, "chat_template", "{{ messages[-1].content }}")
    assert "messages[0] (system)" in refusal(exact.apply_chat_template, messages)
    assert exact.tokenizer_name


def test_model_arguments_become_the_engines_options():
    given = {
        "kv_dtype": "k=int8,v=int4",
        "kv_skip_layers": -1.0,
        "window": "4096",
        "kv_residual_length": "none",
        "kv_memory": "512MiB",
        "deterministic": "True",
        "max_num_seqs": 4.0,
        "dtype": "float32",
    }
    assert engine_config(given) == EngineConfig(
        kv_dtype="k=int8,v=int4",
        kv_skip_layers="-1",
        window=4096,
        kv_memory=512 * 2**20,
        deterministic=True,
        max_num_seqs=4,
        dtype="float32",
    )
    assert engine_config({}) == EngineConfig()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"kv_dtpye": "int8"}, "kv_dtpye"),
        ({"v": "int4"}, "quotes"),
        ({"window": "wide"}, "window 'wide'"),
        ({"window": 0.5}, "window 0.5"),
        ({"deterministic": "maybe"}, "deterministic 'maybe'"),
        ({"kv_dtype": "int2"}, "int2"),
        ({"kv_memory": "lots"}, "lots"),
    ],
)
def test_impossible_model_arguments_are_refused(given, said):
    assert said in refusal(engine_config, given)


def test_lm_eval_makes_the_model_from_its_command_line(folder):
    from lm_eval.api.registry import get_model

    model = get_model("lean").create_from_arg_string(
        f"pretrained={folder},kv_dtype=int8,window=128,max_gen_toks=9", {"batch_size": 1, "device": "cpu"}
    )
    assert model.llm.config == EngineConfig(kv_dtype="int8", window=128, device="cpu")
    assert model.max_gen_toks == 9
    model = get_model("lean").create_from_arg_obj({"pretrained": str(folder)}, {"batch_size": 1, "device": "cuda:0"})
    assert model.llm.config == EngineConfig()
    assert "configured" in refusal(LeanLM, model.llm, window=4)
