"""HTTPS: clients that trust the certificate are served, and files that cannot be used are refused in one line."""

import shutil
import ssl
import subprocess

import httpx
import pytest
from certificates import OPENSSL, PAST, Authority
from client_process import assert_done, interpreter, started
from http_server import WAIT_S, loader, parsed, served

from lean.errors import ConfigError
from lean.server.tls import server_context

pytestmark = pytest.mark.skipif(OPENSSL is None, reason="the program openssl, which makes certificates, is missing")

BODY = {"prompt": "hello", "max_tokens": 5, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def key(authority):
    return authority.key("server")


@pytest.fixture(scope="module")
def cert(authority, key):
    return authority.server("server", key)


@pytest.fixture(scope="module")
def secure(folder, cert, key):
    with served(loader(folder), ssl_certfile=str(cert), ssl_keyfile=str(key)) as server:
        yield server
        server.assert_idle()


def client(server, authority):
    trust = ssl.create_default_context(cafile=str(authority.cert))
    return httpx.Client(base_url=server.url, timeout=WAIT_S, trust_env=False, verify=trust)


def test_a_client_that_trusts_the_authority_is_served(secure, authority):
    assert secure.url.startswith("https://127.0.0.1:")
    with client(secure, authority) as http:
        whole = http.post("/v1/completions", json=BODY).json()
        with http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as response:
            events = parsed(response.read())
    assert "".join(event["choices"][0]["text"] for event in events) == whole["choices"][0]["text"]


def test_other_clients_are_not(secure):
    with pytest.raises(httpx.ConnectError, match="certificate"):
        httpx.get(f"{secure.url}/health", trust_env=False, timeout=WAIT_S)
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{secure.socket.getsockname()[1]}/health", trust_env=False, timeout=WAIT_S)


@pytest.mark.skipif(shutil.which("curl") is None, reason="the program curl is missing")
def test_curl_is_served(secure, authority):
    command = ["curl", "--silent", "--fail", "--noproxy", "*", "--cacert", authority.cert, f"{secure.url}/health"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert answer.stdout == '{"status":"ready"}'


def test_openai_python_is_served(secure, authority):
    with started("openai_tls", interpreter("openai"), secure.url, "any", SSL_CERT_FILE=str(authority.cert)) as process:
        assert_done(process)


def test_a_good_certificate_is_taken_without_a_word(cert, key, caplog):
    server_context(str(cert), str(key))
    assert caplog.messages == []


def test_a_certificate_with_its_chain_is_taken_without_a_word(authority, cert, key, tmp_path, caplog):
    chain = tmp_path / "chain.pem"
    chain.write_bytes(cert.read_bytes() + authority.cert.read_bytes())
    server_context(str(chain), str(key))
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("dates", "fault"),
    [(PAST, "certificate has expired"), (("20980101000000Z", "20990101000000Z"), "certificate is not yet valid")],
)
def test_a_certificate_of_another_time_is_served_with_a_warning(authority, key, dates, fault, caplog):
    cert = authority.server("other-time", key, dates)
    server_context(str(cert), str(key))
    assert caplog.messages == [f"warning: clients will not accept the certificate {cert}: {fault}"]


def test_files_that_cannot_be_used_are_refused_in_one_line(authority, cert, key, tmp_path):
    def refusal(cert, key):
        with pytest.raises(ConfigError) as error:
            server_context(str(cert), str(key))
        assert "\n" not in str(error.value)
        return str(error.value)

    other, damaged = authority.key("other"), tmp_path / "damaged.pem"
    damaged.write_text(key.read_text().replace("A", "B"))
    assert refusal(cert, other) == f"ssl-keyfile {other} is not the key of the first certificate in {cert}"
    assert refusal(cert, authority.locked(key)).startswith(f"ssl-keyfile {key.with_suffix('.locked')} is protected by")
    assert refusal(key, cert) == f"ssl-certfile {key} holds no certificate in PEM format"
    assert refusal(cert, cert) == f"ssl-keyfile {cert} holds no private key in PEM format"
    assert refusal(cert, tmp_path) == f"ssl-keyfile {tmp_path} cannot be read: Is a directory"
    assert str(damaged) in refusal(cert, damaged)
