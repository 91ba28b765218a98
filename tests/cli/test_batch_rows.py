"""A file of prompts is read whole and checked before anything runs."""

import pytest
from batches import USER
from helpers import refusal

from lean.cli.batch_rows import Row, read_rows


def test_rows_are_read_with_their_ids_and_parameters(prompts):
    messages = [{"role": "system", "content": ""}, {"role": "user", "content": "é"}]
    file = prompts(
        b"\xef\xbb\xbf" + '{"prompt": "é\\n😀"}'.encode(),
        b"",
        b" \t\r",
        {"messages": messages, "id": "a"},
        b'{"id": -7, "prompt": "x", "temperature": 0.5, "max_tokens": 3, "stop": ["\\n"], "top_k": null}\r',
        {"id": "1", "prompt": "not the id of the first"},
    )
    assert read_rows(file) == [
        Row(1, "é\n😀", None, {}),
        Row("a", None, messages, {}),
        Row(-7, "x", None, {"temperature": 0.5, "max_tokens": 3, "stop": ["\n"], "top_k": None}),
        Row("1", "not the id of the first", None, {}),
    ]


BAD_LINES = {
    "half an object": (b'{"prompt": "x"', "not JSON"),
    "two objects": (b'{"prompt": "x"} {"prompt": "y"}', "not JSON: Extra data"),
    "no object": (b'["x"]', "JSON object"),
    "text": (b"Why is the sky blue?", "not JSON"),
    "NaN": (b'{"prompt": "x", "temperature": NaN}', "NaN"),
    "deep": (b'{"prompt":' + b"[" * 100_000, "not JSON"),
    "long number": (b'{"prompt": "x", "seed": ' + b"1" * 5000 + b"}", "not JSON"),
    "not UTF-8": (b'{"prompt": "\xff"}', "not UTF-8 text: invalid start byte at byte 12"),
    "UTF-16": ('{"prompt": "x"}'.encode("utf-16"), "not UTF-8"),
    "unknown key": ({"prompt": "x", "max-tokens": 3}, '"max-tokens"; known keys are id, prompt, messages,'),
    "neither": ({"id": 3}, "prompt or messages"),
    "both": ({"prompt": "x", "messages": [USER]}, "not both"),
    "prompt of ids": ({"prompt": [1, 2]}, "prompt must be a string"),
    "prompt null": ({"prompt": None}, "prompt must be a string"),
    "empty": ({"prompt": ""}, "prompt is empty"),
    "messages text": ({"messages": "hi"}, "messages must be a list"),
    "no messages": ({"messages": []}, "at least one message"),
    "message text": ({"messages": [USER, "hi"]}, "messages[1]"),
    "no content": ({"messages": [{"role": "user"}]}, "content"),
    "no role": ({"messages": [{"content": "hi"}]}, "role"),
    "unknown role": ({"messages": [{"role": "robot", "content": "hi"}]}, '"robot"'),
    "id of truth": ({"prompt": "x", "id": True}, "id must be"),
    "id real": ({"prompt": "x", "id": 1.0}, "id must be"),
    "id null": ({"prompt": "x", "id": None}, "id must be"),
    "id again": ({"prompt": "x", "id": "a"}, 'id "a" is already used in line 1'),
    "id of a line": ({"prompt": "x", "id": 3}, "id 3 is already used in line 3"),
    "temperature": ({"prompt": "x", "temperature": -1}, "temperature must be"),
    "max_tokens": ({"prompt": "x", "max_tokens": "4"}, "max-tokens must be"),
    "max_tokens null": ({"prompt": "x", "max_tokens": None}, "max-tokens must be"),
    "stop": ({"prompt": "x", "stop": 3}, "stop must be"),
    "logit_bias": ({"prompt": "x", "logit_bias": {"a": 1}}, "logit-bias must"),
}


@pytest.mark.parametrize(("line", "word"), BAD_LINES.values(), ids=BAD_LINES)
def test_a_bad_row_is_named_with_file_and_line(prompts, line, word):
    file = prompts({"prompt": "x", "id": "a"}, b"", {"prompt": "x"}, line, {"prompt": "y"})
    message = refusal(read_rows, file)
    assert message.startswith(f"{file} line 4: ")
    assert word in message
    assert len(message) < 600


def test_a_file_that_cannot_be_read_or_has_no_rows_is_refused(prompts, tmp_path):
    assert "No such file" in refusal(read_rows, tmp_path / "none")
    assert "directory" in refusal(read_rows, tmp_path)
    assert "cannot read" in refusal(read_rows, "\0")
    assert "has no rows" in refusal(read_rows, prompts())
    assert "has no rows" in refusal(read_rows, prompts(b"", b" "))


def test_a_row_without_an_end_of_line_is_a_row(tmp_path):
    (tmp_path / "p").write_bytes(b'{"prompt": "x"}\n{"prompt": "y"}')
    assert [row.prompt for row in read_rows(tmp_path / "p")] == ["x", "y"]
