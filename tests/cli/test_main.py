"""The lean command: answers on stdout and nothing else there, one line for every mistake, exit codes that mean it."""

import io
import json
import signal
import subprocess
import sys
import threading
import time

import pytest
import yaml

from lean.cli import main as cli
from lean.quant import NAMES

RUN = ("--max-tokens", "6", "--ignore-eos")
KV_KEYS = {"format_k", "format_v", "residual", "sinks", "block_size", "bytes_per_token", "tokens_held"}
KV_KEYS |= {"bytes_held", "bytes_if_bf16", "pools"}
KEYS = {"text", "token_ids", "finish_reason", "prompt_tokens", "completion_tokens", "kv", "timing", "kernels"}


@pytest.fixture(scope="module")
def model(tiny):
    return str(tiny("llama", num_hidden_layers=1))


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    for name in ("TOKENIZERS_PARALLELISM", "TRANSFORMERS_VERBOSITY", "TRANSFORMERS_NO_ADVISORY_WARNINGS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.delenv("LEAN_MODEL", raising=False)
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def lean(monkeypatch, capsys):
    """``lean(*arguments, stdin=bytes)`` -> (exit code, stdout, stderr)."""

    def call(*arguments, stdin=b""):
        monkeypatch.setattr(sys, "argv", ["lean", *arguments])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as end:
            cli.main()
        return end.value.code, *capsys.readouterr()

    return call


@pytest.mark.parametrize("command", [(), ("run",), ("pull",), ("info",), ("models",), ("rm",)], ids=str)
def test_every_command_explains_itself(lean, command):
    code, out, err = lean(*command, "--help")
    assert (code, err) == (0, "")
    assert "Usage:" in out
    words = {
        ("run",): ("--kv-dtype", "int8", "[default: 32]", "smollm2-135m", "--temperature"),
        (): ("run", "pull", "info", "models", "rm"),
    }
    assert all(word in out for word in words.get(command, ("--help",)))


def test_help_waits_for_neither_torch_nor_transformers():
    code = "import lean.cli.main, sys; sys.exit('transformers' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_a_command_the_help_is_shown(lean):
    assert lean()[:2] == lean("--help")[:2]


@pytest.mark.parametrize("text", ["hello", "é\n 😀"])
def test_the_prompt_may_come_from_its_place_an_option_or_standard_input(lean, model, text):
    code, out, _ = lean("run", model, text, *RUN)
    assert code == 0
    assert lean("run", model, "-p", text, *RUN)[:2] == (0, out)
    assert lean("run", model, *RUN, stdin=text.encode())[:2] == (0, out)
    assert lean("run", model, *RUN, stdin=f"{text}\n".encode())[:2] == (0, out)  # as `echo` ends it
    assert lean("run", model, "-", *RUN, stdin=text.encode())[:2] == (0, out)


def no_constant(name):
    raise AssertionError(f"{name} is no JSON")


def test_json_is_one_object_with_exactly_these_keys(lean, model):
    code, out, _ = lean("run", model, "hello", *RUN, "--json", "--kv-dtype", "k8v4")
    assert (code, out.count("\n")) == (0, 1)
    result = json.loads(out, parse_constant=no_constant)
    assert result.keys() == KEYS
    assert result["kv"].keys() == KV_KEYS
    assert result["timing"].keys() == {"load_s", "ttft_s", "prefill_tok_s", "decode_tok_s"}
    assert (result["prompt_tokens"], result["completion_tokens"], len(result["token_ids"])) == (5, 6, 6)
    assert result["finish_reason"] == "length"
    kv = result["kv"]
    assert (kv["format_k"], kv["format_v"], kv["residual"], kv["sinks"]) == ("int8", "int4", 64, 4)
    assert (kv["tokens_held"], kv["block_size"]) == (10, 32)
    assert kv["bytes_held"] == sum(pool["bytes_held"] for pool in kv["pools"]) > 0
    assert kv["bytes_if_bf16"] == 10 * 2 * 2 * 16 * 2
    assert lean("run", model, "hello", *RUN, "--kv-dtype", "k8v4")[1] == result["text"] + "\n"
    one = json.loads(lean("run", model, "hello", "--max-tokens", "1", "--json")[1], parse_constant=no_constant)
    assert one["timing"]["decode_tok_s"] is None


def test_the_start_up_line_says_what_the_cache_really_is(lean, model):
    """U06."""
    for arguments, words in (
        ((), ("float32 on cpu", "KV cache int8, last 64 and first 4 tokens unquantized", "72 bytes/token", "room for")),
        (("--kv-dtype", "fp8", "--kv-residual-length", "0"), ("KV cache fp8,", "72 bytes/token")),
        (
            ("--dtype", "bfloat16", "--kv-dtype", "auto", "--num-blocks", "3"),
            ("bfloat16", "KV cache bf16,", "room for 96 tokens"),
        ),
        (("--num-blocks", "3"), ("max-model-len lowered from 512 to 96",)),
    ):
        code, _, err = lean("run", model, "hello", *RUN, *arguments)
        assert code == 0
        assert all(word in err for word in words), err


def test_lean_model_is_used_and_said(lean, model, monkeypatch):
    monkeypatch.setenv("LEAN_MODEL", model)
    code, out, err = lean("run", "-p", "hello", *RUN)
    assert code == 0
    assert f"model: {model} (LEAN_MODEL)" in err.splitlines()
    assert out == lean("run", model, "hello", *RUN)[1]
    assert model in lean("info")[2]


BAD = {
    "unknown flag": (("MODEL", "hi", "--nope"), "--nope"),
    "unknown format": (("MODEL", "hi", "--kv-dtype", "int3"), "int3"),
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
    "too many blocks": (("MODEL", "hi", "--num-blocks", "1000000000000000"), "--num-blocks"),
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


def assert_refused(result, word, lines=1):
    code, out, err = result
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == lines
    assert err.splitlines()[-1].startswith("lean: ")
    assert word in err


@pytest.mark.parametrize(("arguments", "word"), BAD.values(), ids=BAD)
def test_bad_input_is_one_line_and_exit_code_2(lean, model, arguments, word):
    assert_refused(lean("run", *(model if argument == "MODEL" else argument for argument in arguments)), word)


def test_a_prompt_this_model_cannot_take_is_one_line_after_the_start_up_line(lean, model):
    assert_refused(lean("run", model, "x" * 513, "--json"), "513 tokens", lines=2)
    assert_refused(lean("run", model, "hi", "--chat"), "no chat template", lines=2)


def test_bad_input_to_the_other_commands_is_one_line_too(lean, model, monkeypatch):
    assert_refused(lean("rum"), "rum")
    assert_refused(lean("info", "/no/such/folder", "--json"), "/no/such/folder")
    assert_refused(lean("pull", "no-such-model"), "no-such-model")
    assert_refused(lean("run", model, stdin=b"\xff\xfe\x00"), "not UTF-8")
    monkeypatch.setenv("LEAN_KERNELS", "abacus")
    assert_refused(lean("run", model, "hi"), "abacus")


@pytest.mark.parametrize("name", ["[red]model", "a[", "a[/b]"])
def test_a_path_with_brackets_is_shown_as_it_is(lean, model, tmp_path, monkeypatch, name):
    folder = tmp_path / name
    folder.parent.mkdir(exist_ok=True)
    folder.symlink_to(model)
    monkeypatch.setenv("LEAN_MODEL", str(folder))
    code, _, err = lean("run", "-p", "hi", *RUN)
    assert code == 0
    assert f"model: {folder} (LEAN_MODEL)" in err.splitlines()


@pytest.mark.parametrize("flag", [(), ("--json",)])
def test_text_beyond_the_encoding_of_standard_output_does_not_crash(lean, model, monkeypatch, flag):
    whole = json.loads(lean("run", model, "hello", *RUN, "--json")[1])
    assert not whole["text"].isascii()
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stdout)
    assert lean("run", model, "hello", *RUN, *flag)[0] == 0
    stdout.flush()
    written = stdout.buffer.getvalue().decode("ascii")
    assert set(filter(str.isascii, whole["text"])) <= set(written) if not flag else json.loads(written)["token_ids"]


def test_info_describes_a_model_and_what_its_cache_costs(lean, model):
    code, out, err = lean("info", model, "--json")
    assert (code, err, out.count("\n")) == (0, "", 1)
    report = json.loads(out, parse_constant=no_constant)
    assert (report["model_type"], report["dtype"], report["layers"], report["head_dim"]) == ("llama", "float32", 1, 16)
    assert (report["num_q_heads"], report["num_kv_heads"], report["max_position_embeddings"]) == (4, 2, 512)
    costs = {"fp32": 256, "bf16": 128, "int8": 72, "fp8": 72, "k8v4": 56, "int4": 40}
    assert report["bytes_per_token"].keys() == set(NAMES)
    assert report["bytes_per_token"] | costs == report["bytes_per_token"]
    code, out, err = lean("info", model)
    assert (code, err) == (0, "")
    assert all(word in out for word in ("llama", "float32", *NAMES, "72"))


@pytest.fixture(scope="module")
def answering(tiny):
    """Two commands amid a long answer, five bytes of which were read."""
    folder = str(tiny("llama", max_position_embeddings=20_000))
    command = (sys.executable, "-m", "lean", "run", folder, "hi", "--max-tokens", "19000", "--ignore-eos")
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # Background jobs of a shell ignore SIGINT, and children inherit that.
    heed = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    processes = [subprocess.Popen(command, **pipes, **heed) for _ in range(2)]
    watchdog = threading.Timer(120, lambda: [process.kill() for process in processes])
    watchdog.start()
    assert [len(process.stdout.read(5)) for process in processes] == [5, 5]
    yield processes
    watchdog.cancel()
    for process in processes:
        process.kill()


def test_a_reader_that_leaves_ends_the_answer_without_a_traceback(answering):
    answering[0].stdout.close()
    err = answering[0].stderr.read().decode()
    assert answering[0].wait(timeout=30) != 0
    assert not any(word in err for word in ("Traceback", "ignored", "Broken"))


def test_an_interrupt_ends_the_answer_within_two_seconds(answering):
    sent = time.monotonic()
    answering[1].send_signal(signal.SIGINT)
    lines = [answering[1].stderr.readline().decode() for _ in range(2)]
    assert lines[1] == "lean: interrupted\n"  # after the start-up line; freeing torch's modules takes a second more
    assert time.monotonic() - sent < 2
    assert answering[1].stderr.read() == b""
    assert answering[1].wait(timeout=30) == 130


def test_a_file_of_options_lies_under_the_flags_and_can_be_printed(lean, model, tmp_path):
    file = tmp_path / "options.yaml"
    file.write_text("kv_dtype: k8v4\nblock_size: 16\nmax_tokens: 3\nignore_eos: true\n")
    code, out, err = lean("run", "--config", str(file), "--block-size", "64", "--print-config")
    printed = yaml.safe_load(out)
    assert (code, err) == (0, "")
    assert [printed[key] for key in ("kv_dtype", "block_size", "max_tokens", "max_num_seqs")] == ["k8v4", 64, 3, 1]
    result = json.loads(lean("run", model, "hello", "--config", str(file), "--json")[1])
    assert (result["kv"]["format_v"], result["kv"]["block_size"], result["completion_tokens"]) == ("int4", 16, 3)
    again = tmp_path / "again.yaml"
    again.write_text(out)
    assert lean("run", "--config", str(again), "--print-config")[1] == out
    file.write_text(f"model: {model}\nmax_tokens: 2\n")
    assert lean("run", "-p", "hello", "--config", str(file))[:2] == lean("run", model, "hello", "--max-tokens", "2")[:2]


def test_a_flag_for_the_size_of_the_cache_replaces_the_other_one_of_the_file(lean, model, tmp_path):
    file = tmp_path / "options.yaml"
    file.write_text("kv_memory: 1GiB\nmax_num_batched_tokens: 4\n")
    assert lean("run", model, "hello", "--config", str(file), "--num-blocks", "4", *RUN)[0] == 0


def test_several_answers_are_printed_one_after_the_other(lean, model):
    flags = ("--n", "3", "--temperature", "1", "--seed", "5", *RUN)
    result = json.loads(lean("run", model, "hello", *flags, "--json", "--logprobs", "2")[1], parse_constant=no_constant)
    assert [choice["index"] for choice in result["choices"]] == [0, 1, 2]
    assert len({tuple(choice["token_ids"]) for choice in result["choices"]}) == 3
    assert len(result["logprobs"]) == 6
    assert all(len(entry["top"]) == 2 for entry in result["logprobs"])
    out = lean("run", model, "hello", *flags)[1]
    assert out.count("--- ") == 3
    assert all(choice["text"] in out for choice in result["choices"])


def test_a_stop_text_ends_the_answer_and_is_not_part_of_it(lean, model):
    whole = json.loads(lean("run", model, "hello", *RUN, "--json")[1])["text"]
    cut = json.loads(lean("run", model, "hello", *RUN, "--json", "--stop", whole[2:4])[1])
    assert (cut["text"], cut["finish_reason"]) == (whole[: whole.index(whole[2:4])], "stop")


def test_a_file_of_prompts_is_answered_into_a_file_and_never_twice(lean, model, tmp_path):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    rows = [{"prompt": "hello"}, {"prompt": "x" * 600, "id": "long"}, {"prompt": "there", "max_tokens": 2}]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, stdout, err = lean("run", model, "--prompts", str(prompts), "--out", str(out), *RUN)
    assert (code, stdout) == (2, "")
    assert "1 rows could not be answered" in err
    assert "room for 8 sequences" not in err
    found = {row["id"]: row for row in map(json.loads, out.read_text().splitlines())}
    assert found[1]["text"] == json.loads(lean("run", model, "hello", *RUN, "--json")[1])["text"]
    assert (found[3]["completion_tokens"], found["long"]["finish_reason"]) == (2, "error")
    assert "600 tokens" in found["long"]["error"]
    before = out.read_text()
    code, _, err = lean("run", model, "--prompts", str(prompts), "--out", str(out), *RUN)
    assert (code, out.read_text()) == (0, before)
    assert "nothing to do" in err


def test_a_window_and_formats_by_layer_are_said_and_counted(lean, model):
    flags = ("--window", "100", "--kv-dtype", "fp8", "--max-tokens", "6", "--ignore-eos")
    code, out, err = lean("run", model, "x" * 1000, *flags, "--json")  # twice what the model is made for
    assert code == 0
    assert "window 100 + 4 sinks" in err
    assert "of 1,000 tokens the model now sees only the first 4 and the last 100" in err
    pools = json.loads(out)["kv"]["pools"]
    assert [(pool["window"], pool["format"], pool["layers"]) for pool in pools] == [
        (100, "fp8", [0]),
        (64, "fp32", [0]),
    ]
    assert all(pool.keys() >= {"sinks", "bytes_per_token", "tokens_held", "bytes_held"} for pool in pools)
    kv = json.loads(lean("run", model, "hello", *RUN, "--kv-skip-layers", "-1", "--json")[1])["kv"]
    assert (kv["format_k"], kv["residual"]) == ("fp32", 0)


def test_models_are_listed_and_removed(lean, home):
    assert lean("models")[0] == 0
    code, out, err = lean("models", "--json")
    assert (code, err, json.loads(out)) == (0, "", {"models": []})
    assert_refused(lean("rm", "../x"), "../x")
    broken = home / "models" / "smollm2-135m"
    broken.mkdir(parents=True)
    (broken / "config.json").write_text("{}")
    assert json.loads(lean("models", "--json")[1])["models"][0]["name"] == "smollm2-135m"
    code, out, err = lean("rm", "smollm2-135m")
    assert (code, out) == (0, "")
    assert "removed" in err
    assert not broken.exists()


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("delay", [0.3, 1.5, 3.0])
def test_both_signals_end_the_command_within_two_seconds_while_it_loads(model, name, delay):
    command = (sys.executable, "-m", "lean", "run", model, "hi", "--max-tokens", "500", "--ignore-eos")
    heed = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, **heed
    )
    time.sleep(delay)
    if process.poll() is not None:
        pytest.skip("the command was quicker")
    process.send_signal(getattr(signal, name))
    sent = time.monotonic()
    err = process.communicate(timeout=30)[1].decode()
    assert time.monotonic() - sent < 2.5
    if delay > 1:  # earlier, Python itself may not have come to lean yet
        assert process.returncode == 130
        assert err.endswith("lean: interrupted\n")
        assert "Traceback" not in err
