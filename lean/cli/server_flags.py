"""The flags of the server: one per field of ServerConfig."""

from typing import Annotated

import typer

from lean.cli.flags import flag_group, option
from lean.server.config import ServerConfig

_DEFAULT = ServerConfig()


@flag_group("Server")
def server_flags(
    host: Annotated[
        str, typer.Option(help="Address to listen on. 0.0.0.0: all of this machine's, so that others can connect.")
    ] = _DEFAULT.host,
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = _DEFAULT.port,
    api_key: Annotated[
        list[str] | None,
        option(
            "Key that requests must carry (Authorization: Bearer KEY). Can be given several times. Other users of this "
            "machine can read command lines: the variable LEAN_API_KEY or the file of --config is safer.",
            "none, everybody may use the server",
            envvar="LEAN_API_KEY",
            show_envvar=False,
            metavar="KEY",
        ),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        option("Name of the model in the API. Can be given several times.", "the model's own name", metavar="NAME"),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        option(
            "Name that clients may use for this machine, beside IP addresses and localhost; * allows every name. Can "
            "be given several times.",
            metavar="NAME",
        ),
    ] = None,
    ssl_certfile: Annotated[
        str | None, option("Certificate for HTTPS, with its chain.", "none, plain HTTP", metavar="PEM")
    ] = None,
    ssl_keyfile: Annotated[str | None, option("Private key of the certificate.", metavar="PEM")] = None,
    shutdown_timeout: Annotated[
        float, typer.Option(help="Seconds that running requests get to finish after SIGTERM or Ctrl-C.")
    ] = _DEFAULT.shutdown_timeout,
) -> None:
    """A signature only: fields of ServerConfig."""


@flag_group("Bounds of a request")
def bound_flags(
    read_timeout: Annotated[
        float, typer.Option(help="Seconds that a client has to send the head of a request, and then its body.")
    ] = _DEFAULT.read_timeout,
    write_timeout: Annotated[
        float, typer.Option(help="Seconds after which a client that reads nothing is disconnected.")
    ] = _DEFAULT.write_timeout,
    max_body_size: Annotated[str, option("Largest body of a request.", "4MiB", metavar="SIZE")] = "4MiB",
    max_header_size: Annotated[str, option("Largest head of a request.", "32KiB", metavar="SIZE")] = "32KiB",
    max_waiting: Annotated[
        int,
        typer.Option(help="Most requests that wait while --max-num-seqs others run; more are refused with status 429."),
    ] = _DEFAULT.max_waiting,
    max_n: Annotated[int, typer.Option(help="Most answers to one prompt (n).")] = _DEFAULT.max_n,
    max_prompts: Annotated[int, typer.Option(help="Most prompts of one completions request.")] = _DEFAULT.max_prompts,
    max_logprobs: Annotated[
        int, typer.Option(help="Most likely tokens that can be reported for each token (logprobs, top_logprobs).")
    ] = _DEFAULT.max_logprobs,
    max_stop_strings: Annotated[
        int, typer.Option(help="Most stop strings of a request; also most stop_token_ids.")
    ] = _DEFAULT.max_stop_strings,
    max_stop_length: Annotated[int, typer.Option(help="Most characters of a stop string.")] = _DEFAULT.max_stop_length,
    max_logit_bias: Annotated[int, typer.Option(help="Most entries of logit_bias.")] = _DEFAULT.max_logit_bias,
    max_messages: Annotated[int, typer.Option(help="Most messages of a conversation.")] = _DEFAULT.max_messages,
) -> None:
    """A signature only: fields of ServerConfig."""
