"""A conversation whose earlier turns stay in the KV cache, and the terminal that talks to it."""

import contextlib
import json
import time
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lean.cli.signals import deferred_interrupt, own_interrupt
from lean.engine.request import RequestOutput
from lean.errors import EMPTY_PROMPT, LeanError, RequestError
from lean.sampling_params import SamplingParams
from lean.text.prompt import encode_chat, encode_next_turn

if TYPE_CHECKING:
    from rich.console import Console

    from lean.llm import LLM

HELP = """\
/reset      forget the conversation
/stats      tokens, cache and speed so far
/save FILE  write the conversation as JSON
/help       this list
/exit       leave; Ctrl-D does too
\"\"\"         begins and ends a message of several lines
Ctrl-C      stops an answer; twice leaves"""


class Conversation:
    """Messages, and their token ids as the model saw and wrote them.

    Tokens of earlier turns are never rendered, tokenized or computed again: a turn appends to them. (Where the engine
    needed the memory of the cache meanwhile, they are computed again, unseen.)
    """

    def __init__(self, llm: "LLM", params: SamplingParams) -> None:
        if params.n != 1:
            raise RequestError(f"n {params.n}: a chat goes on with one answer")
        self.llm = llm
        self.params = params
        self.messages: list[dict[str, str]] = []
        self.token_ids: list[int] = []
        self.cached_tokens = 0  # of the last turn: tokens that were not computed again
        self._request: int | None = None  # whose K/V are kept

    def ask(self, text: str) -> Generator[RequestOutput, None, None]:
        """Stream the answer to a message. Leaving the loop stops it there, and what was said so far counts.

        Raises RequestError for a message that cannot be taken; the conversation is then as it was.
        """
        if not text:
            raise RequestError(EMPTY_PROMPT)
        tokenizer = self.llm.model.tokenizer
        messages = [*self.messages, {"role": "user", "content": text}]
        if self.messages:
            ids = self.token_ids + encode_next_turn(tokenizer, messages, self.token_ids)
        else:
            ids = encode_chat(tokenizer, messages)
        answer, new = "", []
        stream = self.llm.stream(ids, self.params, keep_cache=True, continues=self._request)
        begun = False
        try:
            for output in stream:
                if not begun:
                    self.cached_tokens = output.cached_tokens
                    begun = True
                answer += output.text
                new += output.token_ids
                self._request = output.request_id
                yield output
        finally:
            stream.close()
            if begun:
                self.messages = [*messages, {"role": "assistant", "content": answer}]
                self.token_ids = ids + new

    def reset(self) -> None:
        """Forget everything, and free its cache."""
        if self._request is not None:
            self.llm.release(self._request)
        self.messages, self.token_ids, self.cached_tokens, self._request = [], [], 0, None


def talk(llm: "LLM", params: SamplingParams, console: "Console") -> None:
    """Read messages from the terminal and print answers until the user leaves."""
    if not getattr(llm.model.tokenizer, "chat_template", None):
        raise RequestError("the model has no chat template: give a PROMPT to complete")
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  line editing and history for input()
    from lean.report import out_of_sight

    console.print("chat: /help lists the commands")
    chat = Conversation(llm, params)
    stats = {"turns": 0, "tokens": 0, "seconds": 0.0}
    asked_to_leave = said = False
    while True:
        try:
            with own_interrupt():
                text = _read_message()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            if asked_to_leave:
                raise
            asked_to_leave = True
            print()
            console.print("Ctrl-C once more, or /exit, leaves")
            continue
        asked_to_leave = False
        if not text.strip():
            continue
        command, _, argument = text.rstrip().partition(" ")  # nothing, where a message begins with a space
        if command in ("/exit", "/quit", "/bye"):
            return
        if command == "/help":
            console.print(HELP)
        elif command == "/reset":
            chat.reset()
            console.print("the conversation is forgotten")
        elif command == "/stats":
            console.print(_describe(chat, stats))
        elif command == "/save":
            console.print(_save(chat, argument.strip()))
        elif command.startswith("/") and command.isascii() and command[1:].isalpha():
            console.print(f"unknown command {command}; /help lists them (begin a message with a space to send it)")
        else:
            _print_answer(chat, text, stats, console)
            hidden = out_of_sight(llm, len(chat.token_ids))
            if hidden and not said:
                console.print(f"the conversation outgrows the window and goes on: {hidden}")
                said = True


def _read_message() -> str:
    text = input("> ")
    if not text.startswith('"""'):
        return text
    lines = [text[3:]]
    while not lines[-1].rstrip().endswith('"""'):
        lines.append(input(". "))
    lines[-1] = lines[-1].rstrip()[:-3]
    return "\n".join(lines).strip("\n")


def _print_answer(chat: Conversation, text: str, stats: dict[str, Any], console: "Console") -> None:
    """Print one answer as it comes. An error leaves the chat going."""
    started, tokens, last = time.perf_counter(), 0, None
    with deferred_interrupt() as stop:
        answer = chat.ask(text)
        try:
            # Ctrl-C is heeded after the step that is running.
            for last in answer:
                tokens += len(last.token_ids)
                print(last.text, end="", flush=True)
                if stop.is_set():
                    break
        except LeanError as error:
            console.print(f"lean: {error} (or /reset)")
        finally:
            answer.close()
    if last is None:
        return
    print(flush=True)
    if stop.is_set() and last.finish_reason is None:
        console.print("stopped")
    elif last.error:
        console.print(f"lean: {last.error}")
    elif last.finish_reason == "length":
        console.print(f"cut off after {tokens} tokens: --max-tokens or the model's length")
    stats["turns"] += 1
    stats["tokens"] += tokens
    stats["seconds"] += time.perf_counter() - started


def _describe(chat: Conversation, stats: dict[str, Any]) -> str:
    from lean.units import mib

    use = chat.llm.stats()
    speed = f", {stats['tokens'] / stats['seconds']:.1f} tokens/s" if stats["seconds"] else ""
    limit = "" if chat.llm.plan.bounded else f" of {chat.llm.size.max_model_len:,}"
    return (
        f"{stats['turns']} turns, {len(chat.token_ids):,} tokens{limit}; last turn reused "
        f"{chat.cached_tokens:,}; {stats['tokens']:,} generated{speed}; KV {mib(use.bytes_held)} held "
        f"(bf16 without blocks: {mib(use.bytes_if_bf16)})"
    )


def _save(chat: Conversation, name: str) -> str:
    """Write the messages; returns what to say."""
    if not name:
        return "/save needs a file name"
    record = {"model": chat.llm.model.info.source.name, "messages": chat.messages}
    try:
        path = Path(name).expanduser()
        path.write_text(json.dumps(record, ensure_ascii=False, indent=1) + "\n", encoding="utf-8", errors="replace")
    except (OSError, ValueError, RuntimeError) as error:
        return f"cannot write {name}: {error}"
    return f"{len(chat.messages)} messages saved in {path}"
