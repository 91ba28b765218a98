"""The process that renders chat templates. `lean.text.template_process` starts it, and ends it.

A template is code of the model. Here it can take neither the memory nor the time of the engine: the process limits its
own memory, and the kernel ends it when a rendering has used its processor time. It imports the standard library and
jinja2 only, has no environment variables of its parent, and ends when its parent closes the socket, which is file 0.
Where the system knows no limit of memory (macOS), only products of sequences and the rendered text are bounded.

A message in either direction is its length in 4 bytes, then JSON in ASCII. A request has "template", "variables", the
limits "seconds" (of processor time) and "characters", and "tz", the value of TZ in the parent. A reply has "text", or
"limit" (memory or length), or "error" (what the template raised). The first reply, {}, says that the process is ready.

What a template finds beside its variables is what transformers gives it (transformers/utils/chat_template_utils.py).
"""

import sys

if __name__ == "__main__":
    sys.path += sys.argv[2:]  # where jinja2 lies; behind the standard library

import json
import os
import resource
import signal
import struct
import time
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import Any, BinaryIO

import jinja2
import jinja2.debug  # else imported after the first error, when memory may be short
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

HEADER = struct.Struct(">I")
MAX_REPEATED = 10**7  # items of the product of a sequence and a number
MAX_ERROR = 2000  # characters of an error's text


class TooLong(Exception):
    """The rendering has more characters than allowed."""


class Environment(ImmutableSandboxedEnvironment):
    """jinja2's sandbox, in which a product cannot be huge: not every system lets a process limit its own memory."""

    intercepted_binops = frozenset(["*"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        for items, times in ((left, right), (right, left)):
            is_product = isinstance(items, str | bytes | list | tuple) and isinstance(times, int)
            if is_product and len(items) * times > MAX_REPEATED:
                raise MemoryError
        return super().call_binop(context, operator, left, right)


class GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` ... ``{% endgeneration %}`` marks text for training. Here it is the text alone."""

    tags = {"generation"}  # noqa: RUF012  the name is jinja2's

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("written"), [], [], body).set_lineno(line)

    def written(self, caller: Any) -> str:
        return caller()


class PlainDict:
    """``dict`` of a template: a function, not a class whose attributes lead further."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class PlainNamespace(Namespace):
    """``namespace`` of a template. Its attributes do not begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # an attribute may be called self
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _refuse_underscore(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"an attribute of a namespace cannot begin with an underscore: {name!r}")


def _raise_exception(message: Any) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON in which < and > stay as they are; jinja2's own filter escapes them."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment() -> Environment:
    """A sandbox with the names that chat templates use."""
    made = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols])
    made.filters["tojson"] = _tojson
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = _strftime_now
    made.globals["dict"] = PlainDict()
    made.globals["namespace"] = PlainNamespace
    return made


@lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    return environment().from_string(template)


def render(template: str, variables: dict[str, Any], characters: int) -> str:
    """The rendered text. Raises TooLong beyond ``characters``, and whatever the template raises."""
    pieces, length = [], 0
    for piece in _compiled(template).generate(variables):
        length += len(piece)
        if length > characters:
            raise TooLong
        pieces.append(piece)
    return "".join(pieces)


def _answer(request: dict[str, Any]) -> dict[str, str]:
    if request["tz"] != os.environ.get("TZ"):
        os.environ.pop("TZ", None)
        if request["tz"] is not None:
            os.environ["TZ"] = request["tz"]
        time.tzset()
    signal.setitimer(signal.ITIMER_PROF, request["seconds"])
    try:
        return {"text": render(request["template"], request["variables"], request["characters"])}
    except MemoryError:
        return {"limit": "memory"}
    except TooLong:
        return {"limit": "length"}
    except Exception as error:
        return {"error": _text_of(error)}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _text_of(error: Exception) -> str:
    try:
        return str(error)[:MAX_ERROR] or type(error).__name__
    except Exception:  # the template chose the object whose text this is
        return type(error).__name__


def _limit_resources(memory: int) -> None:
    """At most ``memory`` bytes of address space where the system allows such a limit; no new files, no core dumps."""
    for number, most in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(number)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        try:
            resource.setrlimit(number, (most, most))
        except (OSError, ValueError):  # macOS
            continue
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, also in the middle of a call of a library
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _send(output: BinaryIO, value: dict[str, str]) -> None:
    data = json.dumps(value).encode("ascii")
    output.write(HEADER.pack(len(data)) + data)
    output.flush()


def serve(memory: int) -> None:
    """Answer requests until the socket closes."""
    with os.fdopen(0, "rb", closefd=False) as requests, os.fdopen(0, "wb", closefd=False) as replies:
        _limit_resources(memory)
        _send(replies, {})
        while header := requests.read(HEADER.size):
            try:
                reply = _answer(json.loads(requests.read(*HEADER.unpack(header))))
                _send(replies, reply)
            except MemoryError:
                _send(replies, {"limit": "memory"})


if __name__ == "__main__":
    with suppress(BrokenPipeError, ConnectionResetError):
        serve(int(sys.argv[1]))
    os._exit(0)  # the parent is gone
