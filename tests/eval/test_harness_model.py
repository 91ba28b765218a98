"""lean as a model of lm-eval: the numbers of lm-eval's own ``hf`` model, from the cache, whatever runs together."""

import logging
import math
import shutil

import pytest
import torch
from helpers import refusal
from tiny import BOS, byte_tokenizer, tokens
from tokenizers.processors import TemplateProcessing

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from lean import LLM, EngineConfig
from lean.eval.harness.args import engine_config
from lean.eval.harness.model import LeanLM
from lean.eval.score.continuations import score_continuations

EXACT = {"kv_dtype": "fp32", "dtype": "float32"}
PAIRS = [
    ("The lighthouse stood", " on the cliff"),
    ("The lighthouse stood", " in the town"),
    ("One answer:", " A"),
    ("One answer:", " B"),
    ("Spaces move   ", "to the answer"),
    ("", "no context at all"),
    ("x" * 300, " after a long one"),
    ("ü, then é", "ñ"),
]
DOCUMENTS = ["A short one.", "word " * 150, "z", "héllo wörld " * 120, ""]


def instances(kind, arguments, task="task"):
    return [
        Instance(kind, {}, args if isinstance(args, tuple) else (args,), 0, (task, index, 1))
        for index, args in enumerate(arguments)
    ]


def lean(source, **options):
    return LeanLM(str(source), progress=False, **{**EXACT, **options})


def hf(folder, **options):
    return HFLM(pretrained=str(folder), dtype="float32", device="cpu", batch_size=4, **options)


@pytest.fixture(scope="module")
def folder(tiny):
    return tiny("llama", vocab_size=259)  # no rows without a token: hf generates such ids, lean never does


@pytest.fixture(scope="module")
def bos_folder(folder, tmp_path_factory):
    """The same model with a tokenizer that begins every text with BOS."""
    copy = shutil.copytree(folder, tmp_path_factory.mktemp("bos") / "model")
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    tokenizer.save_pretrained(copy)
    return copy


@pytest.fixture(scope="module")
def exact(folder):
    return lean(folder)


@pytest.fixture(scope="module")
def peer(folder):
    return hf(folder)


def scored_ids(model, monkeypatch, kind, arguments):
    """The sequences that a call has the engine run, in order of the requests, and the answers."""
    seen = []

    def spy(llm, sequences):
        seen.extend(sequences)
        return score_continuations(llm, sequences)

    monkeypatch.setattr("lean.eval.harness.model.score_continuations", spy)
    return seen, getattr(model, kind)(instances(kind, arguments))


def likeliest_pair(model):
    """A context and the letter that follows it under greedy decoding."""
    for context in map(chr, range(48, 123)):
        ids = model.tok_encode(context)
        logits = model.llm.logits(torch.cat([rows for _, rows in model.llm.hidden_states(ids)]))
        letter = model.tokenizer.decode([int(logits[-1].argmax())])
        if letter.isascii() and letter.isprintable() and letter:
            return context, letter
    raise AssertionError("no printable character is ever the likeliest")


# --- equal to lm-eval's own model ---


def test_likelihoods_and_greedy_flags_are_those_of_hf(exact, peer):
    pairs = [*PAIRS, likeliest_pair(exact)]
    ours, theirs = (model.loglikelihood(instances("loglikelihood", pairs)) for model in (exact, peer))
    for (logprob, greedy), (wanted, wanted_greedy) in zip(ours, theirs, strict=True):
        assert logprob == pytest.approx(wanted, abs=1e-4)
        assert greedy == wanted_greedy
    assert ours[-1][1]
    assert not all(greedy for _, greedy in ours)


def test_rolling_likelihoods_are_those_of_hf_over_several_windows(exact, peer):
    assert max(map(len, DOCUMENTS)) > 2 * exact.max_length == 2 * peer.max_length
    ours, theirs = (
        model.loglikelihood_rolling(instances("loglikelihood_rolling", DOCUMENTS)) for model in (exact, peer)
    )
    assert ours == pytest.approx(theirs, abs=1e-3)
    assert ours[-1] == 0


@pytest.mark.parametrize(
    "arguments",
    [{"until": []}, {"until": ["e"]}, {"until": ["zq", " "], "max_gen_toks": 40}, {"until": [], "do_sample": False}],
)
def test_generated_texts_are_those_of_hf(exact, peer, arguments):
    arguments = {"max_gen_toks": 24, **arguments}
    contexts = [(text, arguments) for text in ("The lighthouse", "One", "x" * 200, "The lighthouse")]
    ours, theirs = (model.generate_until(instances("generate_until", contexts)) for model in (exact, peer))
    assert ours == theirs


def test_a_context_too_long_to_generate_after_is_cut_as_hf_does(exact, peer):
    context = "".join(map(chr, (97 + index % 26 for index in range(700))))
    call = [(context, {"until": [], "max_gen_toks": 8})]
    assert exact.generate_until(instances("generate_until", call)) == peer.generate_until(
        instances("generate_until", call)
    )


