"""The command `lean serve`: its options, its lines, and how it ends."""

import os
import signal
import socket
import threading
import time
from contextlib import suppress

import httpx
import pytest
from commands import assert_refused
from http_server import SETTINGS, chat_checkpoint

from lean import EngineError, yaml_file
from lean.cli import serve as command
from lean.server.loop import MOST_FAILURES

FEW = [f"--{key.replace('_', '-')}={value}" for key, value in SETTINGS.items()]
HI = {"messages": [{"role": "user", "content": "hi"}]}
BODY = {"prompt": "hello", "max_tokens": 20, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    return str(chat_checkpoint(tiny("llama", num_hidden_layers=1), tmp_path_factory.mktemp("chat")))


class Client(threading.Thread):
    """Calls ``work(url, service)`` when the server is ready, and then ends the server."""

    def __init__(self, monkeypatch, work):
        super().__init__(daemon=True)
        self.work, self.error = work, None
        announce = command._announce

        def ready(service, url):
            announce(service, url)
            self.service, self.url = service, url
            self.start()

        monkeypatch.setattr(command, "_announce", ready)

    def run(self):
        try:
            self.work(self.url, self.service)
        except BaseException as error:
            self.error = error
        finally:
            if self.service.phase.value != "draining":
                os.kill(os.getpid(), signal.SIGTERM)

    def done(self):
        self.join(60)
        if self.error is not None:
            raise self.error


@pytest.fixture(autouse=True)
def _interrupts_as_in_a_shell():
    """Background jobs ignore SIGINT, and a command leaves that as it is."""
    kept = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, kept)


def held(service):
    """A gate that steps of the engine wait for."""
    gate, runner = threading.Event(), service.engine.llm.engine.runner
    execute = runner.execute
    runner.execute = lambda chunks: gate.wait(60) and execute(chunks)
    return gate


def test_the_lines_of_the_start_lead_to_an_answer(lean, folder, monkeypatch):
    def work(url, service):
        answer = httpx.post(f"{url}/v1/chat/completions", json=HI, timeout=60)
        assert answer.status_code == 200
        assert answer.json()["model"] == "mine"

    client = Client(monkeypatch, work)
    code, out, err = lean("serve", folder, "--port=0", "--served-model-name=mine", "--no-probe", *FEW)
    client.done()
    assert (code, out) == (0, "")
    assert f"serving mine at {client.url}/v1; 4 requests run at once where each has at most" in err
    assert "KV cache int8, last 64 and first 4 tokens unquantized, 72 bytes/token" in err
    assert "room for 2,048 tokens" in err
    assert f"try: curl {client.url}/v1/chat/completions -d '" in err
    assert "warning" not in err


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_lets_running_requests_finish(lean, folder, monkeypatch, name):
    seen = {}

    def work(url, service):
        gate = held(service)
        with httpx.stream("POST", f"{url}/v1/completions", json={**BODY, "stream": True}, timeout=60) as response:
            os.kill(os.getpid(), getattr(signal, name))
            assert any(httpx.get(f"{url}/health", timeout=60).status_code == 503 for _ in range(2000))
            seen["refused"] = httpx.post(f"{url}/v1/completions", json=BODY, timeout=60).status_code
            gate.set()
            seen["text"] = response.read().decode()

    client = Client(monkeypatch, work)
    code, _, err = lean("serve", folder, "--port=0", "--no-probe", *FEW)
    client.done()
    assert code == 0
    assert seen["refused"] == 503
    assert seen["text"].endswith('"finish_reason":"length"}]}\n\ndata: [DONE]\n\n')
    assert "shutting down: 1 requests may finish, for 30 s" in err


