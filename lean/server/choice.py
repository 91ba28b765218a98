"""One sequence of an answer: what came of it so far, and the pieces to send."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from lean.server.shapes import chat_logprobs, completion_logprobs, prompt_logprobs

if TYPE_CHECKING:
    from lean.engine.logprobs import TokenLogprob
    from lean.engine.request import RequestOutput
    from lean.server.prepare import Prepared
    from lean.text.vocabulary import Vocabulary


class Piece(NamedTuple):
    """New text of a choice, the log-probabilities of its tokens in the API's shape, and the end of the choice."""

    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str | None


class Choice:
    """Choice number ``index`` of an answer: sequence ``index % n`` of prompt ``index // n``.

    Attributes:
        completion_tokens, cached_tokens: counted so far. finish_reason: once it has ended.
    """

    def __init__(self, index: int, prepared: Prepared, vocabulary: Vocabulary) -> None:
        self.index = index
        self._prepared, self._vocabulary = prepared, vocabulary
        self._prompt = index // prepared.params.n
        self.text = ""
        self.finish_reason: str | None = None
        self.completion_tokens = self.cached_tokens = 0
        self._token_ids: list[int] = []
        self._entries: list[TokenLogprob] = []
        self._prompt_entries: list[TokenLogprob | None] | None = None
        self._begun = False

    def add(self, output: RequestOutput) -> Piece:
        """Take an output; what it adds to the answer."""
        first, self._begun = not self._begun, True
        prepared = self._prepared
        if output.finish_reason is not None:
            self.finish_reason = output.finish_reason
        self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
        self._prompt_entries = output.prompt_logprobs if first else self._prompt_entries
        token_ids, entries, text = output.token_ids, output.logprobs or [], output.text
        if prepared.no_answer:
            token_ids, entries, text = [], [], ""
        self.completion_tokens += len(token_ids)
        echoed = prepared.texts[self._prompt] if first and prepared.echo else ""
        logprobs = None
        if prepared.stream:
            logprobs = self._logprobs(token_ids, entries, first, len(self.text), len(echoed))
        self._token_ids += token_ids
        self._entries += entries
        self.text += echoed + text
        return Piece(echoed + text, logprobs, output.finish_reason)

    def whole(self) -> dict[str, Any]:
        """The choice of an answer that is not a stream."""
        prepared = self._prepared
        logprobs = self._logprobs(self._token_ids, self._entries, True, 0, len(self._echoed()))
        choice: dict[str, Any] = {"index": self.index}
        if prepared.chat:
            choice["message"] = {"role": "assistant", "content": self.text, "refusal": None}
        else:
            choice["text"] = self.text
        choice |= {"logprobs": logprobs, "finish_reason": self.finish_reason}
        return choice if prepared.chat else {**choice, **self.prompt_logprobs()}

    def prompt_logprobs(self) -> dict[str, Any]:
        """vLLM's field of that name, of each choice of a completion and of a whole chat. Its clients read it always:
        it is null where it is not asked for."""
        most, entries = self._prepared.prompt_report, self._prompt_entries or []
        return {"prompt_logprobs": None if most is None else prompt_logprobs(entries, most, self._vocabulary)}

    def _echoed(self) -> str:
        return self._prepared.texts[self._prompt] if self._prepared.echo else ""

    def _logprobs(
        self, token_ids: list[int], entries: list[TokenLogprob], first: bool, start: int, echoed: int
    ) -> dict[str, Any] | None:
        """Log-probabilities of new tokens, and before them of an echoed prompt's if they are the ``first``.

        ``start``: characters before the new ones, of which ``echoed`` are the prompt's.
        """
        prepared, top = self._prepared, self._prepared.params.logprobs
        if top is None:
            return None
        if prepared.chat:
            return chat_logprobs(entries, self._vocabulary)
        report = completion_logprobs(token_ids, entries, top, self._vocabulary, start + echoed)
        if first and prepared.echo:
            ids = prepared.prompts[self._prompt]
            of_prompt = completion_logprobs(ids, self._prompt_entries or [], top, self._vocabulary)
            report = {key: of_prompt[key] + report[key] for key in report}
        return report
