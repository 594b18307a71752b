"""Turns rows into tokens, and says which of them are learnt."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from memascend.cli.train import shapes
from memascend.cli.train.chat import Chat
from memascend.cli.train.rows import GOES_ON
from memascend.errors import ConfigError
from memascend.formatting import counted

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Callable, Iterable, Iterator

    from memascend.cli.train.rows import Row

# Long work tells so often how far it is.
_TOLD_SECONDS = 15.0


@dataclass(frozen=True)
class Tokens:
    """A sequence of tokens; a loss is taken on those that are learnt."""

    ids: list[int]
    learnt: list[bool]


@dataclass
class Counts:
    """What became of the rows."""

    rows: int = 0
    truncated: int = 0
    left_out: int = 0
    sequences: int = 0
    tokens: int = 0
    learnt: int = 0
    shape: str = ""
    packs_text: bool = False

    def said(self, max_length: int) -> str:
        """In words."""
        text = f"{counted(self.rows, 'row')} of {self.shape}: {counted(self.tokens, 'token')}, "
        text += f"a loss on {self.learnt:,} of them"
        if self.packs_text:
            text += f"; packed into {counted(self.sequences, 'sequence')} of up to {max_length:,}"
        if self.truncated:
            cut = "row is longer" if self.truncated == 1 else "rows are longer"
            text += f"; {self.truncated:,} {cut} than --max-length {max_length:,}, and cut there"
        if self.left_out:
            text += f"; {self.left_out:,} of them lost all that was to be learnt, and left out"
        return text


@dataclass
class Encoder:
    """A tokenizer, and how long sequences may be."""

    tokenizer: Any  # of transformers, with offsets
    max_length: int  # tokens of a sequence, at most
    began: dt.datetime  # the time that chat templates are told
    tell: Callable[[str], None] = print  # what is told of long work
    _chat: Chat | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Refuse a tokenizer that cannot say where its tokens stand."""
        if not self.tokenizer.is_fast:
            raise ConfigError(
                f"{type(self.tokenizer).__name__} does not say which characters a token stands for; the folder needs a "
                "tokenizer.json"
            )
        if self.tokenizer.eos_token_id is None:
            raise ConfigError("the tokenizer has no end-of-sequence token, which ends what is learnt: set eos_token")

    def run(self, rows: Iterable[Row], counts: Counts) -> Iterator[Tokens]:
        """Encode rows of one kind; texts are packed."""
        rows = iter(rows)
        first = next(rows)
        counts.shape, counts.packs_text = first.shape.name, first.shape is shapes.TEXT
        every = itertools.chain([first], rows)
        made = self._packed(every, counts) if counts.packs_text else self._each(every, counts)
        told = time.monotonic()
        for tokens in made:
            if time.monotonic() - told > _TOLD_SECONDS:
                told = time.monotonic()
                self.tell(f"{counted(counts.rows, 'row')} of the data are read")
            counts.sequences += 1
            counts.tokens += len(tokens.ids)
            # Nothing foretells the first one.
            counts.learnt += sum(tokens.learnt[1:])
            yield tokens
        if not counts.learnt:
            raise ConfigError(
                f"nothing is left to be learnt of {counted(counts.rows, 'row')}: --max-length {self.max_length} is too "
                "short for what comes before it"
            )

    def _each(self, rows: Iterable[Row], counts: Counts) -> Iterator[Tokens]:
        for row in rows:
            counts.rows += 1
            try:
                whole = self._row(row)
            except ConfigError as error:
                raise ConfigError(f"{row.place}: {error}") from error
            if not any(whole.learnt[1:]):
                raise ConfigError(f"{row.place}: nothing in it is to be learnt")
            if len(whole.ids) > self.max_length:
                counts.truncated += 1
                whole = Tokens(whole.ids[: self.max_length], whole.learnt[: self.max_length])
                if not any(whole.learnt[1:]):
                    counts.left_out += 1
                    continue
            yield whole

    def _packed(self, rows: Iterable[Row], counts: Counts) -> Iterator[Tokens]:
        """Texts one after another, each with an end, cut where a sequence is full."""
        waiting: list[int] = []
        goes_on = False
        for row in rows:
            text = row.values["text"]
            if not isinstance(text, str):
                raise ConfigError(f"{row.place}: `text` is a text, not {type(text).__name__}")
            counts.rows += not goes_on
            # A piece of a text has no beginning of its own.
            waiting += self._ids(text, special=not goes_on)
            goes_on = bool(row.values.get(GOES_ON))
            if not goes_on and waiting[-1:] != [self.tokenizer.eos_token_id]:
                waiting.append(self.tokenizer.eos_token_id)
            while len(waiting) >= self.max_length:
                full, waiting = waiting[: self.max_length], waiting[self.max_length :]
                yield Tokens(full, [True] * len(full))
        if len(waiting) > 1:
            yield Tokens(waiting, [True] * len(waiting))

    def _ids(self, text: str, *, special: bool) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        return ids

    def _row(self, row: Row) -> Tokens:
        values = row.values
        if row.shape is shapes.INSTRUCTED and not self.tokenizer.chat_template:
            return self._completion(shapes.instructed_text(values))
        if row.shape is shapes.COMPLETED and not isinstance(values["prompt"], list):
            return self._completion(values)
        return self._messages(*shapes.turns(row.shape, values), values.get("tools"))

    def _completion(self, values: dict[str, Any]) -> Tokens:
        prompt, completion = values["prompt"], values["completion"]
        if not isinstance(prompt, str) or not isinstance(completion, str):
            raise ConfigError("`prompt` and `completion` are both texts, or both lists of turns")
        if not completion:
            raise ConfigError("`completion` is empty")
        made = self._spans(prompt + completion, [(len(prompt), len(prompt) + len(completion))], special=True)
        end = self.tokenizer.eos_token_id
        if made.ids[-1] == end:
            return Tokens(made.ids, [*made.learnt[:-1], True])
        return Tokens([*made.ids, end], [*made.learnt, True])

    def _messages(self, messages: list[dict[str, Any]], first: int, tools: Any) -> Tokens:
        """A conversation; the assistant's words are learnt from a turn on."""
        count = sum(message["role"] == "assistant" for message in messages[first:])
        if not count:
            raise ConfigError("no message has the role 'assistant', whose words are learnt")
        if self._chat is None:
            self._chat = Chat(self.tokenizer, self.began)
        text, spans = self._chat.render(messages, tools)
        return self._spans(text, spans[-count:] if first else spans, special=False)

    def _spans(self, text: str, spans: list[tuple[int, int]], *, special: bool) -> Tokens:
        """Tokens of a text; learnt is each that has a character of a span."""
        found = self.tokenizer(text, add_special_tokens=special, return_offsets_mapping=True, verbose=False)
        learnt = [any(_is_within(token, span) for span in spans) for token in found["offset_mapping"]]
        return Tokens(found["input_ids"], learnt)


def _is_within(token: tuple[int, int], span: tuple[int, int]) -> bool:
    if token[0] == token[1]:
        # A token of white space alone, which some tokenizers trim: it stands before this place.
        return span[0] < token[0] <= span[1]
    return token[0] < span[1] and span[0] < token[1]
