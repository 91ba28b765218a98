"""What bodies may hold, and how an error names its field."""

import json

import pytest

from lean.server.errors import ApiError
from lean.server.messages import turns_of
from lean.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, read_body, unknown_fields

HI = {"messages": [{"role": "user", "content": "hi"}]}


def chat(**fields):
    return read_body(ChatRequest, json.dumps({**HI, **fields}).encode())


def refusal(call, *arguments, **named):
    with pytest.raises(ApiError) as caught:
        call(*arguments, **named)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", "1"),
        ("n", True),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", "10"),
        ("max_tokens", 2**63),
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("stop", [""]),
        ("stop", ""),
        ("stop", [1]),
        ("stop", {"a": 1}),
        ("seed", 2**63),
        ("stream", "yes"),
        ("logprobs", 3),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", "a"),
        ("cache_salt", ""),
        ("cache_salt", "a/b"),
        ("cache_salt", "x" * 129),
        ("presence_penalty", 3),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {"1": True}),
        ("logit_bias", [1]),
        ("min_tokens", -1),
        ("messages", []),
        ("messages", "hi"),
        ("messages", None),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(field, value):
    error = refusal(chat, **{field: value})
    assert error.param == field
    assert error.message.startswith(f"{field} ")


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([1], "messages[0]"),
        ([{"content": "a"}], "messages[0].role"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": ["a"]}], "messages[0].content"),
    ],
)
def test_a_field_inside_a_message_is_named(messages, param):
    assert refusal(chat, messages=messages).param == param


@pytest.mark.parametrize("field", sorted(ChatRequest.model_fields.keys() - {"messages"}))
def test_null_is_the_default(field):
    assert getattr(chat(**{field: None}), field) is None


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"nothing", b"[]", b"3", b"null", b'"x"', b'{"messages": "\xff"}', b'{"a": NaN', b'{"a":"\\ud800"}'],
    ids=repr,
)
def test_what_is_no_json_object_is_refused(body):
    assert "the body" in refusal(read_body, ChatRequest, body).message


def test_json_of_any_depth_is_refused_or_read():
    for depth in (10, 1_000, 100_000):
        deep = b"[" * depth + b"]" * depth
        error = refusal(read_body, ChatRequest, b'{"messages": ' + deep + b"}")
        assert ("nested too deeply" in error.message) == (depth > 10)
        assert "no JSON" not in error.message


def test_a_body_of_many_faults_is_refused_for_the_first_one():
    for messages in ([1] * 10_000, [{"role": 1}] * 10_000):
        assert (refusal(chat, messages=messages).param or "").startswith("messages[0]")
    assert refusal(chat, logit_bias={str(index): "x" for index in range(10_000)}).param == "logit_bias"


def test_reading_ends_with_the_first_entry_too_many():
    """What comes behind it is not looked at."""
    biases = {str(index): 1 for index in range(9)}
    for name, entries, wrong in (
        ("logit_bias", biases, {**biases, "more": 1, "x": "y"}),
        ("messages", HI["messages"] * 9, [*HI["messages"] * 10, 1]),
    ):
        body = json.dumps({**HI, name: entries}).encode()
        assert len(getattr(read_body(ChatRequest, body, {name: 9}), name)) == 9
        error = refusal(read_body, ChatRequest, json.dumps({**HI, name: wrong}).encode(), {name: 9})
        assert (error.param, error.message) == (name, f"{name} has more than 9 entries")


@pytest.mark.parametrize(
    ("field", "value"),
    [("stop", [1] * 9), ("stop_token_ids", ["a"] * 9)],
)
def test_the_size_of_a_field_is_looked_at_before_its_entries(field, value):
    def check_size(name, found):
        if name == field:
            raise ApiError(400, f"{name} has {len(found)} entries", name)

    body = json.dumps({**HI, field: value}).encode()
    assert refusal(read_body, ChatRequest, body, {}, check_size).message == f"{field} has 9 entries"


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e999"])
def test_numbers_are_finite(number):
    body = b'{"messages": [{"role": "user", "content": "hi"}], "temperature": ' + number + b"}"
    refusal(read_body, ChatRequest, body)


@pytest.mark.parametrize("prompt", ["a", "", ["a", "b"], [1, 2], [[1], [2, 3]]], ids=str)
def test_a_prompt_is_text_or_token_ids_or_lists_of_them(prompt):
    assert read_body(CompletionRequest, json.dumps({"prompt": prompt}).encode()).prompt == prompt


@pytest.mark.parametrize("prompt", [None, [], [[1], "a"], [1, "a"], [True], [1.5], {}, 3], ids=str)
def test_other_prompts_are_refused(prompt):
    assert refusal(read_body, CompletionRequest, json.dumps({"prompt": prompt}).encode()).param == "prompt"


def test_what_must_be_given_is_missed_by_its_name():
    for kind, name in ((CompletionRequest, "prompt"), (ChatRequest, "messages"), (DetokenizeRequest, "tokens")):
        assert refusal(read_body, kind, b"{}").message == f"{name} is missing"
        assert refusal(read_body, kind, json.dumps({name: None}).encode()).param == name


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("response_format", {"type": "json_object"}),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("chat_template", "{{ 1 }}"),
        ("continue_final_message", True),
        ("add_special_tokens", True),
        ("echo", True),
        ("watermarking", True),
        ("repetition_detection", {"max_pattern_size": 4}),
        ("thinking_token_budget", 0),
        ("logprob_token_ids", [1]),
        ("return_prompt_text", True),
        ("return_weight_versions", True),
        ("skip_special_tokens", False),
        ("best_of", 2),
        ("best_of", True),
        ("grammar", "root ::= x"),
        ("structured_outputs", {"json": {}}),
    ],
)
def test_a_field_that_would_change_the_answer_is_refused(field, value):
    error = refusal(unknown_fields, chat(**{field: value}))
    assert (error.param, error.code) == (field, "unsupported_parameter")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("response_format", {"type": "text"}),
        ("tools", []),
        ("tools", None),
        ("tool_choice", "auto"),
        ("best_of", 1),
        ("chat_template_kwargs", {}),
        ("add_special_tokens", False),
        ("echo", False),
        ("thinking_token_budget", -1),
        ("user", "me"),
        ("metadata", {"a": "b"}),
    ],
)
def test_the_same_field_with_a_value_that_changes_nothing_is_taken(field, value):
    assert unknown_fields(chat(**{field: value})) == 0


def test_unknown_fields_are_counted():
    assert unknown_fields(chat(router_hint=1, another=None)) == 2


def turns(*messages):
    return turns_of(chat(messages=list(messages)).messages)


def test_roles_and_contents_become_what_templates_know():
    parts = [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]
    assert turns(
        {"role": "developer", "content": "a"},
        {"role": "user", "content": parts, "name": "me"},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": None, "refusal": "no"},
        {"role": "tool", "content": "d", "tool_call_id": "1"},
    ) == [
        {"role": "system", "content": "a"},
        {"role": "user", "content": "b\nc"},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": "no"},
        {"role": "tool", "content": "d"},
    ]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "critic", "content": "a"}, "messages[0].role"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "messages[0].tool_calls"),
    ],
)
def test_a_message_that_cannot_be_read_is_refused_by_its_name(message, param):
    assert refusal(turns, message).param == param
