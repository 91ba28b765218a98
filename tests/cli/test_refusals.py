"""Every mistake of a user is one line on stderr and exit code 2."""

import json
import shutil

import pytest
from commands import assert_refused

BAD = {
    "unknown flag": (("MODEL", "hi", "--nope"), "--nope"),
    "unknown format": (("MODEL", "hi", "--kv-dtype", "int2"), "int2"),
    "empty prompt": (("MODEL", ""), "prompt is empty"),
    "empty -p": (("MODEL", "-p", ""), "prompt is empty"),
    "empty stdin": (("MODEL",), "prompt is empty"),
    "two prompts": (("MODEL", "hi", "-p", "hi"), "two prompts"),
    "three arguments": (("MODEL", "hi", "there"), "there"),
    "sentence as model": (("Why is the sky blue?",), "looks like a prompt"),
    "long text as model": (("x" * 100_000,), "unknown model"),
    "missing path": (("/no/such/folder", "hi"), "/no/such/folder"),
    "a file as model": ((__file__, "hi"), "is not a model"),
    "unknown name": (("nosuchmodel", "hi"), "nosuchmodel"),
    "not UTF-8": (("MODEL", "hi \udcff"), "UTF-8"),
    "little memory": (("MODEL", "hi", "--kv-memory", "1KiB"), "--kv-memory"),
    "no size": (("MODEL", "hi", "--kv-memory", "lots"), "lots"),
    "too many blocks": (("MODEL", "hi", "--num-blocks", "1000000000"), "--num-blocks"),
    "two sizes": (("MODEL", "hi", "--num-blocks", "4", "--kv-memory", "1MiB"), "num-blocks"),
    "beyond the model": (("MODEL", "hi", "--max-model-len", "513"), "512"),
    "no residual": (("MODEL", "hi", "--kv-dtype", "bf16", "--kv-residual-length", "64"), "kv-residual-length 64"),
    "bad device": (("MODEL", "hi", "--device", "abacus"), "abacus"),
    "device without data": (("MODEL", "hi", "--device", "meta"), "meta"),
    "absent device": (("MODEL", "hi", "--device", "cuda:99"), "cuda:99"),
    "bad dtype": (("MODEL", "hi", "--dtype", "int8"), "int8"),
    "no tokens": (("MODEL", "hi", "--max-tokens", "0"), "max-tokens"),
    "no number": (("MODEL", "hi", "--max-tokens", "ten"), "--max-tokens"),
    "negative temperature": (("MODEL", "hi", "--temperature", "-1"), "temperature"),
    "temperature nan": (("MODEL", "hi", "--temperature", "nan"), "temperature"),
    "negative seed": (("MODEL", "hi", "--seed", "-1"), "seed"),
    "block size": (("MODEL", "hi", "--block-size", "33"), "block-size 33"),
    "threads": (("MODEL", "hi", "--threads", "0"), "threads 0"),
    "empty stop": (("MODEL", "hi", "--stop", ""), "stop"),
    "no top-p": (("MODEL", "hi", "--top-p", "0"), "top-p"),
    "n": (("MODEL", "hi", "--n", "0"), "n must be"),
    "n beyond max-num-seqs": (("MODEL", "hi", "--n", "3", "--max-num-seqs", "2"), "max-num-seqs"),
    "steps too small": (("MODEL", "hi", "--max-num-seqs", "9", "--max-num-batched-tokens", "8"), "every running"),
    "no config": (("MODEL", "hi", "--config", "/no/such.yaml"), "/no/such.yaml"),
    "prompts without out": (("MODEL", "--prompts", "/no/such.jsonl"), "--out"),
    "prompts and a prompt": (("MODEL", "hi", "--prompts", "/no/such.jsonl", "--out", "/tmp/x"), "holds the prompts"),
    "no prompts": (("MODEL", "--prompts", "/no/such.jsonl", "--out", "/tmp/x"), "/no/such.jsonl"),
    "window 0": (("MODEL", "hi", "--window", "0"), "window 0"),
    "sinks for nothing": (("MODEL", "hi", "--kv-dtype", "bf16", "--sinks", "4"), "--window"),
    "layers that are not there": (("MODEL", "hi", "--kv-skip-layers", "0,7"), "layer 7"),
    "unreadable layers": (("MODEL", "hi", "--kv-layers", "0-1=int8"), "kv-layers"),
}


@pytest.mark.parametrize(("arguments", "word"), BAD.values(), ids=BAD)
def test_bad_input_is_one_line_and_exit_code_2(lean, model, arguments, word):
    assert_refused(lean("run", *(model if argument == "MODEL" else argument for argument in arguments)), word)


def test_a_prompt_this_model_cannot_take_is_one_line_after_the_start_up_line(lean, model):
    assert_refused(lean("run", model, "x" * 513, "--json"), "513 tokens", lines=2)
    assert_refused(lean("run", model, "hi", "--chat"), "no chat template", lines=2)


TEMPLATES = {
    "{{ 'x' * 1000000000 }}": "needed more than 512 MiB of memory",
    "{% for m in messages %}{{ m.role }}{% endfor %}": "does not write the text of messages[0] (user)",
    "{{ raise_exception('not today') }}": "cannot render this conversation: not today",
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_chat_template_that_cannot_be_used_is_one_line_that_names_the_model(lean, model, template, tmp_path, prompts):
    folder = shutil.copytree(model, tmp_path / "hostile")
    (folder / "chat_template.jinja").write_text(template)
    result = lean("run", str(folder), "hi", "--no-probe")
    assert_refused(result, TEMPLATES[template], lines=2)
    assert "the chat template of " in result[2]
    rows, out = prompts({"messages": [{"role": "user", "content": "hi"}]}), tmp_path / "out.jsonl"
    assert lean("run", str(folder), "--prompts", str(rows), "--out", str(out), "--no-probe")[0] == 2
    assert TEMPLATES[template] in json.loads(out.read_text())["error"]


def test_bad_input_to_the_other_commands_is_one_line_too(lean, model, monkeypatch):
    assert_refused(lean("rum"), "rum")
    assert_refused(lean("info", "/no/such/folder", "--json"), "/no/such/folder")
    assert_refused(lean("pull", "no-such-model"), "no-such-model")
    assert_refused(lean("run", model, stdin=b"\xff\xfe\x00"), "not UTF-8")
    monkeypatch.setenv("LEAN_KERNELS", "abacus")
    assert_refused(lean("run", model, "hi"), "abacus")
