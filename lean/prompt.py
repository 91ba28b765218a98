"""Prompt text to token ids."""

import logging
from typing import Any

from lean.errors import EMPTY_PROMPT, RequestError, one_line

log = logging.getLogger("lean")


def encode_prompt(tokenizer: Any, prompt: str, chat: bool | None = None) -> list[int]:
    """Token ids of a prompt.

    Args:
        chat: put the text into the model's chat template; None does where there is one.

    Raises:
        RequestError: an empty prompt, text that is no UTF-8, a chat without a template, or a template that fails.
    """
    if not prompt:
        raise RequestError(EMPTY_PROMPT)
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError:
        raise RequestError("the prompt is not valid text: it holds bytes that are no UTF-8") from None
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if chat and not has_template:
        raise RequestError("the model has no chat template: use --no-chat to complete the text as it is")
    if has_template and chat is not False:
        turns = [{"role": "user", "content": prompt}]
        try:
            text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # whatever the model's own template raises
            raise RequestError(f"the chat template cannot render this: {one_line(error)}; try --no-chat") from None
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])  # the template writes its own BOS
    ids = list(tokenizer(prompt)["input_ids"])
    if tokenizer.bos_token_id is not None and ids[:2] == [tokenizer.bos_token_id] * 2:
        log.warning("the prompt begins with %s and the tokenizer adds another one", tokenizer.bos_token)
    return ids
