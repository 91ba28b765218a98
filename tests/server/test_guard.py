"""Hosts that are let in, and the options of the server."""

import pytest

from lean.errors import ConfigError
from lean.server.config import ServerConfig
from lean.server.errors import ApiError
from lean.server.guard import check_host, host_name


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8000", "10.0.0.7", "[::1]:8000", "[::1]", "localhost", "LOCALHOST:80", "a.localhost", ""]
)
def test_addresses_and_localhost_pass(host):
    check_host(host.encode(), ServerConfig())


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil", ":"])
def test_a_name_of_another_site_is_refused(host):
    with pytest.raises(ApiError) as caught:
        check_host(host.encode(), ServerConfig())
    assert caught.value.status == 403


@pytest.mark.parametrize("config", [{"allowed_host": ("gpu.lan",)}, {"allowed_host": ("*",)}, {"host": "gpu.lan"}])
def test_names_can_be_allowed(config):
    check_host(b"GPU.lan:8000", ServerConfig(**config))


def test_the_name_of_a_host_header_has_no_port():
    assert [host_name(text) for text in ("a.b:80", "[::1]:80", "A.", "1.2.3.4")] == ["a.b", "::1", "a", "1.2.3.4"]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"port": 70000}, "port"),
        ({"port": "http"}, "port"),
        ({"max_body_size": -1}, "max-body-size"),
        ({"ssl_certfile": "a.pem"}, "ssl-keyfile"),
        ({"api_key": [""]}, "api-key"),
        ({"host": ""}, "host"),
    ],
)
def test_options_that_cannot_be_used_are_refused(options, word):
    with pytest.raises(ConfigError, match=word):
        ServerConfig.read(options)


def test_sizes_may_be_texts_and_a_list_may_be_its_only_entry():
    config = ServerConfig.read({"max_body_size": "2MiB", "api_key": "secret"})
    assert (config.max_body_size, config.api_key) == (2 * 2**20, ("secret",))


def test_a_key_that_cannot_be_used_is_not_shown():
    with pytest.raises(ConfigError) as caught:
        ServerConfig.read({"api_key": ["geheim", 3]})
    assert "geheim" not in str(caught.value)


@pytest.mark.parametrize(
    ("host", "local"), [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False)]
)
def test_an_address_that_others_can_reach_is_known(host, local):
    assert ServerConfig(host=host).is_local == local
