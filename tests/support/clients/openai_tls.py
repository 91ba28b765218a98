"""openai-python over HTTPS. A script, see tests/support/client_process.py.

    SSL_CERT_FILE=AUTHORITY python openai_tls.py URL KEY

The server has a model called ``tiny`` and a certificate of the authority. Prints ``done`` when everything held.
"""

import os
import ssl
import sys

import openai

ASK = {"model": "tiny", "prompt": "a", "max_tokens": 3, "extra_body": {"ignore_eos": True}}


def main():
    url, key = sys.argv[1:]
    client = openai.OpenAI(base_url=url, api_key=key, max_retries=0)
    assert client.completions.create(**ASK).usage.completion_tokens == 3
    chunks = list(client.completions.create(stream=True, **ASK))
    assert chunks[-1].choices[0].finish_reason == "length"
    trust = ssl.create_default_context(cafile=os.environ.pop("SSL_CERT_FILE"))
    given = openai.OpenAI(base_url=url, api_key=key, max_retries=0, http_client=openai.DefaultHttpxClient(verify=trust))
    assert given.completions.create(**ASK).usage.completion_tokens == 3
    stranger = openai.OpenAI(base_url=url, api_key=key, max_retries=0)
    try:
        stranger.completions.create(**ASK)
    except openai.APIConnectionError as error:
        print("done" if "certificate verify failed" in str(error.__cause__) else error.__cause__)
    else:
        raise AssertionError("a client that does not know the authority was served")


if __name__ == "__main__":
    main()
