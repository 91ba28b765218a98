"""No template takes more time, memory or text than allowed."""

import resource
import time

import pytest
from chat_templates import CHATML, said, tokenizer_of
from helpers import refusal

from lean.text import template_process
from lean.text.prompt import encode_chat
from lean.text.template import template_of
from lean.text.template_process import CPU_SECONDS, MAX_CHARACTERS, MEMORY_MIB, RENDERER

LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
MEMORY = f"more than {MEMORY_MIB} MiB of memory"
TIME = "more than 0.3 s of processor time"
LENGTH = f"wrote more than {MAX_CHARACTERS // 1000:,},"
NESTED = 20_000
HOSTILE = {
    "a string of 1e9": ("{{ 'x' * 1000000000 }}", MEMORY),
    "a string of 1e9 the other way round": ("{{ 1000000000 * 'x' }}", MEMORY),
    "a list of 1e9": ("{{ ([0] * 1000000000) | length }}", MEMORY),
    "a string that is padded": ("{{ '%1000000000d' % 1 }}", MEMORY),
    "a string that is centred": ("{{ 'x' | center(1000000000) }}", MEMORY),
    "a string that doubles": (
        "{% set n = namespace(s='xxxxxxxx') %}{% for i in range(40) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}",
        MEMORY,
    ),
    "joined lists": ("{{ range(99999) | map('center', 9999) | join }}", MEMORY),
    "nested loops": (LOOPS, TIME),
    "nested loops before an error": ("{% if 1 %}" + LOOPS + "{{ raise_exception('x') }}{% endif %}", TIME),
    "a power": ("{{ 10 ** (10 ** 9) }}", TIME),
    "a power of a power": ("{{ 9 ** (9 ** (9 ** 9)) }}", TIME),
    "a long loop that writes": ("{% for a in range(99999) %}{{ 'x' * 99 }}{% endfor %}", LENGTH),
    "a long text": ("{{ 'x' * 9999999 }}", LENGTH),
    "a macro that calls itself": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    "a range of 1e9": ("{{ range(1000000000) | list }}", "cannot render"),
    "a loop over 1e6": ("{% for a in range(1000000) %}{% endfor %}", "cannot render"),
    "deep parentheses": ("{{ " + "(" * NESTED + "1" + ")" * NESTED + " }}", "the chat template "),
    "deep lists": ("{{ " + "[" * NESTED + "]" * NESTED + " }}", "the chat template "),
    "deep sums": ("{{ 1" + " + 1" * NESTED + " }}", "the chat template "),
    "deep negations": ("{{ " + "not " * NESTED + "1 }}", "the chat template "),
    "deep attributes": ("{{ a" + ".b" * NESTED + " }}", "the chat template "),
    "deep blocks": ("{% if 1 %}" * 2000 + "x" + "{% endif %}" * 2000, "the chat template "),
    "10 MB": ("x" * 10_000_000, "has 10,000,000 characters: lean takes at most"),
    "10 MB of loops": (LOOPS * 200_000, "characters: lean takes at most"),
    "lone surrogates": ("{{ '\\ud800' }}{{ messages[0].content }}", "writes text that is not valid UTF-8"),
    "a lone surrogate in the source": ("\ud800{{ messages[0].content }}", "writes text that is not valid UTF-8"),
    "no syntax": ("{% for %}{{", "cannot render"),
}


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """The machine that runs the tests may be busy."""
    monkeypatch.setattr(template_process, "WALL_SECONDS", 600)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_refused_in_one_line_and_the_next_one_works(name, monkeypatch):
    template, expected = HOSTILE[name]
    if expected in (TIME, MEMORY):
        monkeypatch.setattr(template_process, "CPU_SECONDS", 0.3 if expected == TIME else 60)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tokenizer = tokenizer_of(template)
    tokenizer.name_or_path = "some-model"
    message = refusal(encode_chat, tokenizer, said("a"))
    assert message.startswith("the chat template of some-model ")
    assert expected in message
    assert len(message) < 300
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024  # KiB; the template asks for 1e9
    assert template_of(tokenizer_of(CHATML)).render(said("a"))


def test_a_template_that_needs_too_long_ends_after_the_time_that_its_error_names():
    tokenizer = tokenizer_of(LOOPS)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    RENDERER.stop()
    assert f"needed more than {CPU_SECONDS} s of processor time" in refusal(encode_chat, tokenizer, said("a"))
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert now.ru_utime - used.ru_utime < CPU_SECONDS + 3  # with the earlier process and the start of the next


def test_a_process_that_does_not_answer_is_given_up(monkeypatch):
    """As if something had stopped it. Time on the clock is longer than time of the processor: others may be busy."""
    monkeypatch.setattr(template_process, "WALL_SECONDS", 0.2)
    started = time.monotonic()
    assert "was not rendered within 0.2 s" in refusal(encode_chat, tokenizer_of(LOOPS), said("a"))
    assert time.monotonic() - started < template_process.START_SECONDS


def test_a_long_conversation_may_be_rendered_at_length():
    long = "x" * (2 * MAX_CHARACTERS)
    assert long in template_of(tokenizer_of(CHATML)).render(said(long, "é" * 9))
    with pytest.raises(Exception, match="wrote more than"):
        template_of(tokenizer_of("{{ messages[0].content * 6 }}")).render(said(long[: MAX_CHARACTERS + 1]))
