"""ServerConfig: the options that only the server has, and their defaults."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from lean.errors import ConfigError, one_line, shown
from lean.units import parse_size

MIB = 2**20
_MOST = 2**31 - 1


@dataclass(frozen=True)
class ServerConfig:
    """Where the server listens, who may use it, and the bounds of a request.

    Attributes:
        host, port: where to listen; port 0 takes a free one.
        api_key: keys of which every request must carry one; none: everybody may use the server.
        served_model_name: names of the model in the API; none: its own name.
        allowed_host: names that the Host header may have, beside IP addresses and localhost; ``*`` allows every name.
        ssl_certfile, ssl_keyfile: PEM files; both or none.
        shutdown_timeout: seconds that running requests get after SIGTERM or Ctrl-C.
        read_timeout: seconds that a client has to send the head of a request, and then its body.
        write_timeout: seconds after which a client that reads nothing is disconnected.
        max_body_size, max_header_size: bytes of one request.
        max_waiting: requests that wait for a place among the running ones; more get status 429.
        max_n: answers to one prompt. max_prompts: prompts of one completions request.
        max_logprobs: most likely tokens that are reported for each token.
        max_stop_strings, max_stop_length: number of stop strings (and of stop token ids), and characters of each.
        max_logit_bias: entries of logit_bias. max_messages: messages of one conversation.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: tuple[str, ...] = ()
    served_model_name: tuple[str, ...] = ()
    allowed_host: tuple[str, ...] = ()
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    shutdown_timeout: float = 30.0
    read_timeout: float = 30.0
    write_timeout: float = 60.0
    max_body_size: int = 4 * MIB
    max_header_size: int = 32 * 1024
    max_waiting: int = 128
    max_n: int = 16
    max_prompts: int = 128
    max_logprobs: int = 20
    max_stop_strings: int = 16
    max_stop_length: int = 1024
    max_logit_bias: int = 1024
    max_messages: int = 4096

    def __post_init__(self) -> None:
        for item in fields(self):
            _check(item.name, getattr(self, item.name), str(item.type))
        if self.port > 65535:
            raise ConfigError(f"port {self.port} must be from 0 to 65535")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ConfigError("ssl-certfile and ssl-keyfile go together: give both")
        for name in (self.ssl_certfile, self.ssl_keyfile):
            if name is not None and not Path(name).is_file():
                raise ConfigError(f"there is no file {one_line(name)}")

    @classmethod
    def read(cls, values: dict[str, Any]) -> ServerConfig:
        """The options as flags or a YAML file give them: sizes may be texts, and a list may be its only entry."""
        read = dict(values)
        for item in fields(cls):
            value = read.get(item.name)
            if "tuple" in str(item.type) and value is not None:
                read[item.name] = tuple(value) if isinstance(value, list | tuple) else (value,)
            elif item.name.endswith("_size") and isinstance(value, str):
                read[item.name] = parse_size(value)
        return cls(**read)

    @property
    def is_local(self) -> bool:
        """Whether only this machine can connect."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


SERVER_KEYS = tuple(item.name for item in fields(ServerConfig))


def _check(name: str, value: Any, kind: str) -> None:
    option = name.replace("_", "-")
    if kind.startswith("tuple"):
        if not all(isinstance(text, str) and text.strip() for text in value):
            # Not shown: it may be a key.
            raise ConfigError(f"{option} must be one or several texts, none of them empty")
    elif kind.startswith("str"):
        if not (isinstance(value, str) and value) and not (value is None and "None" in kind):
            raise ConfigError(f"{option} {shown(value)} must be a text")
    elif isinstance(value, bool) or not isinstance(value, int if kind == "int" else int | float):
        raise ConfigError(f"{option} {shown(value)} must be a {'whole ' if kind == 'int' else ''}number")
    elif not 0 <= value <= _MOST:
        raise ConfigError(f"{option} {shown(value)} must be from 0 to {_MOST}")
