"""A conversation that goes on token by token, so that each turn begins with what the prefix cache has of it."""

from collections.abc import Generator
from typing import TYPE_CHECKING

from lean.engine.request import RequestOutput
from lean.errors import EMPTY_PROMPT, RequestError
from lean.sampling_params import SamplingParams
from lean.text.prompt import encode_chat, encode_next_turn

if TYPE_CHECKING:
    from lean.llm import LLM


class Conversation:
    """Messages, and their token ids as the model read and generated them.

    A turn appends tokens; tokens of earlier turns are not rendered or tokenized again. So the prefix cache finds their
    full blocks, unless the engine needed the memory for other requests meanwhile.
    """

    def __init__(self, llm: "LLM", params: SamplingParams) -> None:
        if params.n != 1:
            raise RequestError(f"n {params.n}: a chat continues with one answer, leave n at 1")
        self.llm = llm
        self.params = params
        self.messages: list[dict[str, str]] = []
        self.token_ids: list[int] = []
        self.cached_tokens = 0  # tokens of the last turn's prompt that were found in the prefix cache

    def ask(self, text: str) -> Generator[RequestOutput, None, None]:
        """Stream the answer to a message. Leaving the loop stops the answer; the text so far stays in the conversation.

        Raises RequestError for a message that cannot be served; the conversation is then unchanged.
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
        stream = self.llm.stream(ids, self.params)
        begun = False
        try:
            for output in stream:
                if not begun:
                    self.cached_tokens = output.cached_tokens
                    begun = True
                answer += output.text
                new += output.token_ids
                yield output
        finally:
            stream.close()
            if begun:
                self.messages = [*messages, {"role": "assistant", "content": answer}]
                self.token_ids = ids + new

    def reset(self) -> None:
        """Forget the conversation."""
        self.messages, self.token_ids, self.cached_tokens = [], [], 0
