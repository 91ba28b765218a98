"""Every text of a conversation reaches the model, in the form that the template takes, or the message is named."""

import pytest
from chat_templates import CHATML, DROPPED, THINKING, TWICE, UPPER, rendered, said, tokenizer_of
from helpers import refusal
from published_templates import PUBLISHED

from lean.text import contents
from lean.text.contents import check_arrival, write, write_open
from lean.text.prompt import encode_chat, encode_next_turn
from lean.text.template import ChatTemplate, template_of
from lean.text.template_process import RENDERER

FIRST_PART = CHATML.replace("message['content']", "message.content[0].text")
FIRST_PART_BY_KEY = CHATML.replace("message['content']", "message['content'][0]['text']")
LOOP_OF_PARTS = """{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}
{%- for item in message.content %}{% if item.type == 'text' %}{{ item.text }}{% endif %}{% endfor %}
{{- '<|im_end|>\n' }}{% endfor %}{{ '<|im_start|>assistant\n' }}"""
LOOP_OF_KEYS = LOOP_OF_PARTS.replace("item.type", "item['type']").replace("item.text", "item['text']")
STRING_SYSTEM = "{% for m in messages %}[{% if m.role == 'system' %}{{ m.content }}{% else %}{{ m.content[0].text }}"
STRING_SYSTEM += "{% endif %}]{% endfor %}"
STRING_ANSWERS = STRING_SYSTEM.replace("'system'", "'assistant'")
STRICT_PARTS = "{% for m in messages %}{% if m.content is string %}{{ raise_exception('give a list of text parts') }}"
STRICT_PARTS += "{% endif %}<{{ m.content | map(attribute='text') | join }}>{% endfor %}"
EITHER = "{% for m in messages %}<{% if m.content is string %}{{ m.content }}{% else %}"
EITHER += "{% for c in m.content %}{{ c.text }}{% endfor %}{% endif %}>{% endfor %}"
OF_PARTS = {
    "first part": FIRST_PART,
    "first part by key": FIRST_PART_BY_KEY,
    "loop": LOOP_OF_PARTS,
    "loop by key": LOOP_OF_KEYS,
    "string system": STRING_SYSTEM,
    "string answers": STRING_ANSWERS,
    "strict": STRICT_PARTS,
}
SYSTEM_FIRST = ("system", "user", "assistant", "user")
CONVERSATIONS = [
    said("Hi"),
    said("one", "two", "three"),
    said("Be brief.", "  Hi\n", 'He said: "no".', "é 😀 <b> & {{ x }}", roles=SYSTEM_FIRST),
    said("x", "x", "x", "x", roles=SYSTEM_FIRST),
    said(" ", "", "a", "\n", roles=SYSTEM_FIRST),
]


def of(template):
    return ChatTemplate("some-model", template, (("bos_token", "<s>"), ("eos_token", "</s>")))


def arrive(template, messages):
    text = write(of(template), messages)
    check_arrival(of(template), messages, text)
    return text


@pytest.mark.parametrize("name", OF_PARTS)
@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_a_template_that_takes_parts_gets_parts(name, messages):
    text = arrive(OF_PARTS[name], messages)
    for message in messages:
        assert message["content"] in text
    assert "'type'" not in text


def test_parts_are_encoded_as_text_is_in_the_template_that_takes_text():
    by_parts, by_text = tokenizer_of(LOOP_OF_PARTS), tokenizer_of(CHATML)
    for messages in (*CONVERSATIONS, said("<|im_end|>", "<s>", "<|im_end|>\n<|im_start|>assistant\n")):
        assert encode_chat(by_parts, messages) == encode_chat(by_text, messages)
    messages = said("a", "b", "<|im_end|>c")
    assert encode_next_turn(by_parts, messages, []) == encode_next_turn(by_text, messages, [])


def test_a_template_that_takes_both_gets_text():
    assert arrive(EITHER, said("a", "b", "c")) == "<a><b><c>"
    dumped = "{% for m in messages %}{{ m.content | tojson }}{{ m.content[0].text }}{% endfor %}"
    assert arrive(dumped, said("a")) == '"a"'


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("name", [*PUBLISHED, "thinking", "upper", "twice"])
def test_published_templates_are_not_refused_and_get_text(name, messages):
    template = {**PUBLISHED, "thinking": THINKING, "upper": UPPER, "twice": TWICE}[name]
    assert arrive(template, messages) == rendered(tokenizer_of(template), messages)


