"""A server in a thread of the test's process, on a free port of 127.0.0.1."""

import asyncio
import json
import os
import shutil
import threading
from contextlib import contextmanager

import httpx
from tiny import byte_tokenizer
from tokenizers import AddedToken

from lean import LLM, EngineConfig, SamplingParams
from lean.server.config import ServerConfig
from lean.server.run import listen, run, url_of
from lean.server.service import Service

TEMPLATE = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""
CONTROL = ("<|im_start|>", "<|im_end|>")  # ids 259 and 260
SETTINGS = {"num_blocks": 64, "max_num_seqs": 4, "max_model_len": 256, "device": "cpu"}
WAIT_S = 120  # until something must have happened; a busy machine is slow


def chat_tokenizer():
    """The byte tokenizer with two control tokens and a template that writes them."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL], special_tokens=True)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def chat_checkpoint(folder, to):
    """A copy of a tiny checkpoint whose tokenizer has a chat template."""
    shutil.copytree(folder, to, dirs_exist_ok=True)
    chat_tokenizer().save_pretrained(to)
    return to


def loader(folder, **settings):
    """What makes a server's engine."""
    return lambda: LLM(str(folder), EngineConfig(**{**SETTINGS, **settings}))


def own_address():
    """A loopback address of this process (Linux has 16 million): no other one takes a port that becomes free there."""
    number = os.getpid()
    return f"127.{1 + number // 65536 % 254}.{number // 256 % 256}.{number % 256}"


class Served:
    """A running server. ``url``, ``service``, its event ``loop`` and an ``httpx`` client."""

    def __init__(self, load, config, names=("tiny",), defaults=None):
        self.ready, self.ended = threading.Event(), threading.Event()
        self.socket = listen(config)
        self.url = url_of(self.socket, config)
        self.service = Service(load, config, names, defaults or SamplingParams(), on_ready=self.ready.set)
        self.error = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        self.http = httpx.Client(base_url=self.url, timeout=WAIT_S, trust_env=False)

    def _run(self):
        async def main():
            self.loop = asyncio.get_running_loop()
            await run(self.service, self.socket)

        try:
            asyncio.run(main())
        except BaseException as error:
            self.error = error
        finally:
            self.ended.set()

    def call(self, function):
        """Run a function on the server's event loop, and return what it returns."""

        async def on_loop():
            return function()

        return asyncio.run_coroutine_threadsafe(on_loop(), self.loop).result(WAIT_S)

    def stop(self):
        if not self.ended.is_set():
            self.call(self.service.stop)
        self.thread.join(WAIT_S)
        self.http.close()
        assert not self.thread.is_alive(), "the server did not end"

    @property
    def llm(self):
        return self.service.engine.llm

    def post(self, path, body=None, **named):
        return self.http.post(path, json=body, **named)

    def chat(self, text="hi", **fields):
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **fields})

    def complete(self, prompt="hi", **fields):
        return self.post("/v1/completions", {"prompt": prompt, **fields})

    def events(self, path, body):
        """The events of a stream, parsed, and the last one, which is ``[DONE]``, checked and left out."""
        with self.http.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            return parsed(response.read())

    def wait_until(self, condition):
        """Wait for a condition of the event loop's state."""
        gate = threading.Event()
        for _ in range(WAIT_S * 50):
            if self.call(condition):
                return
            gate.wait(0.02)
        raise AssertionError("the condition did not come true")

    def assert_idle(self):
        """Nothing runs, nothing is in flight, and every block is free."""
        self.wait_until(lambda: not self.service.in_flight and not self.llm.has_work)
        self.llm.check_integrity()
        assert all(pool.num_used == 0 for pool in self.llm.engine.manager.pools)


def parsed(data):
    frames = [frame for frame in data.decode().split("\n\n") if frame and not frame.startswith(":")]
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
    assert frames[-1] == "data: [DONE]"
    return [json.loads(frame[6:]) for frame in frames[:-1]]


def error_of(response):
    """(status, param, message) of an error in OpenAI's shape."""
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert "\n" not in body["error"]["message"]
    return response.status_code, body["error"]["param"], body["error"]["message"]


@contextmanager
def served(load, names=("tiny",), defaults=None, **config):
    server = Served(load, ServerConfig(**{"port": 0, **config}), names, defaults)
    try:
        assert server.ready.wait(WAIT_S), server.service.error
        yield server
    finally:
        server.stop()
