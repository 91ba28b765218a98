"""What pydantic-ai (https://github.com/pydantic/pydantic-ai) makes of a server. A script, see
tests/support/client_process.py.

    python pydantic_ai_client.py URL KEY

The server has a model called ``tiny``, keys, and a length of 256 tokens. Prints ``done`` when everything held.
"""

import asyncio
import sys

from pydantic_ai import Agent
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

SETTINGS = {"max_tokens": 5, "temperature": 0.0, "extra_body": {"ignore_eos": True}}


def answers(model):
    agent = Agent(model, instructions="Be brief.", model_settings=SETTINGS)
    whole = agent.run_sync("hi")
    response = whole.all_messages()[-1]
    assert response.usage.output_tokens == 5
    assert response.usage.input_tokens > 5
    assert response.finish_reason == "length"
    more = agent.run_sync("more", message_history=whole.all_messages())
    assert more.all_messages()[-1].usage.input_tokens > response.usage.input_tokens

    async def stream():
        async with agent.run_stream("hi") as result:
            parts = [part async for part in result.stream_text(delta=True, debounce_by=None)]
        return "".join(parts), result.all_messages()[-1].usage.output_tokens

    assert asyncio.run(stream()) == (whole.output, 5)


def errors(model, url):
    def refused(agent):
        try:
            agent.run_sync("hi")
        except ModelHTTPError as error:
            return error.status_code, error.body["param"], error.body["message"]
        raise AssertionError("nothing was refused")

    with_tool = Agent(model, model_settings=SETTINGS)
    with_tool.tool_plain(clock)
    assert refused(with_tool) == (400, "tools", "tools is not supported by this server: leave it out")
    status, field, message = refused(Agent(model, output_type=list[int], model_settings=SETTINGS))
    assert (status, field) in [(400, "tools"), (400, "tool_choice")]
    assert message == f"{field} is not supported by this server: leave it out"
    assert refused(Agent(model, model_settings={**SETTINGS, "max_tokens": -1}))[:2] == (400, "max_completion_tokens")
    stranger = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=url, api_key="wrong"))
    assert refused(Agent(stranger, model_settings=SETTINGS))[:2] == (401, None)


def clock() -> str:
    """The time."""
    return "noon"


def main():
    url, key = sys.argv[1:]
    model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=url, api_key=key))
    answers(model)
    errors(model, url)
    print("done")


if __name__ == "__main__":
    main()
