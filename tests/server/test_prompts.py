"""A prompt reaches the model whole and as it was written, or it is refused."""

import shutil

import pytest
from http_server import TEMPLATE, chat_tokenizer, error_of, loader, served
from tiny import BOS
from tokenizers import processors

GREEDY = {"temperature": 0, "max_tokens": 1, "ignore_eos": True}
LIMIT = 256  # max_model_len of the servers
BLOCK = 32  # and their block_size


def first_logprob(server, prompt):
    """The usage of an answer of one token, and its log-probability."""
    body = server.complete(prompt, logprobs=0, **GREEDY).json()
    return body["usage"], body["choices"][0]["logprobs"]["token_logprobs"][0]


def test_the_longest_prompt_is_read_from_its_first_token_on(server):
    texts = ["a" + "x" * (LIMIT - 2), "b" + "x" * (LIMIT - 2)]
    (usage, first), (_, other) = (first_logprob(server, text) for text in texts)
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (LIMIT - 1, 1)
    assert first != other


@pytest.mark.parametrize("stream", [False, True])
def test_a_longer_prompt_is_refused_with_both_lengths_and_never_cut(server, stream):
    written = server.post("/tokenize", {"messages": [{"role": "user", "content": ""}]}).json()["count"]
    longest = "x" * (LIMIT - 1 - written)
    body = server.chat(longest, **GREEDY).json()
    assert body["usage"]["prompt_tokens"] == LIMIT - 1
    for response, field in (
        (server.chat(longest + "x", stream=stream, **GREEDY), "messages"),
        (server.complete("x" * LIMIT, stream=stream, **GREEDY), "prompt"),
        (server.complete([5] * LIMIT, stream=stream, **GREEDY), "prompt"),
        (server.complete(["a", "x" * LIMIT], stream=stream, **GREEDY), "prompt"),
    ):
        status, param, message = error_of(response)
        assert (status, param, response.json()["error"]["code"]) == (400, field, "context_length_exceeded")
        assert f"{field} has {LIMIT} tokens" in message
        assert f"maximum context length is {LIMIT} tokens" in message


def test_a_client_that_asks_for_a_cut_prompt_is_told_that_there_is_none(server):
    response = server.complete("x" * LIMIT, truncate_prompt_tokens=5, **GREEDY)
    assert error_of(response)[:2] == (400, "truncate_prompt_tokens")


def test_a_window_forgets_the_middle_and_not_the_prompt(folder):
    """The sinks stay visible, so a fact in the first token still counts; tokens between them and the window do not."""
    with served(loader(folder, window=64, sinks=1, num_blocks=None, kv_residual_length=0)) as server:
        rest = "x" * 200
        same, (usage, other), forgotten = (first_logprob(server, text + rest) for text in ("aaa", "baa", "aab"))
        assert usage["prompt_tokens"] == 203
        assert same[1] != other
        assert same[1] == forgotten[1]


@pytest.fixture(scope="module")
def with_bos(folder, tmp_path_factory):
    """A server whose tokenizer adds a BOS to texts, and whose template writes one."""
    copy = tmp_path_factory.mktemp("bos") / "model"
    shutil.copytree(folder, copy)
    tokenizer = chat_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", BOS)])
    tokenizer.chat_template = "{{ bos_token }}" + TEMPLATE
    tokenizer.save_pretrained(copy)
    with served(loader(copy)) as server:
        yield server


@pytest.mark.parametrize("text", ["hi", "<s>hi", "<s><s>"])
def test_a_chat_has_one_bos_whatever_its_user_writes(with_bos, text):
    messages = [{"role": "user", "content": text}]
    tokens = with_bos.post("/tokenize", {"messages": messages}).json()["tokens"]
    assert tokens[0] == BOS
    assert tokens.count(BOS) == 1
    assert with_bos.post("/detokenize", {"tokens": tokens}).json()["prompt"].count(text) >= 1
    assert with_bos.chat(text, **GREEDY).json()["usage"]["prompt_tokens"] == len(tokens)


def test_a_completion_has_the_bos_that_the_tokenizer_adds_unless_it_is_told_not_to(with_bos):
    def count(**fields):
        return with_bos.complete("hi", **GREEDY, **fields).json()["usage"]["prompt_tokens"]

    assert (count(), count(add_special_tokens=True), count(add_special_tokens=False)) == (3, 3, 2)


def test_a_second_bos_in_a_completion_is_warned_about_once(with_bos, caplog):
    for text, fields in (("hi", {}), ("<s><s>", {"add_special_tokens": False}), ("<s>hi", {}), ("<s>ho", {})):
        assert with_bos.complete(text, **GREEDY, **fields).status_code == 200
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "<s>" in warnings[0]
    assert "add_special_tokens" in warnings[0]


@pytest.mark.parametrize("place", [0, 1, BLOCK - 1, BLOCK, 2 * BLOCK - 1, 2 * BLOCK])
def test_a_prompt_that_differs_in_one_token_shares_the_blocks_before_it_and_no_others(folder, place):
    """Tokens that are the same bytes, or the same sum, in another order too: only a hash of all of them tells."""
    ids = [3 + index * 7 % 200 for index in range(3 * BLOCK)]
    changed = [[*ids[:place], new, *ids[place + 1 :]] for new in (ids[place] + 1, ids[place] + 32)]
    swapped = [*ids[:place], ids[place + 1], ids[place], *ids[place + 2 :]]
    with served(loader(folder)) as server, served(loader(folder, prefix_cache=False)) as plain:
        assert server.llm.config.block_size == BLOCK
        first_logprob(server, ids)
        for other in (*changed, swapped):
            usage, logprob = first_logprob(server, other)
            assert usage["prompt_tokens_details"]["cached_tokens"] == place // BLOCK * BLOCK
            assert logprob == pytest.approx(first_logprob(plain, other)[1], abs=1e-5)
        usage, logprob = first_logprob(server, ids)  # what others computed has not replaced it
        assert usage["prompt_tokens_details"]["cached_tokens"] == 2 * BLOCK
        assert logprob == pytest.approx(first_logprob(plain, ids)[1], abs=1e-5)