NO_SYSTEM = CHATML.replace("{% for message in messages %}", "{% for message in messages if message.role != 'system' %}")
ONLY_LAST = "<s>{{ messages[-1].content }}"
NO_TEXT = "{% for m in messages %}<{{ m.role }}>{% endfor %}"
LENGTHS = "{% for m in messages %}{{ m.content | length }}{% endfor %}"
PARTS_OF_IMAGES = LOOP_OF_PARTS.replace("'text'", "'image'")
USERS_PARTS_ARE_IMAGES = "{% for m in messages %}{% for c in m.content %}{% if c.type == 'text' and m.role != 'user' %}"
USERS_PARTS_ARE_IMAGES += "{{ c.text }}{% endif %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "messages", "where"),
    [
        (NO_TEXT, said("user"), "messages[0] (user)"),
        (LENGTHS, said("1"), "messages[0] (user)"),
        ("Hello", said("Hello"), "messages[0] (user)"),
        (NO_SYSTEM, said("Be brief.", "Hi", roles=("system", "user")), "messages[0] (system): put it into a user"),
        (NO_SYSTEM, said("Hi", "user", roles=("user", "system")), "messages[1] (system)"),
        (PUBLISHED["DeepSeek"], said("one", "two", "a", roles=("system", "system", "user")), "messages[0] (system)"),
        (DROPPED, said("a", "b", "c"), "messages[1] (assistant)"),
        (ONLY_LAST, said("a", "b", "c"), "messages[0] (user)"),
        (PARTS_OF_IMAGES, said("a"), "messages[0] (user)"),
        (USERS_PARTS_ARE_IMAGES, said("a", "b", roles=("system", "user")), "messages[1] (user)"),
    ],
)
def test_a_message_that_the_template_leaves_out_is_named(template, messages, where):
    tokenizer = tokenizer_of(template)
    tokenizer.name_or_path = "some-model"
    message = refusal(encode_chat, tokenizer, messages)
    assert message.startswith(f"the chat template of some-model does not write the text of {where}")


CUT = CHATML.replace("message['content']", "message['content'][:40]")
CUT_IN_FRONT = CHATML.replace("message['content']", "message['content'][-40:]")
SPLIT_ALL = CHATML.replace("message['content']", "message['content'].split('</think>')[-1]")
NO_SECRETS = CHATML.replace("message['content']", "('' if 'secret' in message['content'] else message['content'])")
FIRST_LINE = CHATML.replace("message['content']", "message['content'].split('\n')[0]")
LONG = " ".join(map(str, range(40)))


@pytest.mark.parametrize(
    ("template", "content"),
    [
        (CUT, LONG),
        (CUT_IN_FRONT, LONG),
        (SPLIT_ALL, "what does </think> mean?"),
        (NO_SECRETS, "a secret"),
        (FIRST_LINE, "one\ntwo"),
        (CHATML.replace("message['content']", "message['content'] | truncate(40)"), LONG * 9),
    ],
)
def test_a_text_that_the_template_cuts_is_named(template, content):
    for messages in (said(content), said("a", "b", content), said(content, "a", roles=("system", "user"))):
        place = next(i for i, message in enumerate(messages) if message["content"] == content)
        message = refusal(encode_chat, tokenizer_of(template), messages)
        assert f"does not write all of the text of messages[{place}] ({messages[place]['role']})" in message
    assert encode_chat(tokenizer_of(template), said("short"))
    assert "all of the text of messages[2]" in refusal(
        encode_next_turn, tokenizer_of(template), said("a", "b", content), []
    )


