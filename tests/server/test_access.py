"""Who may use the server: keys, hosts, certificates, and its phases."""

import socket
import sys
import threading

import pytest
from http_server import Served, error_of, loader, own_address, served

from lean.errors import ConfigError
from lean.server.config import ServerConfig
from lean.server.run import listen

KEYS = ("first secret", "sécond")


@pytest.fixture(scope="module")
def locked(folder):
    with served(loader(folder), api_key=KEYS, allowed_host=("gpu.lan",)) as server:
        yield server


def bearer(key):
    return {"Authorization": f"Bearer {key}".encode()}


@pytest.mark.parametrize("key", KEYS)
def test_every_key_opens_the_server(locked, key):
    assert locked.http.get("/v1/models", headers=bearer(key)).status_code == 200
    assert locked.complete("a", max_tokens=1).status_code == 401
    assert locked.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, headers=bearer(key)).status_code == 200


def test_requests_share_the_prefix_cache_only_with_those_of_the_same_key_and_salt(locked):
    def cached(key, **salt):
        body = {"prompt": "a prompt of more than two blocks of " * 3, "max_tokens": 1, **salt}
        answer = locked.post("/v1/completions", body, headers=bearer(key)).json()
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    who = [{"key": key, **salt} for key in KEYS for salt in ({}, {"cache_salt": "x"}, {"cache_salt": "y"})]
    assert [cached(**one) for one in who] == [0] * 6
    assert all(cached(**one) > 0 for one in who)
    text = locked.http.get("/metrics", headers=bearer(KEYS[0])).text
    found = [line for line in text.splitlines() if line.startswith("vllm:prefix_cache_hits_total")]
    assert len(found) == 1
    assert float(found[0].split()[-1]) > 0


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer first", f"Basic {KEYS[0]}", KEYS[0]])
def test_without_a_key_nothing_but_the_health_is_shown(locked, header):
    headers = {} if header is None else {"Authorization": header}
    for path in ("/v1/models", "/metrics", "/openapi.json", "/nothing"):
        response = locked.http.get(path, headers=headers)
        assert error_of(response)[0] == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["code"] == "invalid_api_key"
    assert locked.http.get("/health", headers=headers).status_code == 200


def test_the_page_of_another_site_is_refused(locked):
    headers = {**bearer(KEYS[0]), "Host": "evil.example"}
    assert error_of(locked.http.get("/v1/models", headers=headers))[0] == 403
    assert locked.http.get("/v1/models", headers={**headers, "Host": "gpu.lan:80"}).status_code == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "https://evil.example:8000", "null"])
def test_pages_of_other_sites_are_refused_and_read_nothing(locked, origin):
    body = {"prompt": "a", "max_tokens": 1}
    response = locked.post("/v1/completions", body, headers={**bearer(KEYS[0]), "Origin": origin})
    assert error_of(response)[0] == 403
    assert not [name for name in response.headers if name.startswith("access-control")]


@pytest.mark.parametrize("origin", ["http://gpu.lan", "http://localhost:3000", "http://127.0.0.1", "http://[::1]:80"])
def test_pages_of_this_machine_and_of_allowed_hosts_are_served(locked, origin):
    headers = {**bearer(KEYS[0]), "Origin": origin}
    assert locked.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, headers=headers).status_code == 200


def test_a_server_that_loads_says_so(folder):
    gate = threading.Event()

    def slow():
        gate.wait()
        return loader(folder)()

    server = Served(slow, ServerConfig(port=0))
    try:
        assert server.http.get("/health").status_code == 503
        assert error_of(server.complete("a"))[::2] == (503, "the model is still loading")
        assert server.http.get("/metrics").status_code == 200
        gate.set()
        assert server.ready.wait(120)
        assert server.http.get("/health").status_code == 200
        assert server.complete("a", max_tokens=1).status_code == 200
    finally:
        gate.set()
        server.stop()


def test_a_port_in_use_is_a_mistake_of_the_user():
    with listen(ServerConfig(port=0)) as taken, pytest.raises(ConfigError, match="cannot listen"):
        listen(ServerConfig(port=taken.getsockname()[1]))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have one loopback address only")
def test_a_port_whose_connections_were_cut_off_can_be_had_at_once():
    host = own_address()
    with listen(ServerConfig(host=host, port=0)) as first:
        port = first.getsockname()[1]
        with socket.create_connection(first.getsockname()):
            first.accept()[0].close()  # who closes first keeps the port busy for a minute
            first.close()
            with listen(ServerConfig(host=host, port=port)) as second:
                assert second.getsockname()[1] == port