def test_the_boundary_is_that_of_hf(exact, peer):
    for context, continuation in PAIRS:
        if context:
            assert exact._pair(context, continuation) == peer._encode_pair(context, continuation)


# --- by hand, and through the cache ---


def test_three_tokens_have_the_hand_computed_likelihood(exact):
    ids = exact.tok_encode("abc")
    hidden = torch.cat([rows for _, rows in exact.llm.hidden_states([BOS, *ids])])
    logprobs = exact.llm.logits(hidden).log_softmax(-1)
    wanted = sum(float(logprobs[place, token]) for place, token in enumerate(ids))
    (document,) = exact.loglikelihood_rolling(instances("loglikelihood_rolling", ["abc"]))
    ((pair, _),) = exact.loglikelihood(instances("loglikelihood", [("", "abc")]))
    ((tail, _),) = exact.loglikelihood(instances("loglikelihood", [("a", "bc")]))
    assert document == pair == pytest.approx(wanted, abs=1e-5)
    alone = torch.cat([rows for _, rows in exact.llm.hidden_states(ids)])
    logprobs = exact.llm.logits(alone).log_softmax(-1)
    assert tail == pytest.approx(float(logprobs[0, ids[1]] + logprobs[1, ids[2]]), abs=1e-5)


def test_likelihoods_read_the_quantized_cache(exact):
    low = LeanLM(LLM(exact.llm.model, EngineConfig(kv_dtype="int4", kv_residual_length=0)), progress=False)
    requests = instances("loglikelihood", PAIRS)
    fine, coarse = ([logprob for logprob, _ in model.loglikelihood(requests)] for model in (exact, low))
    documents = instances("loglikelihood_rolling", DOCUMENTS[:3])
    fine += exact.loglikelihood_rolling(documents)
    coarse += low.loglikelihood_rolling(documents)
    differences = [abs(a - b) for a, b in zip(fine, coarse)]
    assert min(differences[:5]) > 1e-3
    assert max(differences) < 0.2 * max(map(abs, fine))  # the same model still


def test_a_window_takes_documents_of_any_length_in_one_piece(folder, monkeypatch):
    model = lean(folder, window=64)
    text = "a document longer than the model " * 60
    seen, (total,) = scored_ids(model, monkeypatch, "loglikelihood_rolling", [text])
    assert [(len(ids), count) for ids, count in seen] == [(len(text) + 1, len(text))]
    assert len(text) > 512
    assert math.isfinite(total)
    assert model.truncated()["items"] == 0


# --- company ---


@pytest.mark.parametrize("copies", range(1, 9))
def test_copies_of_a_request_score_as_one_does(exact, copies):
    ((wanted, _),) = exact.loglikelihood(instances("loglikelihood", PAIRS[:1]))
    found = exact.loglikelihood(instances("loglikelihood", PAIRS[1:4] + PAIRS[:1] * copies))
    assert [logprob for logprob, _ in found[3:]] == pytest.approx([wanted] * copies, abs=1e-5)


def test_equal_requests_and_those_that_differ_in_the_last_token_run_once(exact, monkeypatch):
    run = []
    hidden_states_of = exact.llm.hidden_states_of
    monkeypatch.setattr(exact.llm, "hidden_states_of", lambda some: run.extend(some) or hidden_states_of(some))
    exact.loglikelihood(instances("loglikelihood", [("One answer: ", letter) for letter in "ABCDAB"]))
    assert [len(ids) for ids in run] == [len("One answer: ")]
    texts = []
    add_request = exact.llm.add_request
    monkeypatch.setattr(exact.llm, "add_request", lambda ids, params: texts.append(ids) or add_request(ids, params))
    greedy, sampled = {"until": [], "max_gen_toks": 2}, {"until": [], "max_gen_toks": 2, "temperature": 1.0}
    exact.generate_until(instances("generate_until", [("a", greedy), ("a", sampled), ("a", greedy), ("a", sampled)]))
    assert len(texts) == 3


@pytest.mark.parametrize("kv_dtype", ["fp32", "k8v4"])
def test_a_deterministic_engine_gives_the_same_bits_at_every_batch_size(exact, kv_dtype):
    answers, counts = [], []
    for size in (1, 2, 8):
        config = EngineConfig(
            kv_dtype=kv_dtype, deterministic=True, max_num_seqs=size, prefill_chunk=40, max_num_batched_tokens=96
        )
        model = LeanLM(LLM(exact.llm.model, config), progress=False)
        call = [(context, {"until": [], "max_gen_toks": 4}) for context, _ in PAIRS[1:5]]
        answers.append(
            (
                model.loglikelihood(instances("loglikelihood", PAIRS[:6])),
                model.loglikelihood_rolling(instances("loglikelihood_rolling", ["A short one.", "word " * 20])),
                model.generate_until(instances("generate_until", call)),
            )
        )
        counts.append(model.tokens_scored)
    assert answers[0] == answers[1] == answers[2]
    assert counts[0] == counts[1] == counts[2] > 150


