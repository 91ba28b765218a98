"""A conversation: every turn appends to what the cache holds. The terminal's commands, and its errors."""

import io
import json

import pytest
from helpers import refusal
from rich.console import Console
from tokenizers import AddedToken

from lean import LLM, EngineConfig, SamplingParams
from lean.cli.chat import talk
from lean.conversation import Conversation

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chatty(folder):
    """A tiny model that speaks ChatML: its control tokens take the rows that belonged to no token."""
    llm = LLM(str(folder), EngineConfig(deterministic=True))
    tokenizer = llm.model.tokenizer
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")]}
    )
    tokenizer.chat_template = TEMPLATE
    return llm.model


@pytest.fixture(scope="module")
def model(tiny):
    return chatty(tiny("llama", num_hidden_layers=2))


def engine(model, **config) -> LLM:
    return LLM(model, EngineConfig(**{"deterministic": True, "max_num_seqs": 1, **config}))


def ask(max_tokens: int = 9) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)


def answer(chat: Conversation, text: str) -> list[int]:
    return [token for output in chat.ask(text) for token in output.token_ids]


@pytest.mark.parametrize("kv_dtype", ["fp32", "int8", "int4"])
def test_a_turn_computes_its_own_tokens_only_and_answers_as_if_all_had_been_computed(model, kv_dtype):
    chat = Conversation(engine(model, kv_dtype=kv_dtype), ask())
    for turn, text in enumerate(("hello", "and then?", "é 😀", "x" * 70)):
        before = len(chat.token_ids)
        new = answer(chat, text)
        assert chat.cached_tokens == max(0, before - 1) // 32 * 32  # the last token drawn was never computed
        (fresh,) = engine(model, kv_dtype=kv_dtype).generate([chat.token_ids[: -len(new)]], ask())
        assert new == fresh.token_ids
        assert len(chat.messages) == 2 * turn + 2
    chat.reset()
    assert chat.llm.stats().bytes_held == 0


def test_the_tokens_of_a_conversation_are_those_of_its_template(model):
    chat = Conversation(engine(model), ask())
    for text in ("hello", "and <|im_end|> then?"):
        answer(chat, text)
    text = model.tokenizer.decode(chat.token_ids, skip_special_tokens=False)
    first = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert text.startswith(first)
    assert "<|im_end|>\n<|im_start|>user\nand <|im_end|> then?<|im_end|>\n<|im_start|>assistant\n" in text[len(first) :]
    end = model.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert chat.token_ids.count(end) == 3  # two users' and one assistant's, none of the user's text


def test_an_answer_that_is_left_early_stays_in_the_conversation(model):
    chat = Conversation(engine(model, block_size=8), ask(50))
    for count, _ in enumerate(stream := chat.ask("hello"), 1):
        if count == 4:
            break
    stream.close()
    held = len(chat.token_ids)
    assert chat.messages[1]["role"] == "assistant"
    assert not chat.llm.has_work
    answer(chat, "go on")
    assert chat.cached_tokens == (held - 1) // 8 * 8 > 0


@pytest.mark.parametrize("kv_dtype", ["fp32", "int8"])
def test_in_a_chat_of_many_turns_each_computes_the_new_tokens_and_a_block_or_two(tiny, kv_dtype):
    model = chatty(tiny("llama", num_hidden_layers=2, max_position_embeddings=2048))
    chat = Conversation(engine(model, kv_dtype=kv_dtype, block_size=8, max_model_len=1500), ask(9))
    computed = 0
    for turn in range(20):
        before = len(chat.token_ids)
        answer(chat, f"question {turn}")
        counts = chat.llm.stats().prefix
        now = counts.tokens_asked - counts.tokens_found
        assert now - computed <= len(chat.token_ids) - before + 2 * 8
        computed = now


def test_a_message_that_cannot_be_taken_leaves_the_conversation_as_it_was(model):
    chat = Conversation(engine(model, max_model_len=128, block_size=8), ask())
    answer(chat, "hello")
    before = list(chat.messages), list(chat.token_ids)
    assert "max-model-len is 128" in refusal(list, chat.ask("x" * 200))
    refusal(list, chat.ask(""))
    assert (chat.messages, chat.token_ids) == before
    answer(chat, "short")
    assert chat.cached_tokens == (len(before[1]) - 1) // 8 * 8 > 0


def test_a_cache_that_was_needed_for_others_is_computed_again_unseen(model):
    def second_answer(company):
        llm = engine(model, num_blocks=6, block_size=16, max_model_len=96)
        chat = Conversation(llm, ask())
        answer(chat, "hi")
        if company:
            llm.generate([[5] * 80], ask(4))
        return answer(chat, "?"), chat.cached_tokens

    (alone, reused), (again, nothing) = second_answer(False), second_answer(True)
    assert again == alone
    assert reused > nothing == 0


@pytest.fixture
def terminal(model, monkeypatch, capsys, tmp_path):
    """``terminal(lines)`` -> (stdout, stderr) of a chat that is sent these lines, then Ctrl-D."""
    monkeypatch.chdir(tmp_path)

    def run(*lines):
        left = iter(lines)

        def read(prompt=""):
            line = next(left, EOFError)
            if not isinstance(line, str):
                raise line
            return line

        monkeypatch.setattr("builtins.input", read)
        err = io.StringIO()
        talk(engine(model), ask(4), Console(file=err, width=500))
        return capsys.readouterr().out, err.getvalue()

    return run


def test_the_commands_of_the_terminal(terminal, tmp_path):
    out, err = terminal("hello", "/save a.json", "/stats", "/reset", "/save", "/save no/such/b", "/help", "/what", " ")
    saved = json.loads((tmp_path / "a.json").read_text())
    assert [message["role"] for message in saved["messages"]] == ["user", "assistant"]
    assert saved["messages"][1]["content"] == out.splitlines()[0]
    for words in (
        "2 messages saved",
        "1 turns",
        "prefix cache holds",
        "forgotten",
        "needs a file name",
        "cannot write",
        "/exit",
        "/what;",
    ):
        assert words in err
    assert terminal("/exit", "never read")[0] == ""


def test_a_message_may_have_several_lines_and_an_error_does_not_end_the_chat(terminal, tmp_path):
    _, err = terminal('"""first', 'second"""', "x" * 600, "/save a.json")
    saved = json.loads((tmp_path / "a.json").read_text())["messages"]
    assert [message["content"] for message in saved[::2]] == ["first\nsecond"]
    assert "max-model-len is 512" in err


def test_a_message_that_looks_like_a_command_is_sent_after_a_space(terminal, tmp_path):
    _, err = terminal(" /exit", "/save a.json")
    assert json.loads((tmp_path / "a.json").read_text())["messages"][0]["content"] == " /exit"
    assert "unknown" not in err


def test_ctrl_c_at_the_prompt_leaves_only_the_second_time(terminal):
    _, err = terminal(KeyboardInterrupt, "hello", KeyboardInterrupt, "/exit")
    assert err.count("once more") == 2
    with pytest.raises(KeyboardInterrupt):
        terminal(KeyboardInterrupt, KeyboardInterrupt)


def test_a_model_without_a_template_cannot_chat(tiny):
    llm = LLM(str(tiny("llama", num_hidden_layers=2)), EngineConfig(max_num_seqs=1))
    assert "no chat template" in refusal(talk, llm, ask(), Console(file=io.StringIO()))
    assert "n 2" in refusal(Conversation, llm, SamplingParams(n=2))