def test_requests_that_do_not_finish_in_time_are_ended(lean, folder, monkeypatch):
    seen = {}

    def work(url, service):
        gate = held(service)
        with httpx.stream("POST", f"{url}/v1/completions", json={**BODY, "stream": True}, timeout=60) as response:
            os.kill(os.getpid(), signal.SIGTERM)
            seen["text"] = response.read().decode()
        gate.set()

    client = Client(monkeypatch, work)
    code, _, _ = lean("serve", folder, "--port=0", "--no-probe", "--shutdown-timeout=0", *FEW)
    client.done()
    assert code == 0
    assert '"type": "unavailable_error"' in seen["text"]


def test_an_engine_that_cannot_go_on_ends_the_command_with_code_1(lean, folder, monkeypatch):
    def broken(chunks):
        raise EngineError("a test broke the engine")

    def work(url, service):
        service.engine.llm.engine.runner.execute = broken
        for _ in range(MOST_FAILURES):
            with suppress(httpx.TransportError):
                assert httpx.post(f"{url}/v1/completions", json=BODY, timeout=60).status_code in (500, 503)
        end = time.monotonic() + 60
        while service.phase.value != "draining" and time.monotonic() < end:
            time.sleep(0.01)

    client = Client(monkeypatch, work)
    code, _, err = lean("serve", folder, "--port=0", "--no-probe", *FEW)
    client.done()
    assert code == 1
    assert err.splitlines()[-1] == "lean: a test broke the engine"


def test_a_server_for_others_without_keys_is_warned_about(lean, folder, monkeypatch):
    client = Client(monkeypatch, lambda url, service: None)
    code, _, err = lean("serve", folder, "--port=0", "--host=0.0.0.0", "--no-probe", *FEW)
    client.done()
    assert code == 0
    assert "warning: everybody who reaches this machine can use the server" in err


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--n", "2"), "each request"),
        (("--port", "70000"), "port"),
        (("--max-body-size", "much"), "much"),
        (("--kv-dtype", "int7"), "int7"),
        (("--ssl-certfile", "no.pem"), "ssl-keyfile"),
        (("--ssl-certfile", __file__, "--ssl-keyfile", __file__), "certificate"),
    ],
)
def test_options_that_cannot_be_used_are_refused_in_one_line(lean, folder, options, word):
    assert_refused(lean("serve", folder, "--port=0", *options), word)


def test_a_port_in_use_and_an_unknown_model_are_refused_in_one_line(lean, folder, home):
    assert_refused(lean("serve", "no/such/model/here"), "no/such/model/here")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert_refused(lean("serve", folder, f"--port={taken.getsockname()[1]}"), "cannot listen")


def test_a_model_that_cannot_be_loaded_ends_the_server_with_one_line(lean, folder):
    code, out, err = lean("serve", folder, "--port=0", "--no-probe", "--window=8", "--num-blocks=1", *FEW[1:])
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("lean: ")


def test_the_extra_is_named_where_it_is_missing(lean, folder, monkeypatch):
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert_refused(lean("serve", folder), "pip install 'lean-inference[serve]'")


def test_a_printed_file_of_defaults_does_not_shorten_chats(lean):
    """max_tokens in a file is that of chats and completions; without it chats have a longer one."""
    assert "max_tokens" not in yaml_file.read(lean("serve", "m", "--print-config")[1])
    assert yaml_file.read(lean("serve", "m", "--max-tokens", "256", "--print-config")[1])["max_tokens"] == 256


def test_printed_options_can_be_read_again_and_hold_no_keys(lean, tmp_path, monkeypatch):
    monkeypatch.setenv("LEAN_API_KEY", "geheim other")
    code, out, _ = lean("serve", "m", "--port", "81", "--allowed-host", "a", "--allowed-host", "b", "--print-config")
    assert code == 0
    assert "geheim" not in out
    values = yaml_file.read(out)
    assert (values["port"], values["allowed_host"], values["max_waiting"]) == (81, ["a", "b"], 128)
    (tmp_path / "again.yaml").write_text(out)
    assert lean("serve", "m", "--config", str(tmp_path / "again.yaml"), "--print-config")[1] == out