def test_sampling_is_repeatable_with_torchs_seed_and_copies_differ(exact):
    call = [("Once", {"until": [], "max_gen_toks": 12, "do_sample": True, "temperature": 1.0, "top_p": 0.9})] * 3

    def texts(seed):
        torch.manual_seed(seed)
        return exact.generate_until(instances("generate_until", call))

    assert texts(1) == texts(1) != texts(2)
    assert len(set(texts(1))) == 3


def test_leaving_a_generation_frees_everything(exact, monkeypatch):
    def fail(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("lean.eval.harness.model.tqdm.update", fail)
    call = [(context, {"until": [], "max_gen_toks": 4}) for context, _ in PAIRS]
    with pytest.raises(KeyboardInterrupt):
        exact.generate_until(instances("generate_until", call))
    exact.llm.step()
    assert not exact.llm.has_work
    assert exact.llm.stats().tokens_held == 0


# --- BOS ---


def test_without_bos_in_the_tokenizer_it_stands_before_empty_contexts_and_documents_only(folder, monkeypatch):
    seen, _ = scored_ids(lean(folder), monkeypatch, "loglikelihood", [("ab", "cd"), ("", "cd"), ("<s>ab", "cd")])
    assert [ids.count(BOS) for ids, _ in seen] == [0, 1, 1]
    assert [count for _, count in seen] == [2, 2, 2]
    seen, _ = scored_ids(lean(folder), monkeypatch, "loglikelihood_rolling", ["ten tokens", "<s>ten tokens"])
    assert [(ids[0], ids.count(BOS), count) for ids, count in seen] == [(BOS, 1, 10)] * 2


def test_with_bos_in_the_tokenizer_every_sequence_has_one_and_it_is_never_scored(bos_folder, monkeypatch):
    assert hf(bos_folder).tok_encode("ab")[0] == BOS
    pairs = [("ab", "cd"), ("", "cd"), ("<s>ab", "cd")]
    seen, answers = scored_ids(lean(bos_folder), monkeypatch, "loglikelihood", pairs)
    assert [(ids[0], ids.count(BOS), count) for ids, count in seen] == [(BOS, 1, 2)] * 3
    wanted = hf(bos_folder).loglikelihood(instances("loglikelihood", pairs))
    assert [logprob for logprob, _ in answers] == pytest.approx([logprob for logprob, _ in wanted], abs=1e-4)
    seen, (total,) = scored_ids(lean(bos_folder), monkeypatch, "loglikelihood_rolling", ["ten tokens"])
    assert [(ids[0], ids.count(BOS), count) for ids, count in seen] == [(BOS, 1, 10)]
    document = instances("loglikelihood_rolling", ["ten tokens"])
    assert total == pytest.approx(hf(bos_folder, add_bos_token=False).loglikelihood_rolling(document)[0], abs=1e-3)
    assert abs(total - hf(bos_folder).loglikelihood_rolling(document)[0]) > 0.1  # scores a second BOS


def test_bos_can_be_asked_for_and_turned_off(folder, bos_folder):
    for source in (folder, bos_folder):
        assert lean(source, add_bos_token=True).tok_encode("ab")[:2].count(BOS) == 1
        assert BOS not in lean(source, add_bos_token=False).tok_encode("ab")
    assert lean(folder, prefix_token_id=7)._pair("", "ab")[0] == [7]
    assert "never" in lean(folder, add_bos_token=False).bos_rule


def test_gemma_gets_its_bos_though_the_tokenizer_adds_none(tiny):
    assert lean(tiny("gemma3")).tok_encode("ab")[0] == BOS


# --- what does not fit ---


def test_truncation_is_from_the_left_counted_by_item_and_said(exact, folder, caplog):
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


def test_what_cannot_be_scored_or_generated_is_refused(exact):
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


# --- chat ---


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
    assert exact.tokenizer_name


# --- arguments ---


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
        ({"kv_dtype": "int3"}, "int3"),
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


@pytest.mark.slow
def test_the_demo_model_scores_documents_and_continuations_as_hf_does():
    from lean.eval.corpus import python_docs
    from lean.eval.harness.cloze import make_items
    from lean.store.pull import pull

    torch.set_num_threads(2)
    source = pull("smollm2-135m")
    text = python_docs()
    documents = [text[start : start + 500] for start in range(0, 200_000, 10_000)]
    pairs = [(item["context"], f" {word}") for item in make_items(text, 5) for word in item["choices"]]
    ours, theirs = (
        (
            model.loglikelihood_rolling(instances("loglikelihood_rolling", documents)),
            model.loglikelihood(instances("loglikelihood", pairs)),
        )
        for model in (lean(source), hf(source))
    )
    rolling = max(abs(a - b) / abs(b) for a, b in zip(ours[0], theirs[0], strict=True))
    pairwise = max(abs(a - b) for (a, _), (b, _) in zip(ours[1], theirs[1], strict=True))
    print(f"{len(documents)} documents: {rolling:.1e} of their sum; {len(pairs)} continuations: {pairwise:.1e}")
    assert rolling < 1e-5  # sums of some 400 nats in float32: 1.3e-3 of one was seen
    assert pairwise < 1e-4
    assert [greedy for _, greedy in ours[1]] == [greedy for _, greedy in theirs[1]]
