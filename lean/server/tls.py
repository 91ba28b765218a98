"""The server's certificate and its key: read, and tried, before the first client comes."""

from __future__ import annotations

import logging
import ssl
from contextlib import suppress
from pathlib import Path

from lean.errors import ConfigError, one_line

log = logging.getLogger("lean")

_ROUNDS = 8  # turns of each end of a handshake; two are enough


class _Locked(Exception):
    """The key is protected by a password."""


def server_context(certfile: str, keyfile: str) -> ssl.SSLContext:
    """What serves HTTPS with a certificate, its chain, and its key (PEM).

    A certificate that clients will not take, such as an expired one, is served with a warning: some clients look at
    nothing. Raises ConfigError, which names the file at fault, for files that cannot be used.
    """
    _check_kind("ssl-certfile", certfile, b"CERTIFICATE-----")
    _check_kind("ssl-keyfile", keyfile, b"PRIVATE KEY-----")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certfile, keyfile, _no_password)
    except _Locked:
        raise ConfigError(
            f"ssl-keyfile {one_line(keyfile)} is protected by a password, and a server asks nobody for one: write the "
            "key without it (openssl pkey -in FILE -out NEW), readable by the server's user only"
        ) from None
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(
                f"ssl-keyfile {one_line(keyfile)} is not the key of the first certificate in {one_line(certfile)}"
            ) from None
        raise ConfigError(
            f"the certificate {one_line(certfile)} or its key {one_line(keyfile)} cannot be used: {one_line(error)}"
        ) from None
    if fault := _fault(context, certfile):
        log.warning("warning: clients will not accept the certificate %s: %s", one_line(certfile), fault)
    return context


def _check_kind(option: str, path: str, mark: bytes) -> None:
    """Raise ConfigError unless a file can be read and has a PEM block of this kind."""
    try:
        found = mark in Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{option} {one_line(path)} cannot be read: {error.strerror}") from None
    if not found:
        what = "certificate" if option == "ssl-certfile" else "private key"
        raise ConfigError(f"{option} {one_line(path)} holds no {what} in PEM format")


def _no_password() -> str:
    raise _Locked


def _fault(context: ssl.SSLContext, certfile: str) -> str | None:
    """What a client finds wrong with a certificate that it trusts; None: nothing. The name is not looked at.

    A handshake in memory: Python has no other way to ask for the dates of a certificate that is not an authority's.
    """
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the server's own certificate is trusted as it is
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    try:
        client.load_verify_locations(certfile)
        ends = (client.wrap_bio(to_client, to_server), context.wrap_bio(to_server, to_client, server_side=True))
        for _ in range(_ROUNDS):
            for end in ends:
                with suppress(ssl.SSLWantReadError):
                    end.do_handshake()
    except ssl.SSLCertVerificationError as error:
        return one_line(error.verify_message)
    except ssl.SSLError as error:
        return one_line(error)
    return None
