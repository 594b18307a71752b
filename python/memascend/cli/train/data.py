"""Tokenizes training data, and forms batches from seed and epoch alone."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import mmap
import re
import tempfile
import time
from array import array
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from memascend.cli.train import rows as shapes
from memascend.cli.train.rows import CONTINUED
from memascend.errors import ConfigError
from memascend.text import Closing, counted

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from memascend.cli.train.rows import Row


# Calls in templates that insert the date; their formats are literals.
_TIME = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
_MARKED = re.compile(r"\{%-?\s*generation\b")
# Of Unicode's private use area: neither texts nor templates have them.
_WORDS = tuple(chr(first) + chr(first + 1) for first in range(0xE000, 0xE010, 2))
# A text, and the spans of it that the assistant wrote.
Rendered = tuple[str, list[tuple[int, int]]]


class Chat:
    """A tokenizer's chat template."""

    def __init__(self, tokenizer: Any, began: dt.datetime) -> None:
        """Prepare the template; `began` is the time that it inserts, so that a resumed run gets the same texts.

        Raises:
            ConfigError: the tokenizer has no template.
        """
        self._tokenizer = tokenizer
        try:
            template: str = tokenizer.get_chat_template()
        except ValueError as error:
            raise ConfigError(
                "conversations need a tokenizer with a chat template, and this one has none: use the tokenizer of a "
                "chat model, or examples of `prompt` and `completion`"
            ) from error
        self._template = _TIME.sub(lambda call: json.dumps(began.strftime(call[2])), template)
        self.marks = _MARKED.search(self._template) is not None
        special = {str(token) for token in tokenizer.all_special_tokens}
        special |= {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        any_of_them = "|".join(re.escape(token) for token in sorted(special, key=len, reverse=True)) or "(?!)"
        # The token that ends a turn is part of the answer; white space before the next turn is not.
        self._turn_ends = re.compile(rf"\s*(?:{any_of_them})")
        self._separated = re.compile(rf"(?:{any_of_them})(\s+)\Z")

    def render(self, messages: list[dict[str, Any]], tools: Any = None) -> Rendered:
        """The conversation as text, with the spans of the assistant.

        Raises:
            ConfigError: the template rejects it, or the assistant's text cannot be found in it.
        """
        messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
        if self.marks:
            return self._marked(messages, tools)
        whole = self._text(messages, tools)
        spans = [
            self._between(whole, messages, index, tools) or self._replaced(whole, messages, index, tools)
            for index, message in enumerate(messages)
            if message["role"] == "assistant"
        ]
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
        """The span between two prefixes of the whole: the turns before the answer, and the turns up to its end."""
        if not index:
            return None
        try:
            before = self._text(messages[:index], tools, asks=True)
            after = self._text(messages[: index + 1], tools)
        except ConfigError:
            # A template may reject a part of a conversation and accept the whole.
            return None
        if not (whole.startswith(after) and after.startswith(before)):
            return None
        separator = self._separated.search(after, len(before))
        return len(before), separator.start(1) if separator else len(after)

    def _replaced(self, whole: str, messages: list[dict[str, Any]], index: int, tools: Any) -> tuple[int, int]:
        """The span that changes if the answer is replaced."""
        message = messages[index]
        word = next(word for word in _WORDS if word[0] not in whole and word[1] not in whole)
        if not message.get("content") or message.get("tool_calls"):
            raise ConfigError(
                f"message {index + 1} calls tools, and the chat template does not mark which text the assistant wrote: "
                "give the tokenizer a template that has {% generation %}"
            )
        other = self._text([*messages[:index], {**message, "content": word}, *messages[index + 1 :]], tools)
        if other.count(word) != 1 or other == whole:
            raise ConfigError(
                f"the chat template writes message {index + 1} {other.count(word)} times, so the assistant's text "
                "cannot be found: give the tokenizer a template that has {% generation %}"
            )
        shorter = min(len(whole), len(other))
        start = next((at for at in range(shorter) if whole[at] != other[at]), shorter)
        same = next((at for at in range(shorter - start) if whole[-1 - at] != other[-1 - at]), shorter - start)
        end = len(whole) - same
        turn_end = self._turn_ends.match(whole, end)
        return start, turn_end.end() if turn_end else end


def _refused(error: Exception) -> ConfigError:
    return ConfigError(f"the chat template rejects these messages: {type(error).__name__}: {error}")


# How often the tokenizer's progress is reported.
_REPORT_SECONDS = 15.0


@dataclass(frozen=True)
class Tokens:
    """A sequence of tokens, and whether each is trained on."""

    ids: list[int]
    learnt: list[bool]


@dataclass
class Encoder:
    """Turns the examples of a data set into tokens, and counts them."""

    tokenizer: Any  # of transformers, with offsets
    max_length: int  # of a sequence, in tokens
    began: dt.datetime  # the time that chat templates insert
    tell: Callable[[str], None] = print  # reports progress
    rows: int = field(default=0, init=False)
    truncated: int = field(default=0, init=False)
    left_out: int = field(default=0, init=False)
    sequences: int = field(default=0, init=False)
    tokens: int = field(default=0, init=False)
    learnt: int = field(default=0, init=False)
    shape: str = field(default="", init=False)
    packs_text: bool = field(default=False, init=False)
    _chat: Chat | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Reject a tokenizer without offsets or without an end-of-sequence token."""
        if not self.tokenizer.is_fast:
            raise ConfigError(
                f"{type(self.tokenizer).__name__} does not report which characters a token stands for: the folder "
                "needs a fast tokenizer (tokenizer.json)"
            )
        if self.tokenizer.eos_token_id is None:
            raise ConfigError(
                "the tokenizer has no end-of-sequence token, which ends each answer: set eos_token in "
                "tokenizer_config.json"
            )

    def run(self, rows: Iterable[Row]) -> Iterator[Tokens]:
        """Encode examples of one shape; texts are packed."""
        rows = iter(rows)
        first = next(rows)
        self.shape, self.packs_text = first.shape.name, first.shape is shapes.TEXT
        every = itertools.chain([first], rows)
        reported = time.monotonic()
        for tokens in (self._packed if self.packs_text else self._each)(every):
            if time.monotonic() - reported > _REPORT_SECONDS:
                reported = time.monotonic()
                self.tell(f"{counted(self.rows, 'example')} read so far")
            self.sequences += 1
            self.tokens += len(tokens.ids)
            # No token predicts the first one.
            self.learnt += sum(tokens.learnt[1:])
            yield tokens
        if not self.learnt:
            raise ConfigError(
                f"none of {counted(self.rows, 'example')} has a token to train on within --max-length "
                f"{self.max_length}: raise it"
            )

    def _each(self, rows: Iterable[Row]) -> Iterator[Tokens]:
        for row in rows:
            self.rows += 1
            try:
                whole = self._row(row)
            except ConfigError as error:
                raise ConfigError(f"{row.place}: {error}") from error
            if not any(whole.learnt[1:]):
                raise ConfigError(f"{row.place}: this example has no token to train on: remove it")
            if len(whole.ids) > self.max_length:
                whole = Tokens(whole.ids[: self.max_length], whole.learnt[: self.max_length])
                self.truncated += 1
                if not any(whole.learnt[1:]):
                    self.left_out += 1
                    continue
            yield whole

    def _packed(self, rows: Iterable[Row]) -> Iterator[Tokens]:
        """Concatenate texts, each with an end-of-sequence token, and cut the result into full sequences."""
        waiting: list[int] = []
        continued = False
        for row in rows:
            text = row.values["text"]
            if not isinstance(text, str):
                raise ConfigError(f"{row.place}: `text` must be a text, not {type(text).__name__}")
            self.rows += not continued
            # The second part of a text gets no special tokens at its beginning.
            waiting += self.tokenizer(text, add_special_tokens=not continued, verbose=False)["input_ids"]
            continued = CONTINUED in row.values
            if not continued and waiting[-1:] != [self.tokenizer.eos_token_id]:
                waiting.append(self.tokenizer.eos_token_id)
            while len(waiting) >= self.max_length:
                full, waiting = waiting[: self.max_length], waiting[self.max_length :]
                yield Tokens(full, [True] * len(full))
        if len(waiting) > 1:
            yield Tokens(waiting, [True] * len(waiting))

    def said(self) -> str:
        """The statistics of the examples in words."""
        text = f"{counted(self.rows, 'example')} of {self.shape}: {counted(self.tokens, 'token')}, "
        text += f"trained on {self.learnt:,} of them"
        if self.packs_text:
            text += f"; packed into {counted(self.sequences, 'sequence')} of up to {self.max_length:,}"
        if self.truncated:
            text += f"; {counted(self.truncated, 'example')} cut at --max-length {self.max_length:,}"
        if self.left_out:
            text += f", {self.left_out:,} of them left out since no token to train on remained"
        return text

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
            raise ConfigError("`prompt` and `completion` must be both texts, or both lists of messages")
        if not completion:
            raise ConfigError("`completion` is empty: remove this example")
        made = self._spans(prompt + completion, [(len(prompt), len(prompt) + len(completion))], special=True)
        end = self.tokenizer.eos_token_id
        if made.ids[-1] == end:
            return Tokens(made.ids, [*made.learnt[:-1], True])
        return Tokens([*made.ids, end], [*made.learnt, True])

    def _messages(self, messages: list[dict[str, Any]], first: int, tools: Any) -> Tokens:
        """A conversation; the assistant's text is trained on from turn `first` on."""
        count = sum(message["role"] == "assistant" for message in messages[first:])
        if not count:
            raise ConfigError("no message has the role 'assistant', whose text is trained on: remove this example")
        if self._chat is None:
            self._chat = Chat(self.tokenizer, self.began)
        text, spans = self._chat.render(messages, tools)
        return self._spans(text, spans[-count:] if first else spans, special=False)

    def _spans(self, text: str, spans: list[tuple[int, int]], *, special: bool) -> Tokens:
        """The tokens of a text; a token is trained on if it has a character of a span."""
        found = self.tokenizer(text, add_special_tokens=special, return_offsets_mapping=True, verbose=False)
        learnt = [any(_is_within(token, span) for span in spans) for token in found["offset_mapping"]]
        return Tokens(found["input_ids"], learnt)


def _is_within(token: tuple[int, int], span: tuple[int, int]) -> bool:
    if token[0] == token[1]:
        # Some tokenizers trim white space: such a token stands before this position.
        return span[0] < token[0] <= span[1]
    return token[0] < span[1] and span[0] < token[1]


_TOKEN_BYTES = 4
# The label of a token without a loss, by torch's default.
_IGNORED = -100


class Sequences(Closing):
    """Sequences of tokens by number. A token that is not trained on is stored inverted, as a negative number."""

    def __init__(self, made: Iterable[Tokens], folder: Path) -> None:
        """Write all sequences to an unlinked file in `folder`."""
        self._starts = array("Q", [0])
        digest = hashlib.sha256()
        self._map: mmap.mmap | None = None
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - lives as long as this
        try:
            for tokens in made:
                packed = array(
                    "i", (one if learnt else ~one for one, learnt in zip(tokens.ids, tokens.learnt, strict=True))
                )
                data = packed.tobytes()
                self._file.write(data)
                digest.update(len(packed).to_bytes(8, "little") + data)
                self._starts.append(self._starts[-1] + len(packed))
            self._file.flush()
            self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_COPY)
        except BaseException:
            self.close()
            raise
        # Covers all tokens, and whether each is trained on.
        self.digest = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The ids and labels of a sequence."""
        assert self._map is not None
        start, end = self._starts[number], self._starts[number + 1]
        stored = torch.frombuffer(self._map, dtype=torch.int32, offset=start * _TOKEN_BYTES, count=end - start).long()
        hidden = stored < 0
        return torch.where(hidden, ~stored, stored), torch.where(hidden, _IGNORED, stored)

    def length(self, number: int) -> int:
        """The number of tokens of a sequence."""
        return self._starts[number + 1] - self._starts[number]

    def close(self) -> None:
        """Delete the file."""
        if self._map is not None:
            self._map.close()
            self._map = None
        self._file.close()


# Sequences with free space that packing considers at once.
_OPEN_MAX = 64


def seed_of(seed: int, what: str, number: int) -> int:
    """A separate seed for each random choice, so that none depends on how many numbers another has drawn."""
    named = f"{seed}/{what}/{number}".encode()
    return int.from_bytes(hashlib.blake2b(named, digest_size=8).digest(), "little") >> 1


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A batch of the model; shorter examples are padded at their ends."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    labels: torch.Tensor
    # The position of each token in its example, which separates examples that share a sequence.
    position_ids: torch.Tensor | None = None

    @classmethod
    def of(cls, rows: list[tuple[torch.Tensor, torch.Tensor]], padding: int) -> Batch:
        """A batch of examples, given as (ids, labels)."""
        length = max(len(ids) for ids, _ in rows)
        made = cls(
            input_ids=torch.full((len(rows), length), padding),
            attention_mask=torch.zeros(len(rows), length, dtype=torch.long),
            labels=torch.full((len(rows), length), _IGNORED),
        )
        for row, (ids, labels) in enumerate(rows):
            made.input_ids[row, : len(ids)] = ids
            made.attention_mask[row, : len(ids)] = 1
            made.labels[row, : len(ids)] = labels
        return made

    @classmethod
    def of_packs(cls, packs: list[list[tuple[torch.Tensor, torch.Tensor]]], padding: int) -> Batch:
        """Several examples in each sequence. Positions restart at 0, so that attention stays within an example."""
        joined = []
        for rows in packs:
            ids, labels = (torch.cat(column) for column in zip(*rows, strict=True))
            starts = torch.tensor([0, *(len(row) for row, _ in rows[:-1])]).cumsum(0)
            # No token predicts the first token of an example.
            labels[starts] = _IGNORED
            joined.append((ids, labels))
        made = cls.of(joined, padding)
        # Each token of padding is an example of its own.
        positions = torch.zeros_like(made.input_ids)
        for number, rows in enumerate(packs):
            own = torch.cat([torch.arange(len(ids)) for ids, _ in rows])
            positions[number, : len(own)] = own
        return replace(made, position_ids=positions)

    @classmethod
    def of_padding(cls, padding: int) -> Batch:
        """The smallest batch with a loss, for a rank that has no examples and must run the same collectives."""
        ids = torch.full((2,), padding)
        return cls.of([(ids, ids)], padding)

    @property
    def tokens(self) -> int:
        """The number of tokens without padding."""
        return int(self.attention_mask.sum())

    @property
    def learnt(self) -> int:
        """The number of trained tokens; no token predicts the first of an example."""
        return int((self.labels[:, 1:] != _IGNORED).sum())


def alone(sequences: Sequences) -> list[list[int]]:
    """One example in each sequence."""
    return [[number] for number in range(len(sequences))]


def packed(sequences: Sequences, length: int, seed: int) -> list[list[int]]:
    """Pack examples into sequences of at most `length` tokens (first fit), in an order that the seed decides."""
    order = torch.randperm(len(sequences), generator=torch.Generator().manual_seed(seed_of(seed, "packing", 0)))
    made: list[list[int]] = []
    waiting: deque[tuple[int, list[int]]] = deque()
    for row in order.tolist():
        own = sequences.length(row)
        for at, (room, pack) in enumerate(waiting):
            if own <= room:
                pack.append(row)
                waiting[at] = room - own, pack
                break
        else:
            made.append([row])
            waiting.append((length - own, made[-1]))
            if len(waiting) > _OPEN_MAX:
                waiting.remove(min(waiting))
    return made


@dataclass(frozen=True, kw_only=True)
class Batches:
    """The batches of each step."""

    sequences: Sequences  # the examples
    packs: list[list[int]]  # the numbers of the examples of each packed sequence
    batch: int  # packed sequences of a batch
    accumulate: int  # batches of a step; the last step of an epoch may have fewer
    epochs: float  # passes over the data, or a fraction of one
    seed: int  # of the order
    padding: int  # the token that fills up shorter examples
    steps_max: int | None = None  # overrides `epochs`
    is_packed: bool = False  # whether several examples may share a sequence

    @property
    def steps_of_epoch(self) -> int:
        """The steps of one epoch."""
        return math.ceil(len(self.packs) / (self.batch * self.accumulate))

    @property
    def steps(self) -> int:
        """The steps of the run."""
        return self.steps_max or max(1, math.ceil(self.epochs * self.steps_of_epoch))

    def of_step(self, step: int) -> list[Batch]:
        """The batches of step number `step`, counted from 0."""
        epoch, place = divmod(step, self.steps_of_epoch)
        order = self.order(epoch)
        together = self.batch * self.accumulate
        return list(self._batches(order[place * together : (place + 1) * together]))

    def in_file_order(self) -> Iterator[Batch]:
        """All batches once, for an evaluation."""
        return self._batches(range(len(self.packs)))

    def order(self, epoch: int) -> list[int]:
        """The order of the packed sequences in an epoch."""
        generator = torch.Generator().manual_seed(seed_of(self.seed, "order", epoch))
        found: list[int] = torch.randperm(len(self.packs), generator=generator).tolist()
        return found

    def _batches(self, numbers: Iterable[int]) -> Iterator[Batch]:
        chosen = list(numbers)
        for start in range(0, len(chosen), self.batch):
            packs = [
                [self.sequences[row] for row in self.packs[number]] for number in chosen[start : start + self.batch]
            ]
            if self.is_packed:
                yield Batch.of_packs(packs, self.padding)
            else:
                yield Batch.of([row for (row,) in packs], self.padding)
