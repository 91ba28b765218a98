"""Tasks of lm-eval on a loaded engine, and the cloze task that needs no download."""

import json
import re
import sys
from functools import partial

import pytest
import torch
from helpers import refusal

pytest.importorskip("lm_eval")

from lean import LLM, EngineConfig
from lean.eval import tasks
from lean.eval.corpus import python_docs
from lean.eval.harness import cloze, find
from lean.eval.harness.model import LeanLM
from lean.eval.tasks import check_tasks, run_tasks

LOCAL = {
    "rolling": """
task: local_rolling
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
metadata: {version: 3}
""",
    "choice": """
task: local_choice
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{text}} Answer:"
doc_to_choice: [surely, never, perhaps]
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "generation": """
task: local_generation
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
output_type: generate_until
test_split: test
doc_to_text: "{{text}}"
doc_to_target: "x"
generation_kwargs: {until: ["\\n"], max_gen_toks: 5}
metric_list: [{metric: exact_match}]
""",
    "group": """
group: local_both
task: [local_rolling, local_choice]
aggregate_metric_list: []
""",
    "away": """
task: local_away
dataset_path: nobody-at-all/nothing
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: text
""",
}


@pytest.fixture(scope="module")
def local_tasks(tmp_path_factory):
    """A folder of tasks over a local file, one of them longer than the tiny models."""
    folder = tmp_path_factory.mktemp("tasks")
    texts = ["The lighthouse stood on the cliff.", "word " * 150, "A short one.", "ünïcode", "One more of them."]
    rows = [{"text": text, "answer": index % 3} for index, text in enumerate(texts)]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    for name, text in LOCAL.items():
        (folder / f"{name}.yaml").write_text(text.replace("DATA", str(folder / "data.jsonl")), encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def _datasets_stay_here(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture(scope="module")
def source(tiny):
    return tiny("llama")


@pytest.fixture(scope="module")
def exact(source):
    return LLM(str(source), EngineConfig(kv_dtype="fp32", dtype="float32"))


@pytest.fixture
def no_hub(monkeypatch):
    """A hub that fails at once."""

    def refuse(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.utils.get_session", lambda: type("Session", (), {"head": refuse})())


def test_local_tasks_give_the_figures_of_the_hf_model(exact, source, local_tasks, no_hub):
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    names = ["local_rolling", "local_choice", "local_generation"]
    ours = run_tasks(exact, names, include_path=local_tasks)
    theirs = simple_evaluate(
        HFLM(pretrained=str(source), dtype="float32", device="cpu", batch_size=4),
        tasks=names,
        task_manager=TaskManager(include_path=str(local_tasks), include_defaults=False),
        bootstrap_iters=0,
        log_samples=False,
    )
    for task, metric in (
        ("local_rolling", "word_perplexity"),
        ("local_rolling", "byte_perplexity"),
        ("local_rolling", "bits_per_byte"),
        ("local_choice", "acc"),
        ("local_choice", "acc_norm"),
        ("local_generation", "exact_match"),
    ):
        wanted = theirs["results"][task][f"{metric},none"]
        assert ours["tasks"][task]["metrics"][metric]["value"] == pytest.approx(wanted, rel=1e-4), metric


def test_results_are_plain_json_with_errors_items_truncation_and_the_engine(exact, local_tasks, no_hub):
    found = run_tasks(exact, ["local_choice", "local_rolling"], include_path=local_tasks, limit=4)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    choice = found["tasks"]["local_choice"]
    assert choice["num_items"] == 4
    assert choice["num_fewshot"] == 0
    assert choice["failed"] == choice["encoded_apart"] == {"items": 0, "first": None}
    assert choice["truncated"] == {"items": 1, "of": 4, "max_tokens_dropped": 750 + len(" Answer: perhaps") - 513}
    assert choice["metrics"]["acc"]["higher_is_better"]
    assert 0 < choice["metrics"]["acc"]["stderr"] < 0.5
    assert found["tasks"]["local_rolling"]["version"] == 3
    assert found["tasks"]["local_rolling"]["metrics"]["byte_perplexity"]["stderr"] is None
    model = found["model"]
    assert model["engine"]["kv_dtype"] == "fp32"
    assert model["kv"]["bytes_per_token"] == exact.plan.bytes_per_token
    assert model["tokens_scored"] > 750
    assert "not scored" in model["bos"]
    assert found["limit"] == 4


def test_groups_and_yaml_files_can_be_asked_for(exact, local_tasks, no_hub):
    found = run_tasks(exact, ["local_both"], include_path=local_tasks, limit=1)
    assert set(found["tasks"]) == {"local_rolling", "local_choice"}
    found = run_tasks(exact, [str(local_tasks / "choice.yaml")], limit=1)
    assert set(found["tasks"]) == {"local_choice"}


def test_few_shot_examples_become_turns_of_a_conversation(exact, local_tasks, no_hub, monkeypatch):
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]"
        "{% endif %}"
    )
    monkeypatch.setattr(exact.model.tokenizer, "chat_template", template)
    contexts = []
    pair = LeanLM._pair
    monkeypatch.setattr(LeanLM, "_pair", lambda self, item: contexts.append(item.args[0]) or pair(self, item))
    found = run_tasks(
        exact, ["local_choice"], num_fewshot=2, limit=1, include_path=local_tasks, apply_chat_template=True
    )
    assert found["tasks"]["local_choice"]["num_fewshot"] == 2
    for context in contexts:
        assert re.fullmatch(r"(\[user\][^[]+\[assistant\][^[]+){2}\[user\][^[]+\[assistant\]", context)


def test_engines_of_one_model_can_be_compared(exact, local_tasks, no_hub):
    def perplexity(kv_dtype):
        llm = LLM(exact.model, EngineConfig(kv_dtype=kv_dtype, kv_residual_length=0))
        found = run_tasks(llm, ["local_rolling"], include_path=local_tasks)
        return found["tasks"]["local_rolling"]["metrics"]["byte_perplexity"]["value"]

    fine = run_tasks(exact, ["local_rolling"], include_path=local_tasks)
    fine = fine["tasks"]["local_rolling"]["metrics"]["byte_perplexity"]["value"]
    assert 0 < abs(perplexity("int8") - fine) < abs(perplexity("int4") - fine) < 0.1 * fine


def test_unknown_tasks_are_named_before_anything_is_loaded(monkeypatch):
    monkeypatch.setattr(find, "_no_retries", None)  # the hub is not asked
    assert "arc_easy" in refusal(check_tasks, ["arc_easyy"])
    assert "lm_eval ls tasks" in refusal(check_tasks, ["no such task"])
    assert "no task given" in refusal(check_tasks, [])
    assert "not a folder" in refusal(check_tasks, ["lean_cloze"], "nowhere")


def test_data_out_of_reach_is_reported_at_once_with_what_to_do(local_tasks, no_hub, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("it waits to try again"))
    message = refusal(check_tasks, ["local_away"], local_tasks)
    for part in ("local_away", "nobody-at-all/nothing", "--include-path", "HF_HOME"):
        assert part in message


def test_only_the_task_folders_that_matter_are_read():
    lambada = find.find_tasks(["lambada_openai"], None)
    assert lambada.task_index["lambada_openai"].yaml_path.name == "lambada_openai.yaml"
    assert len(lambada.all_tasks) < 300
    group = find.find_tasks(["leaderboard"], None)  # its members are groups, in other folders
    members = find._members(group, "leaderboard")
    assert {"leaderboard_bbh", "leaderboard_mmlu_pro", "leaderboard_bbh_snarks"} <= members <= group.task_index.keys()


def test_without_lm_eval_the_extra_is_named(exact, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    find._index.cache_clear()
    assert "lean-inference[eval]" in refusal(run_tasks, exact, ["lean_cloze"])
    assert "lean-inference[eval]" in refusal(tasks.main)


# --- the cloze task ---


def test_cloze_items_are_well_formed_and_always_the_same():
    text = python_docs()
    items = cloze.make_items(text)
    assert len(items) == cloze.NUM_ITEMS
    assert items == cloze.make_items(text)
    flat = " ".join(text.split())
    for item in items:
        right = item["choices"][item["answer"]]
        assert f"{item['context']} {right}." in flat
        assert len(set(item["choices"])) == 4
        assert 500 < len(item["context"]) < cloze.CONTEXT_CHARS + 12
        assert not {word for word in item["choices"] if word != right} & set(item["context"].split())
    answers = [item["answer"] for item in items]
    assert min(answers.count(place) for place in range(4)) > len(items) / 8


def test_cloze_takes_any_text_and_gives_fewer_items_where_it_is_short():
    assert cloze.make_items("") == []
    assert cloze.make_items("too short. " * 10) == []
    words = ("alpha", "beta", "gamma", "delta", "omega", "theta")
    text = " ".join(
        f"sentence number {index} " + "filling " * 90 + f"ends in {words[index % 6]}." for index in range(90)
    )
    assert 0 < len(cloze.make_items(text + " ")) < cloze.NUM_ITEMS


def test_cloze_runs_without_any_network(exact, monkeypatch):
    monkeypatch.setattr("socket.socket.connect", lambda *args: pytest.fail("it asks the network"))
    found = run_tasks(exact, ["lean_cloze"], limit=3)["tasks"]["lean_cloze"]
    assert found["num_items"] == 3
    assert found["truncated"]["items"] == 3  # the tiny model's tokens are bytes, and it takes 512
    assert found["metrics"].keys() == {"acc"}


# --- the command ---


def test_the_lm_eval_command_has_the_model_lean_and_the_cloze_task(source, tmp_path, monkeypatch, capsys):
    from lm_eval.tasks import TaskManager

    # Without its own tasks, which take it many seconds to read.
    monkeypatch.setattr("lm_eval.tasks.TaskManager", partial(TaskManager, include_defaults=False))
    command = f"--model lean --model_args pretrained={source},kv_dtype=int8,window=64 --tasks lean_cloze --limit 2"
    monkeypatch.setattr("sys.argv", ["lm_eval", *command.split(), "--output_path", str(tmp_path / "out")])
    tasks.main()
    assert "|lean_cloze|" in capsys.readouterr().out
    (written,) = tmp_path.rglob("results*.json")
    config = json.loads(written.read_text())["config"]
    assert config["engine"]["window"] == 64
    assert config["truncated"]["lean_cloze"] == {"items": 0, "of": 2, "max_tokens_dropped": 0}


@pytest.mark.slow
def test_the_demo_model_fills_gaps_far_better_than_chance():
    torch.set_num_threads(2)
    llm = LLM("smollm2-135m", EngineConfig(dtype="float32"))  # many CPUs have no products in bfloat16
    found = run_tasks(llm, ["lean_cloze"], limit=60)["tasks"]["lean_cloze"]
    print(found)
    acc = found["metrics"]["acc"]
    assert acc["value"] - 4 * acc["stderr"] > 0.25
