"""The chat template of a tokenizer, and what it writes."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lean.errors import RequestError, one_line
from lean.text.template_process import RENDERER, TemplateError

__all__ = ["ChatTemplate", "TemplateError", "TemplateRefusal", "has_template", "prepare", "template_of"]


class TemplateRefusal(RequestError):
    """The template raised an error for a conversation."""


Content = str | list[dict[str, str]]


class ChatTemplate(NamedTuple):
    """A template and the special tokens that it finds as variables, such as bos_token. Equal ones write the same."""

    model: str  # its name, for errors; empty if unknown
    text: str
    special_tokens: tuple[tuple[str, str], ...]

    @property
    def title(self) -> str:
        """How errors name it."""
        return f"the chat template of {one_line(self.model, 80)}" if self.model else "the chat template"

    def render(self, messages: Sequence[Mapping[str, Content]], generation_prompt: bool = True) -> str:
        """The text of a conversation, rendered within limits of time, memory and length.

        Args:
            messages: role and content of each; a content is text, or a list of parts.
            generation_prompt: let the next answer begin.

        Raises:
            TemplateError: the template raised an error.
            RequestError: a limit is exceeded, or the text is not UTF-8; see `Renderer.render`.
        """
        variables = {
            **dict(self.special_tokens),
            "messages": messages,
            "tools": None,
            "documents": None,
            "add_generation_prompt": generation_prompt,
        }
        text = RENDERER.render(self.title, self.text, variables, sum(_length(one["content"]) for one in messages))
        if not is_utf8(text):
            raise RequestError(f"{self.title} writes text that is not valid UTF-8")
        return text

    def refusal(self, error: TemplateError) -> TemplateRefusal:
        """What to raise for a conversation for which the template raised an error."""
        return TemplateRefusal(f"{self.title} cannot render this conversation: {one_line(error)}; try --no-chat")


def has_template(tokenizer: Any) -> bool:
    """Whether the tokenizer has a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def template_of(tokenizer: Any) -> ChatTemplate:
    """The tokenizer's template; of several named ones the one called default.

    Raises:
        RequestError: there is none, none is called default, or it is not text.
    """
    found = getattr(tokenizer, "chat_template", None)
    model = str(getattr(tokenizer, "name_or_path", None) or "")
    if not found:
        raise RequestError("the model has no chat template: use --no-chat to complete the text as it is")
    if isinstance(found, Mapping):
        if "default" not in found:
            names = one_line(", ".join(sorted(map(str, found))), 80)
            raise RequestError(
                f"{ChatTemplate(model, '', ()).title} has no default among its variants ({names}): use --no-chat"
            )
        found = found["default"]
    special = tuple((name, str(token)) for name, token in tokenizer.special_tokens_map.items())
    template = ChatTemplate(model, found, special)
    if not isinstance(found, str):
        raise RequestError(f"{template.title} must be text, not {type(found).__name__}: use --no-chat")
    return template


def prepare() -> None:
    """Start the process that renders templates while other things load. Without it, the first rendering does."""
    try:
        RENDERER.start()
    except RequestError:
        return  # the first rendering will say why


def is_utf8(text: str) -> bool:
    """Whether the text can be encoded: it has no lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _length(content: Content) -> int:
    return len(content) if isinstance(content, str) else sum(len(part["text"]) for part in content)
