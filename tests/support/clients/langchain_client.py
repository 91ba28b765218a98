"""What langchain-openai (https://github.com/langchain-ai/langchain) makes of a server. A script, see
tests/support/client_process.py.

    python langchain_client.py URL KEY

The server has a model called ``tiny``, keys, and a length of 256 tokens. Prints ``done`` when everything held.
"""

import asyncio
import sys

import openai
from langchain_core.exceptions import ContextOverflowError
from langchain_openai import ChatOpenAI, OpenAI

TURNS = [("system", "be brief"), ("human", "hi"), ("ai", "hello"), ("human", "more")]


def answers(model):
    whole = model.invoke("hi")
    usage = whole.usage_metadata
    assert usage["output_tokens"] == 5
    assert usage["input_tokens"] + 5 == usage["total_tokens"]
    assert usage["input_token_details"]["cache_read"] >= 0
    assert whole.response_metadata["finish_reason"] == "length"
    assert model.invoke(TURNS).usage_metadata["input_tokens"] > usage["input_tokens"]

    chunks = list(model.stream("hi", stream_usage=True))
    joined = sum(chunks[1:], chunks[0])
    assert len(chunks) > 5
    assert joined.content == whole.content
    assert joined.usage_metadata["output_tokens"] == 5
    assert joined.response_metadata["finish_reason"] == "length"

    both = model.batch(["hi", "ho"])
    assert both[0].content == whole.content
    assert [one.usage_metadata["output_tokens"] for one in both] == [5, 5]
    assert asyncio.run(model.ainvoke("hi")).content == whole.content
    return whole.content


def logprobs(model, text):
    told = model.bind(logprobs=True, top_logprobs=2).invoke("hi").response_metadata["logprobs"]["content"]
    assert len(told) == 5
    assert all(len(one["top_logprobs"]) == 2 for one in told)
    assert b"".join(bytes(one["bytes"]) for one in told).decode(errors="replace") == text


def errors(model, url):
    def refused(kind, call):
        try:
            call("hi")
        except kind as error:
            return error
        raise AssertionError(f"{kind.__name__} was not raised")

    assert refused(openai.BadRequestError, model.bind(n=1000).invoke).param == "n"
    assert refused(openai.NotFoundError, model.bind(model="gpt-x").invoke).code == "model_not_found"
    refused(ContextOverflowError, lambda text: model.invoke(text * 200))
    stranger = ChatOpenAI(model="tiny", base_url=url, api_key="wrong", max_retries=0)
    refused(openai.AuthenticationError, stranger.invoke)
    refused(openai.AuthenticationError, lambda text: list(stranger.stream(text)))


def main():
    url, key = sys.argv[1:]
    options = {"model": "tiny", "base_url": url, "api_key": key, "max_tokens": 5, "temperature": 0, "max_retries": 0}
    model = ChatOpenAI(**options, extra_body={"ignore_eos": True})
    logprobs(model, answers(model))
    errors(model, url)
    completion = OpenAI(**options)
    assert completion.invoke("ab") == "".join(completion.stream("ab"))
    print("done")


if __name__ == "__main__":
    main()
