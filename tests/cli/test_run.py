"""lean run: answers and JSON on stdout, and a start-up line that says how the model runs."""

import io
import json
import os
import sys

import pytest
import yaml

RUN = ("--max-tokens", "6", "--ignore-eos")
KV_KEYS = {"format_k", "format_v", "residual", "sinks", "block_size", "bytes_per_token", "tokens_held"}
KV_KEYS |= {"bytes_held", "bytes_if_bf16", "state_bytes", "pools"}
KEYS = {"text", "token_ids", "finish_reason", "prompt_tokens", "completion_tokens", "kv", "timing", "kernels"}
KEYS |= {"cached_tokens"}


@pytest.mark.parametrize("text", ["hello", "é\n 😀"])
def test_the_prompt_may_come_from_its_place_an_option_or_standard_input(lean, model, text):
    code, out, _ = lean("run", model, text, *RUN)
    assert code == 0
    assert lean("run", model, "-p", text, *RUN)[:2] == (0, out)
    assert lean("run", model, *RUN, stdin=text.encode())[:2] == (0, out)
    assert lean("run", model, *RUN, stdin=f"{text}\n".encode())[:2] == (0, out)  # as `echo` ends it
    assert lean("run", model, "-", *RUN, stdin=text.encode())[:2] == (0, out)
    assert lean("run", model, *RUN, stdin=text.encode("utf-8-sig"))[:2] == (0, out)  # a byte-order mark is not text


def test_standard_input_that_cannot_be_read_is_named(lean, model, monkeypatch, tmp_path):
    with os.fdopen(os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT)) as stdin:
        monkeypatch.setattr(io, "TextIOWrapper", lambda _: stdin)
        code, out, err = lean("run", model, "-", *RUN)
    assert (code, out) == (2, "")
    assert err == "lean: cannot read standard input: Bad file descriptor\n"


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


def test_json_beyond_the_encoding_of_standard_output_is_escaped(lean, model, monkeypatch):
    whole = json.loads(lean("run", model, "hello", *RUN, "--json")[1])
    assert not whole["text"].isascii()
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stdout)
    assert lean("run", model, "hello", *RUN, "--json")[0] == 0
    stdout.flush()
    written = stdout.buffer.getvalue().decode("ascii")
    assert json.loads(written)["token_ids"] == whole["token_ids"]


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


def test_a_window_and_formats_by_layer_are_reported(lean, model):
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
