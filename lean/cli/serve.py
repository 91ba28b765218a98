"""``lean serve``: a model over HTTP, with OpenAI's API."""

import json
from dataclasses import asdict
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer

from lean.cli.engine_flags import engine_flags, sampling_flags
from lean.cli.flags import ModelArgument, choose_model, given_file, given_flags, given_options
from lean.cli.server_flags import bound_flags, server_flags
from lean.cli.terminal import stderr
from lean.config import DEFAULT_CHAT_MAX_TOKENS
from lean.errors import ConfigError, UserError
from lean.server.config import SERVER_KEYS, ServerConfig
from lean.units import ENDLESS

if TYPE_CHECKING:
    from lean.llm import LLM
    from lean.options import Options
    from lean.server.service import Service

_PACKAGES = ("fastapi", "uvicorn", "prometheus_client")
_OF_REQUESTS = {"n": 1, "logprobs": None, "prompt_logprobs": None}  # and the values that say nothing


@engine_flags
@sampling_flags
@bound_flags
@server_flags
def serve(
    context: typer.Context,
    model: ModelArgument = None,
    no_probe: Annotated[
        bool, typer.Option("--no-probe", help="Skip the one-time check that the KV format suits the model.")
    ] = False,
) -> None:
    """Serve a model over HTTP with OpenAI's API. Sampling options are the defaults of requests."""
    given = {**given_file(context, SERVER_KEYS), **given_flags(context, (*SERVER_KEYS, *_OF_REQUESTS, "max_tokens"))}
    for name, nothing in _OF_REQUESTS.items():
        if given.get(name, nothing) != nothing:
            raise ConfigError(f"{name} is a field of each request: leave it out of the server's options")
    config = ServerConfig.read({key: value for key, value in given.items() if key in SERVER_KEYS})
    options = given_options(context, also=SERVER_KEYS)
    if context.params["print_config"]:
        # The default of max_tokens is not one number, so a file of defaults has none.
        _print_config(options, config, leave_out=() if "max_tokens" in given else ("max_tokens",))
        return
    require_packages()
    chat_max_tokens = options.sampling.max_tokens if "max_tokens" in given else DEFAULT_CHAT_MAX_TOKENS
    _serve(options, config, chat_max_tokens, no_probe)


def require_packages() -> None:
    """Raise UserError where the packages of the server are missing."""
    if any(find_spec(package) is None for package in _PACKAGES):
        raise UserError("lean serve needs packages that are not installed: pip install 'lean-inference[serve]'")


def _print_config(options: "Options", config: ServerConfig, leave_out: tuple[str, ...]) -> None:
    """All options as YAML but keys and those to ``leave_out``."""
    from lean import yaml_file

    values = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(config).items()}
    del values["api_key"]
    print(options.to_yaml(leave_out) + yaml_file.write(values), end="")


def _serve(options: "Options", config: ServerConfig, chat_max_tokens: int, no_probe: bool) -> None:
    """Listen, load the model in the engine's thread, and serve until a signal comes or the engine fails."""
    import asyncio

    from lean.cli.run import load
    from lean.cli.signals import own_signals
    from lean.server.run import listen, run, url_of
    from lean.server.service import Service
    from lean.store.source import resolve

    name = choose_model(options.model)
    source = resolve(name, progress=True, trust_remote_code=options.engine.trust_remote_code)
    names = config.served_model_name or (source.name,)
    socket = listen(config)
    url = url_of(socket, config)
    if not config.is_local and not config.api_key:
        stderr.print("warning: everybody who reaches this machine can use the server: give --api-key")

    async def main() -> "Service":
        service = Service(
            lambda: load(name, source, options, no_probe),
            config,
            names,
            options.sampling,
            chat_max_tokens,
            on_ready=lambda: _announce(service, url),
        )
        loop = asyncio.get_running_loop()
        with own_signals(lambda: loop.call_soon_threadsafe(_stop, service)):
            await run(service, socket)
        return service

    service = asyncio.run(main())
    if service.error is not None:
        raise service.error


def _stop(service: "Service") -> None:
    if service.in_flight:
        stderr.print(
            f"shutting down: {service.in_flight} requests may finish, for {service.config.shutdown_timeout:g} s; "
            "a second signal ends them now"
        )
    service.stop()


def _announce(service: "Service", url: str) -> None:
    """Print the address, how many requests fit, and a command to try."""
    llm = service.engine.llm
    assert llm is not None
    key = ", with a key" if service.config.api_key else ""
    stderr.print(f"serving {', '.join(service.names)} at {url}/v1{key}; {capacity_line(llm)}")
    stderr.print(f"try: {curl_line(service, url)}")


def capacity_line(llm: "LLM") -> str:
    """How many requests fit at which length."""
    size, seqs = llm.size, llm.config.max_num_seqs
    many = f"{seqs} requests run" if seqs > 1 else "one request runs"
    if llm.plan.bounded:
        longest = "any length" if size.max_model_len == ENDLESS else f"up to {size.max_model_len:,} tokens"
        return f"{many} at once, each of {longest}"
    each = min(size.max_model_len, size.num_tokens // seqs)
    whole = min(seqs, size.num_tokens // size.max_model_len)
    line = f"{many} at once where each has at most {each:,} tokens"
    return line if each == size.max_model_len else f"{line}, or {whole} of {size.max_model_len:,}"


def curl_line(service: "Service", url: str) -> str:
    """A command that asks the server something."""
    key = ' -H "Authorization: Bearer $LEAN_API_KEY"' if service.config.api_key else ""
    path: str = "completions"
    body: dict[str, object] = {"prompt": "The sky is blue because"}
    if service.preparer.has_template:
        path = "chat/completions"
        body = {"messages": [{"role": "user", "content": "Why is the sky blue?"}]}
    return f"curl {url}/v1/{path}{key} -d '{json.dumps(body)}'"