CHANGES = [
    "message['content'] | trim",
    "message['content'].strip() | upper",
    "message['content'] | e",
    "message['content'] | replace('\n', ' ') | replace('a', '4')",
    "message['content'].replace('e', '')",
    "message['content'] | title",
    "message['content'] | tojson",
    "message['content'] ~ message['content']",
    "message['content'].replace('<image>', '')",
    "message['content'] | wordwrap(30)",
    "message['content'] | indent(4)",
    "' ' + message['content'].rstrip() + ' '",
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_template_may_trim_and_replace_characters(change):
    template = CHATML.replace("message['content']", change)
    text = 'An <image> and a <b>bold</b> & "quoted"\nface, é '
    for messages in (said(text), said(text, text, text), said("a", text, text, text, roles=SYSTEM_FIRST)):
        assert arrive(template, messages) == rendered(tokenizer_of(template), messages)


THOUGHTS = [
    "<think>\nhm\n</think>\n\nYes.",
    "hm</think>Yes.",
    "<think>hm</think>",
    "<think></think>\n\n",
    "<think>a</think>b<think>c</think>\nYes",
    "No reasoning.",
]


@pytest.mark.parametrize("name", ["Qwen3", "DeepSeek"])
@pytest.mark.parametrize("answer", THOUGHTS)
def test_the_reasoning_of_an_earlier_answer_may_vanish(name, answer):
    for messages in (said("a", answer, "b"), said("a", answer, "b", answer, "c"), said("a", answer)):
        assert arrive(PUBLISHED[name], messages) == rendered(tokenizer_of(PUBLISHED[name]), messages)


def test_other_tags_of_reasoning_may_vanish_with_what_they_hold():
    for tag in ("</thought>", "<|END_THINKING|>", "[/THINK]"):
        template = CHATML.replace("message['content']", f"message['content'].split('{tag}')[-1]")
        assert "hm" not in arrive(template, said("a", f"hm{tag}Yes.", "b"))
    answers = CHATML.replace("message['content']", "message['content'].split('<answer>')[-1].split('</answer>')[0]")
    assert "hm" not in arrive(answers, said("a", "<think>hm</think><answer>Yes</answer>", "b"))


def test_an_answer_without_such_a_tag_arrives_as_a_whole():
    message = refusal(encode_chat, tokenizer_of(CUT), said("a", LONG, "b"))
    assert "all of the text of messages[1] (assistant)" in message


def test_the_error_of_a_template_keeps_its_text():
    for name in ("Gemma 3", "Llama 2"):
        messages = said("a", "b", roles=("user", "user"))
        assert "lternat" in refusal(encode_chat, tokenizer_of(PUBLISHED[name]), messages)
    strict = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + CHATML
    )
    messages = said("a", "b", roles=("system", "user"))
    assert "System role not supported" in refusal(encode_chat, tokenizer_of(strict), messages)


def test_a_template_that_wants_certain_contents_is_judged_by_what_it_writes():
    picky = "{% if messages[0].content[0] != '<' %}{{ raise_exception('?') }}{% endif %}"
    assert arrive(picky + "{{ messages[0].content }}", said("<b>")) == "<b>"
    assert "does not write" in refusal(arrive, picky + "nothing", said("<b>"))


def test_the_form_is_found_out_once_for_each_sequence_of_roles(monkeypatch):
    asked = []
    render = RENDERER.render
    monkeypatch.setattr(RENDERER, "render", lambda *arguments: asked.append(1) or render(*arguments))
    contents._form.cache_clear()
    for template, first in ((CHATML, 2), (THINKING, 2), (LOOP_OF_PARTS, 4)):
        for expected in (first, 1, 1):
            asked.clear()
            arrive(template, said("a", f"<think>hm</think>\n\n{expected}", "c"))
            assert len(asked) == expected


def test_a_conversation_of_thousands_of_messages_is_one_like_any_other():
    messages = said(*map(str, range(3000)))
    assert arrive(CHATML, messages) == rendered(tokenizer_of(CHATML), messages)
    assert arrive(LOOP_OF_PARTS, messages) == arrive(CHATML, messages)
    assert "messages[1] (assistant)" in refusal(arrive, DROPPED, messages)


def test_templates_of_two_models_are_told_apart():
    one, other = tokenizer_of("{{ bos_token }}{{ messages[0].content }}"), tokenizer_of("{{ messages[0].content }}")
    other.bos_token = "</s>"
    assert template_of(one) != template_of(other)
    assert encode_chat(one, said("a")) != encode_chat(other, said("a"))


@pytest.mark.parametrize("name", [*PUBLISHED, "thinking"])
@pytest.mark.parametrize("last", ["The answer is", "The answer is \n", "x"])
def test_a_last_message_that_stays_open_ends_as_in_transformers(name, last):
    template = {**PUBLISHED, "thinking": THINKING}[name]
    tokenizer = tokenizer_of(template)
    system = said("x", "x", last, roles=SYSTEM_FIRST[:3])
    if name == "Mistral":  # it writes the system message into the last message only, and that must be the user's
        assert "messages[0] (system)" in refusal(write_open, template_of(tokenizer), system)
    for messages in (said("a", last), said("a", "b", last), *[system] * (name != "Mistral")):
        expected = tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=True)
        assert write_open(template_of(tokenizer), messages) == expected


def test_a_message_that_stays_open_must_be_written():
    assert "does not write the text of messages[1] (assistant)" in refusal(write_open, of(DROPPED), said("a", "b"))
    assert "does not write the text of messages[0] (system)" in refusal(
        write_open, of(NO_SYSTEM), said("a", "b", roles=("system", "user"))
    )
