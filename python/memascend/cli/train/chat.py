"""Renders conversations by a tokenizer's chat template, and finds which characters the assistant wrote.

Three ways, the first that holds:

1. The template marks them itself, with `{% generation %}`.
2. What it makes of the turns before an answer, and of the turns up to its end, are beginnings of what it makes of all
   turns. Then the answer is what lies between.
3. Many templates write an answer otherwise once it is not the last (they leave its reasoning out, say), so that 2 does
   not hold. Then the answer is replaced by a word that stands nowhere else: what differs is the answer.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from memascend.errors import ConfigError

if TYPE_CHECKING:
    import datetime as dt

# Templates that say which day it is; formats are always written out.
_TIME = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
_MARKED = re.compile(r"\{%-?\s*generation\b")
# For private use: no text has them, and no template looks for them.
_WORDS = tuple(chr(first) + chr(first + 1) for first in range(0xE000, 0xE010, 2))
# The text, and from where to where the assistant wrote.
Rendered = tuple[str, list[tuple[int, int]]]


class Chat:
    """A tokenizer's chat template."""

    def __init__(self, tokenizer: Any, began: dt.datetime) -> None:
        """`began`: the time that templates are told, so that a run that goes on later makes the same of its data.

        Raises:
            ConfigError: the tokenizer has no template.
        """
        self._tokenizer = tokenizer
        try:
            template: str = tokenizer.get_chat_template()
        except ValueError as error:
            raise ConfigError(
                "rows of `messages` need a tokenizer with a chat template, and this has none: take the tokenizer of a "
                "model that chats, or rows of `prompt` and `completion`"
            ) from error
        self._template = _TIME.sub(lambda call: json.dumps(began.strftime(call[2])), template)
        self.marks = _MARKED.search(self._template) is not None
        special = {str(token) for token in tokenizer.all_special_tokens}
        special |= {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        any_of_them = "|".join(re.escape(token) for token in sorted(special, key=len, reverse=True)) or "(?!)"
        # What ends a turn is part of the answer; what only separates it from the next turn is not.
        self._turn_ends = re.compile(rf"\s*(?:{any_of_them})")
        self._separated = re.compile(rf"(?:{any_of_them})(\s+)\Z")

    def render(self, messages: list[dict[str, Any]], tools: Any = None) -> Rendered:
        """The whole conversation as text.

        Raises:
            ConfigError: the template refuses it, or it cannot be said what of it the assistant wrote.
        """
        messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
        if self.marks:
            return self._marked(messages, tools)
        whole = self._text(messages, tools)
        spans = []
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                spans.append(
                    self._between(whole, messages, index, tools) or self._replaced(whole, messages, index, tools)
                )
        return whole, spans

    def _marked(self, messages: list[dict[str, Any]], tools: Any) -> Rendered:
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            render: Any = render_jinja_template
            texts, places = render(
                conversations=[messages],
                tools=tools,
                chat_template=self._template,
                return_assistant_tokens_mask=True,
                **self._tokenizer.special_tokens_map,
            )
        except Exception as error:
            raise _refused(error) from error
        return texts[0], [(start, end) for start, end in places[0]]

    def _text(self, messages: list[dict[str, Any]], tools: Any, *, asks: bool = False) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, tools=tools, chat_template=self._template, tokenize=False, add_generation_prompt=asks
            )
        except Exception as error:
            raise _refused(error) from error
        return text

    def _between(self, whole: str, messages: list[dict[str, Any]], index: int, tools: Any) -> tuple[int, int] | None:
        """From the end of what comes before the answer to the end of the answer, where both begin the whole."""
        if not index:
            return None
        try:
            before = self._text(messages[:index], tools, asks=True)
            after = self._text(messages[: index + 1], tools)
        except ConfigError:
            # A template may refuse a part of a conversation, and yet take all of it.
            return None
        if not (whole.startswith(after) and after.startswith(before)):
            return None
        separator = self._separated.search(after, len(before))
        return len(before), separator.start(1) if separator else len(after)

    def _replaced(self, whole: str, messages: list[dict[str, Any]], index: int, tools: Any) -> tuple[int, int]:
        """What of the whole changes with the answer."""
        message = messages[index]
        word = next(word for word in _WORDS if word[0] not in whole and word[1] not in whole)
        if not message.get("content") or message.get("tool_calls"):
            raise ConfigError(
                f"message {index + 1} calls tools, and the chat template does not say which of its text the assistant "
                "wrote: give the tokenizer a template that has {% generation %}"
            )
        other = self._text([*messages[:index], {**message, "content": word}, *messages[index + 1 :]], tools)
        if other.count(word) != 1 or other == whole:
            raise ConfigError(
                f"the chat template writes message {index + 1} {other.count(word)} times, so that it cannot be said "
                "which of its text the assistant wrote: give the tokenizer a template that has {% generation %}"
            )
        shorter = min(len(whole), len(other))
        start = next((at for at in range(shorter) if whole[at] != other[at]), shorter)
        same = next((at for at in range(shorter - start) if whole[-1 - at] != other[-1 - at]), shorter - start)
        end = len(whole) - same
        turn_end = self._turn_ends.match(whole, end)
        return start, turn_end.end() if turn_end else end


def _refused(error: Exception) -> ConfigError:
    return ConfigError(f"the chat template refuses these messages: {type(error).__name__}: {error}")
