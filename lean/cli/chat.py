"""``lean run`` on a terminal: a chat with the model."""

import contextlib
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lean.cli.signals import Terminated, deferred_interrupt, own_interrupt
from lean.conversation import Conversation
from lean.errors import LeanError, RequestError
from lean.sampling_params import SamplingParams
from lean.store.home import write_result

if TYPE_CHECKING:
    from rich.console import Console

    from lean.llm import LLM

HELP = """\
/reset      forget the conversation
/stats      show tokens, cache memory and speed so far
/save FILE  write the conversation as JSON
/help       show this list
/exit       leave the chat; so does Ctrl-D
\"\"\"         starts and ends a message of several lines
Ctrl-C      stops an answer; at the prompt, twice leaves the chat"""


def talk(llm: "LLM", params: SamplingParams, console: "Console") -> None:
    """Read messages from the terminal and print answers until the user leaves."""
    if not getattr(llm.model.tokenizer, "chat_template", None):
        raise RequestError("the model has no chat template, so it cannot chat: give a PROMPT to complete")
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  line editing and history for input()
    from lean.report import keep_notes, out_of_sight

    keep_notes(llm)

    console.print("chat: type a message, or /help for the list of commands")
    chat = Conversation(llm, params)
    stats = {"turns": 0, "tokens": 0, "seconds": 0.0}
    asked_to_leave = warned = False
    while True:
        try:
            with own_interrupt():
                text = _read_message()
        except EOFError:
            print()
            return
        except Terminated:
            raise
        except KeyboardInterrupt:
            if asked_to_leave:
                raise
            asked_to_leave = True
            print()
            console.print("press Ctrl-C once more to leave, or type /exit")
            continue
        asked_to_leave = False
        if not text.strip():
            continue
        command, _, argument = text.rstrip().partition(" ")  # no command if the message begins with a space
        if command in ("/exit", "/quit", "/bye"):
            return
        if command == "/help":
            console.print(HELP)
        elif command == "/reset":
            chat.reset()
            console.print("conversation forgotten")
        elif command == "/stats":
            console.print(_describe(chat, stats))
        elif command == "/save":
            console.print(_save(chat, argument.strip()))
        elif command.startswith("/") and command.isascii() and command[1:].isalpha():
            console.print(
                f"unknown command {command}; /help lists the commands (to send it as a message, put a space in front)"
            )
        else:
            _print_answer(chat, text, stats, console)
            hidden = out_of_sight(llm, len(chat.token_ids))
            if hidden and not warned:
                console.print(f"note: the conversation is longer than the window: {hidden}")
                warned = True


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
    """Print one answer while it is generated. After an error the chat continues."""
    started, tokens, last = time.perf_counter(), 0, None
    with deferred_interrupt() as stop:
        answer = chat.ask(text)
        try:
            # Ctrl-C takes effect after the running step.
            for last in answer:
                tokens += len(last.token_ids)
                print(last.text, end="", flush=True)
                if stop.wanted:
                    break
        except LeanError as error:
            console.print(f"lean: {error} (/reset starts a new conversation)")
        finally:
            answer.close()
    if last is None:
        return
    print(flush=True)
    if stop.wanted and last.finish_reason is None:
        console.print("stopped")
    elif last.error:
        console.print(f"lean: {last.error}")
    elif last.finish_reason == "length":
        console.print(f"cut off after {tokens} tokens: --max-tokens or --max-model-len is reached")
    stats["turns"] += 1
    stats["tokens"] += tokens
    stats["seconds"] += time.perf_counter() - started


def _describe(chat: Conversation, stats: dict[str, Any]) -> str:
    from lean.units import mib

    use, peak, pace = chat.llm.stats(), chat.llm.peak_use, chat.llm.engine.pace
    speed = f", {stats['tokens'] / stats['seconds']:.1f} tokens/s" if stats["seconds"] else ""
    limit = "" if chat.llm.plan.bounded else f" of {chat.llm.size.max_model_len:,}"
    found = f"{use.prefix.tokens_found:,} of {use.prefix.tokens_asked:,}" if use.prefix else "none"
    read = f", {use.prefix.tokens_read:,} of them from disk" if use.prefix and use.disk else ""
    return (
        f"{stats['turns']} turns, {len(chat.token_ids):,} tokens{limit}, {chat.cached_tokens:,} of them reused in the "
        f"last turn; {stats['tokens']:,} tokens generated{speed}; KV cache held {mib(peak.bytes_held)} at most "
        f"(in bf16, without blocks: {mib(peak.bytes_if_bf16)}); prefix cache holds {mib(use.bytes_cached)} and gave "
        f"{found} prompt tokens{read}" + (f"; {pace.note}" if pace is not None and pace.note else "")
    )


def _save(chat: Conversation, name: str) -> str:
    """Write the messages to a file; returns the line to print."""
    if not name:
        return "/save needs a file name: /save FILE"
    record = {"model": chat.llm.model.info.source.name, "messages": chat.messages}
    try:
        path = Path(name).expanduser()
        text = json.dumps(record, ensure_ascii=False, indent=1) + "\n"
        write_result(path, text.encode("utf-8", errors="replace"))
    except LeanError as error:
        return str(error)
    except RuntimeError as error:  # ~ of a user without a home folder
        return f"cannot write {name}: {error}"
    return f"{len(chat.messages)} messages saved in {path}"
