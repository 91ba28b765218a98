"""What a template writes: the text that transformers' own rendering gives, and which template of several is used."""

import time

import jinja2
import pytest
from chat_templates import DROPPED, TEMPLATES, TWICE, UPPER, rendered, said, tokenizer_of
from helpers import refusal
from published_templates import PUBLISHED

from lean.errors import RequestError
from lean.text.prompt import encode_chat
from lean.text.template import TemplateError, template_of

SYSTEM_FIRST = ("system", "user", "assistant", "user")
CONVERSATIONS = [
    said("Hi"),
    said("  two\n\nlines \t", "<think>\nhm\n</think>\n\nYes.", "é 😀 ｜ \u2028", " an answer ", "and?"),
    said("Be brief.", "Hi", "Hello.", "<b>&amp; 'x' \"y\" {{ z }} {% if %}", roles=SYSTEM_FIRST),
    said("", " ", "", "x", roles=SYSTEM_FIRST),
    said("a", "b", roles=("user", "assistant")),
    said("a", "b", "c", roles=("user", "user", "system")),
]
LANGUAGE = {
    "json": "{{ {'b': '<é>', 'a': [1, none, true]} | tojson }}{{ [1] | tojson(indent=2) }}"
    "{{ {'b': 1, 'a': 2} | tojson(separators=(',', ':'), sort_keys=true, ensure_ascii=true) }}",
    "blocks": "a\n  {% if true %}\n  b\n  {% endif %}\nc\n{# note #}\n{%- set x = 1 -%}\n {{ x }}\n",
    "loop controls": "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% elif i == 5 %}{% break %}{% endif %}"
    "{{ i }}{% endfor %}",
    "generation": "{% set x = 1 %}{% generation %}{% set x = 2 %}<{{ x }}>{% endgeneration %}{{ x }}",
    "generation in a loop": "{% for m in messages %}{%- generation -%} {{ m.content }} {% endgeneration %}\n"
    "{% endfor %}",
    "dict and namespace": "{% set n = namespace(a=1, self=2) %}{% set n.a = 5 %}{{ n.a }}{{ n.self }}"
    "{{ dict(a=1) }}{{ dict.fromkeys([1, 2], 3) }}",
    "special tokens": "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ unk_token is defined }}{{ nothing }}",
    "arguments": "{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}{{ tools }}",
    "unset variables": "{{ date_string is defined }}{{ messages[0].tool_calls }}{{ messages[0]['name'] is defined }}",
    "filters": "{{ messages | map(attribute='content') | join('|') | upper }}{{ messages | length }}{{ 'a' * 9 }}"
    "{{ [1] * 3 }}{{ 2 * 3 }}",
    "date": "{{ strftime_now('%Y-%m-%d %H %Z') }}",
}
FAULTS = {
    "{% for %}": "Expected an expression",
    "{{ messages[9].content.x }}": "no element 9",
    "{{ ''.__class__.__mro__ }}": "__class__",
    "{{ messages.append(1) }}": "append",
    "{{ namespace(__class__=1) }}": "underscore",
    "{% set n = namespace() %}{% set n.__x = 1 %}": "underscore",
    "{{ dict.__init__.__globals__ }}": "__init__",
    "{{ cycler.__init__.__globals__.os }}": "__init__",
    "{{ lipsum.__globals__.os }}": "__globals__",
    "{{ raise_exception('System role\nnot supported') }}": "System role not supported",
    "{% import 'x' as x %}": "no loader",
}


def by_both(template, messages):
    """The text of lean and that of transformers, or None where the template raises an error."""
    tokenizer = tokenizer_of(template)
    texts = []
    for render in (lambda: template_of(tokenizer).render(messages), lambda: rendered(tokenizer, messages)):
        try:
            texts.append(render())
        except (TemplateError, jinja2.TemplateError, TypeError):
            texts.append(None)
    return texts


TESTED = {**PUBLISHED, **{f"{name}, short": one for name, (one, _) in TEMPLATES.items()}, **LANGUAGE} | {
    "dropped": DROPPED,
    "twice": TWICE,
    "upper": UPPER,
}


@pytest.mark.parametrize("name", TESTED)
def test_a_template_writes_what_it_writes_in_transformers(name):
    written = [by_both(TESTED[name], messages) for messages in CONVERSATIONS]
    assert written[0][0] is not None
    for ours, theirs in written:
        assert ours == theirs


@pytest.mark.parametrize("template", FAULTS, ids=range(len(FAULTS)))
def test_what_a_template_raises_is_an_error_with_its_text(template):
    tokenizer = tokenizer_of(template)
    with pytest.raises(Exception):  # noqa: B017  transformers raises many kinds
        rendered(tokenizer, said("a"))
    with pytest.raises(TemplateError):
        template_of(tokenizer).render(said("a"))
    message = refusal(encode_chat, tokenizer, said("a"))
    assert message.startswith("the chat template cannot render this conversation: ")
    assert FAULTS[template] in message


@pytest.mark.parametrize("zone", ["Asia/Tokyo", "America/St_Johns", None])
def test_the_clock_of_a_template_is_in_the_time_zone_of_the_process(zone, monkeypatch):
    if zone is None:
        monkeypatch.delenv("TZ", raising=False)
    else:
        monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        ours, theirs = by_both("{{ strftime_now('%Y-%m-%d %H') }}", said("a"))
    finally:
        monkeypatch.undo()
        time.tzset()
    assert ours == theirs


def test_of_named_templates_the_default_is_used():
    tokenizer = tokenizer_of({"default": "<{{ messages[0].content }}>", "tool_use": "no"})
    assert template_of(tokenizer).render(said("a")) == rendered(tokenizer, said("a")) == "<a>"
    tokenizer.chat_template = {"rag": "x", "tool_use": "no"}
    assert "no default among its variants (rag, tool_use)" in refusal(encode_chat, tokenizer, said("a"))


@pytest.mark.parametrize("template", [7, {"default": ["x"]}, ["x"], {"default": None}])
def test_a_template_that_is_not_text_is_refused(template):
    assert "the chat template must be text, not " in refusal(encode_chat, tokenizer_of(template), said("a"))


def test_errors_name_the_model():
    tokenizer = tokenizer_of("{{ raise_exception('no') }}")
    tokenizer.name_or_path = "some-model"
    assert refusal(encode_chat, tokenizer, said("a")).startswith("the chat template of some-model cannot render")


@pytest.mark.parametrize("name", ["PATH", "HOME", "LEAN_SECRET"])
def test_a_template_sees_no_environment_variable(name, monkeypatch):
    monkeypatch.setenv("LEAN_SECRET", "x")
    tokenizer = tokenizer_of(f"{{{{ environ['{name}'] }}}}{{{{ os.environ }}}}")
    with pytest.raises((TemplateError, RequestError)):
        template_of(tokenizer).render(said("a"))
