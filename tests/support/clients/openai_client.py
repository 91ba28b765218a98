"""What openai-python (https://github.com/openai/openai-python) makes of a server. A script, see
tests/support/client_process.py.

    python openai_client.py URL KEY

The server has a model called ``tiny``, keys, and a length of 256 tokens. Prints ``done`` when everything held.
"""

import sys

import openai

HI = [{"role": "user", "content": "hi"}]
FEW = {"model": "tiny", "max_tokens": 5, "temperature": 0, "extra_body": {"ignore_eos": True}}


def chats(client):
    whole = client.chat.completions.create(messages=HI, logprobs=True, top_logprobs=2, **FEW)
    choice = whole.choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.role == "assistant"
    assert len(choice.logprobs.content) == whole.usage.completion_tokens == 5
    assert len(choice.logprobs.content[0].top_logprobs) == 2
    assert whole.usage.prompt_tokens_details.cached_tokens == 0
    stream = client.chat.completions.create(messages=HI, stream=True, stream_options={"include_usage": True}, **FEW)
    *chunks, last = stream
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == choice.message.content
    assert last.choices == []
    assert last.usage == whole.usage
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    assert client.chat.completions.create(messages=parts, **FEW).choices[0].message.content == text


def completions(client):
    both = client.completions.create(prompt=["ab", "cd"], echo=True, logprobs=1, **FEW)
    assert [choice.text[:2] for choice in both.choices] == ["ab", "cd"]
    assert both.choices[0].logprobs.token_logprobs[0] is None
    assert len(both.choices[0].logprobs.tokens) == 7
    chunks = client.completions.create(prompt="ab", stream=True, **FEW)
    assert "ab" + "".join(chunk.choices[0].text for chunk in chunks) == both.choices[0].text
    assert client.completions.create(prompt=[5, 6], n=2, **{**FEW, "temperature": 1}).choices[1].index == 1


def errors(client, url):
    def refused(kind, call, **fields):
        try:
            call(**{**FEW, **fields})
        except kind as error:
            return error
        raise AssertionError(f"{kind.__name__} was not raised")

    chat = client.chat.completions.create
    error = refused(openai.BadRequestError, chat, messages=HI, n=1000)
    assert (error.param, error.type) == ("n", "invalid_request_error")
    assert refused(openai.BadRequestError, chat, messages=HI, tools=[{"type": "function"}]).param == "tools"
    error = refused(openai.BadRequestError, client.completions.create, prompt="x" * 400)
    assert error.code == "context_length_exceeded"
    assert refused(openai.NotFoundError, chat, messages=HI, model="gpt-x").code == "model_not_found"
    stranger = openai.OpenAI(base_url=url, api_key="wrong", max_retries=0)
    refused(openai.AuthenticationError, stranger.chat.completions.create, messages=HI)


def cancellation(client):
    stream = client.completions.create(prompt="a", stream=True, **{**FEW, "max_tokens": 200})
    next(iter(stream))
    stream.close()


def main():
    url, key = sys.argv[1:]
    client = openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=120)
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    chats(client)
    completions(client)
    errors(client, url)
    cancellation(client)
    print("done")


if __name__ == "__main__":
    main()
