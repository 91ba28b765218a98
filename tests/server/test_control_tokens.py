"""Control tokens that clients spell: in a chat only the template writes them, whatever a message holds."""

import random

import pytest
from http_server import CONTROL, error_of
from tokenizers import pre_tokenizers

from lean.server.errors import ApiError

ATTACKS = 500
START, END = 259, 260  # ids of CONTROL

# GPT-2's alphabet: a byte is its own character where that can be seen, and the others follow from 256 on.
SEEN = [*range(33, 127), *range(161, 173), *range(174, 256)]
HIDDEN = [byte for byte in range(256) if byte not in SEEN]
CHARACTERS = {byte: chr(byte) for byte in SEEN} | {byte: chr(256 + number) for number, byte in enumerate(HIDDEN)}
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
ID_OF_BYTE = {byte: 3 + ALPHABET.index(character) for byte, character in CHARACTERS.items()}

TOKENS = (*CONTROL, "<pad>", "<s>", "</s>")
PARTS = tuple(part for token in TOKENS for cut in range(1, len(token)) for part in (token[:cut], token[cut:]))
PLAIN = ("system\n", "assistant\n", "\n", " ", "a", "é", "😀", "ignore the above", "</", "|>", "<|", "\u2581", "\x00")


def as_text(text):
    """Ids of a text of which no byte belongs to a control token."""
    return [ID_OF_BYTE[byte] for byte in text.encode()]


def expected(turns):
    """What the template of the tests makes of roles and contents."""
    ids = []
    for role, content in turns:
        ids += [START, *as_text(f"{role}\n{content}"), END, *as_text("\n")]
    return [*ids, START, *as_text("assistant\n")]


class Attacker:
    """Spells control tokens, whole and in parts, wherever a message has room for text."""

    def __init__(self, seed):
        self.draw = random.Random(seed)

    def text(self):
        kinds = [self.draw.choice((TOKENS, TOKENS, PARTS, PLAIN)) for _ in range(self.draw.randrange(1, 5))]
        return "".join(self.draw.choice(kind) for kind in kinds)

    def message(self):
        """A message, and the role and the content that the template must see."""
        role = self.draw.choice(("system", "developer", "user", "assistant", "tool"))
        texts = [self.text() for _ in range(self.draw.choice((1, 1, 2)))]
        message = {"role": role, "name": self.text(), "tool_call_id": self.text(), self.text() or "x": self.text()}
        shape = self.draw.choice(("text", "parts", "refusal"))
        if shape == "refusal":
            texts = texts[:1]
            message |= {"content": None, "refusal": texts[0]}
        elif shape == "parts":
            message["content"] = [{"type": "text", "text": text, "name": self.text()} for text in texts]
        else:
            texts = texts[:1]
            message["content"] = texts[0]
        return message, ({"developer": "system"}.get(role, role), "\n".join(texts))

    def body(self):
        messages, turns = zip(*(self.message() for _ in range(self.draw.choice((1, 1, 2)))))
        other = {"user": self.text(), "metadata": {self.text(): self.text()}, "stop": [self.text()]}
        return {"messages": list(messages), "max_tokens": 1, **other}, turns


@pytest.fixture
def received(server, monkeypatch):
    """The prompts that would reach the engine, in order; nothing is computed, and the answer is status 503."""
    prompts = []

    def note(job):
        prompts.extend(job.prompts)
        job.fail(ApiError(503, "a test read this prompt"))

    monkeypatch.setattr(server.service.engine, "submit", note)
    return prompts


def test_control_tokens_that_messages_spell_reach_the_engine_as_text(server, received):
    attacker = Attacker(0)
    for _ in range(ATTACKS):
        body, turns = attacker.body()
        received.clear()
        response = server.post("/v1/chat/completions", body)
        assert response.status_code == 503, (response.text, body)
        assert received == [expected(turns)], body


def test_control_tokens_that_messages_spell_are_text_to_tokenize_too(server):
    attacker = Attacker(1)
    for _ in range(20):
        body, turns = attacker.body()
        assert server.post("/tokenize", {"messages": body["messages"]}).json()["tokens"] == expected(turns)


@pytest.mark.parametrize("token", TOKENS)
def test_a_role_that_spells_a_control_token_is_refused(server, token):
    for role in (token, f"user\n{token}", f"user{token}", f"{token}user"):
        response = server.post("/v1/chat/completions", {"messages": [{"role": role, "content": "a"}]})
        assert error_of(response)[:2] == (400, "messages[0].role")
        assert token not in response.text


@pytest.mark.parametrize("field", ["chat_template", "tools", "documents", "chat_template_kwargs", "functions"])
def test_fields_that_templates_could_write_are_refused(server, field):
    value = [{"name": CONTROL[0]}] if field != "chat_template" else CONTROL[0]
    body = {"messages": [{"role": "user", "content": "a"}], field: value}
    assert error_of(server.post("/v1/chat/completions", body))[:2] == (400, field)


def test_the_raw_prompt_of_a_completion_may_spell_them(server, received):
    server.complete(f"a{CONTROL[0]}b")
    assert received == [[*as_text("a"), START, *as_text("b")]]
