"""An evaluation that is interrupted prints what it has measured, marked as partial, and ends with exit code 130."""

import json

import pytest

from lean.engine.engine import Engine
from lean.text.template import ChatTemplate

TEXT = "The quick brown fox jumps over the lazy dog. " * 8
FINE = ("--context", "64", "--prefill-chunk", "16", "--max-num-seqs", "1")


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return str(file)


@pytest.fixture
def interrupt(monkeypatch):
    """``interrupt(n)``: the n-th step of an engine raises KeyboardInterrupt, once."""
    step = Engine.step

    def arm(number):
        steps = iter(range(1, number))

        def interrupted(self):
            if next(steps, None) is None:
                monkeypatch.setattr(Engine, "step", step)
                raise KeyboardInterrupt
            return step(self)

        monkeypatch.setattr(Engine, "step", interrupted)

    return arm


def test_perplexity_of_the_tokens_scored_so_far(lean, model, text, interrupt):
    command = ("eval", "ppl", model, "--text", text, *FINE, "--deterministic")
    interrupt(6)  # within the second sequence: 4 steps and 1 more are done
    code, out, _ = lean(*command, "--json")
    part = json.loads(out)
    assert (code, part["partial"], part["word_ppl"], part["byte_ppl"]) == (130, True, None, None)
    assert 64 <= part["tokens_scored"] <= 80
    whole = json.loads(lean(*command, "--json", "--max-tokens", str(part["tokens_scored"]))[1])
    assert not whole["partial"]
    assert abs(whole["nll"] - part["nll"]) < 1e-6
    interrupt(6)
    code, out, _ = lean(*command)
    assert code == 130
    assert out.startswith("PARTIAL, interrupted after ")


def test_divergence_of_the_tokens_compared_so_far(lean, model, text, interrupt):
    command = ("eval", "kld", model, "--text", text, *FINE)
    steps = -(-len(TEXT) // 16)
    interrupt(steps + 12)
    code, out, _ = lean(*command, "--json")
    part = json.loads(out)
    assert (code, part["partial"], part["floor_kld_mean"]) == (130, True, None)
    assert 0 < part["tokens_scored"] < len(TEXT)
    interrupt(steps + 12)
    code, out, _ = lean(*command)
    assert code == 130
    assert out.startswith("PARTIAL, interrupted after ")
    assert "not measured" in out


@pytest.mark.parametrize("what", ["ppl", "kld"])
def test_an_interrupt_before_the_first_result_prints_nothing(lean, model, text, interrupt, what):
    interrupt(1)
    code, out, _ = lean("eval", what, model, "--text", text, *FINE)
    assert (code, out) == (130, "")


def test_needles_asked_for_so_far(lean, model, text, interrupt):
    asking = ("--lengths", "300", "--depths", "0,100", "--trials", "1", "--no-chat", "--json")
    whole = json.loads(lean("eval", "needle", model, "--text", text, *asking)[1])
    assert (whole["partial"], len(whole["cells"])) == (False, 2)
    interrupt(3 + 12)  # an answer has at most 12 tokens; the first cell has ended
    code, out, _ = lean("eval", "needle", model, "--text", text, *asking)
    part = json.loads(out)
    assert (code, part["partial"], len(part["cells"])) == (130, True, 1)


@pytest.fixture
def questions(tmp_path, monkeypatch):
    """A folder of three tasks over a local file of 12 items: choices, texts, and whole documents."""
    pytest.importorskip("lm_eval")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")

    def offline(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.utils.get_session", lambda: type("Session", (), {"head": offline})())
    rows = [{"text": f"Number {index}: {TEXT[index : 20 + 3 * index]}", "answer": index % 3} for index in range(12)]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    common = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test\n"
    kinds = {
        "choice": 'output_type: multiple_choice\ndoc_to_text: "{{text}}"\ndoc_to_choice: [surely, never, perhaps]\n'
        "doc_to_target: answer\nnum_fewshot: 1\nfewshot_split: test\n"
        "metric_list: [{metric: acc}, {metric: acc_norm}]\n",
        "text": 'output_type: generate_until\ndoc_to_text: "{{text}}"\ndoc_to_target: x\n'
        "generation_kwargs: {until: [], max_gen_toks: 3}\nmetric_list: [{metric: exact_match}]\n",
        "document": 'output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{text}}"\n'
        "metric_list: [{metric: byte_perplexity}]\n",
    }
    for name, lines in kinds.items():
        (tmp_path / f"{name}.yaml").write_text(f"task: own_{name}\n{common}{lines}")
    return ("--include-path", str(tmp_path), "--max-num-seqs", "1", "--deterministic", "--json")


@pytest.mark.parametrize(("kind", "step"), [("choice", 12), ("text", 14), ("document", 5)])
def test_items_answered_so_far_have_the_figures_that_they_have_alone(
    kind, step, lean, model, questions, interrupt, monkeypatch
):
    pytest.importorskip("lm_eval")
    monkeypatch.setattr("lean.eval.harness.model._PART", 1)
    monkeypatch.setattr("lean.eval.harness.model._PART_BATCHES", 1)  # the items in their order
    command = ("eval", "tasks", model, "--tasks", f"own_{kind},lean_cloze", *questions)
    interrupt(step)
    code, out, _ = lean(*command)
    part = json.loads(out)
    assert (code, part["partial"], part["not_run"]) == (130, True, ["lean_cloze"])
    [(name, found)] = part["tasks"].items()
    assert name == f"own_{kind}"
    assert 2 <= found["num_items"] < 12
    assert found["num_items"] + found["items_left"] == 12
    alone = ("--limit", str(found["num_items"]))
    whole = json.loads(lean("eval", "tasks", model, "--tasks", name, *questions, *alone)[1])
    assert whole["partial"] is False
    assert whole["tasks"][name]["items_left"] == 0
    assert whole["tasks"][name]["metrics"] == found["metrics"]


def test_tasks_that_are_interrupted_say_so_in_words(lean, model, questions, interrupt):
    command = ("eval", "tasks", model, "--tasks", "own_text", *questions[:-1])
    interrupt(1)
    assert lean(*command)[:2] == (130, "")
    interrupt(8)
    code, out, _ = lean(*command)
    assert code == 130
    assert out.startswith("PARTIAL, interrupted after 2 items\nown_text (2 of 12 items) exact_match: 0.0000")


def test_a_template_that_refuses_an_item_names_the_task_and_the_item(lean, model, questions, monkeypatch):
    template = (
        "{% for m in messages %}{% if 'Number 3' in m.content %}{{ raise_exception('no threes') }}{% endif %}"
        "[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    monkeypatch.setattr("lean.eval.harness.model.has_template", lambda tokenizer: True)
    monkeypatch.setattr("lean.eval.harness.model.template_of", lambda tokenizer: ChatTemplate("a model", template, ()))
    code, out, err = lean("eval", "tasks", model, "--tasks", "own_text", "--chat", *questions)
    assert (code, out) == (2, "")
    [line] = [line for line in err.splitlines() if line.startswith("lean: ")]
    assert "own_text item 3: " in line
    assert "no threes" in line
