"""openai-python comes again after a refusal that says when. A script, see tests/support/client_process.py.

    python openai_retries.py URL KEY

The server refuses a request of this script until it has been asked once for each status that the test wants. Prints the
status of each answer, and ``done`` when the last one was served.
"""

import sys

import openai


def told(response):
    if response.status_code != 200:
        assert int(response.headers["retry-after"]) > 0
    print(response.status_code, flush=True)


def main():
    url, key = sys.argv[1:]
    http = openai.DefaultHttpxClient(event_hooks={"response": [told]})
    client = openai.OpenAI(base_url=url, api_key=key, max_retries=50, timeout=120, http_client=http)
    stream = client.completions.create(
        model="tiny", prompt="a", max_tokens=3, stream=True, extra_body={"ignore_eos": True}
    )
    assert [chunk.choices[0].finish_reason for chunk in stream if chunk.choices][-1] == "length"
    print("done")


if __name__ == "__main__":
    main()
