"""Turns rows of training data into tokens, and puts these into batches by seed and epoch alone."""

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
from memascend.cli.train.rows import GOES_ON
from memascend.errors import ConfigError
from memascend.text import Closing, counted

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from memascend.cli.train.rows import Row


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
                "conversations need a tokenizer with a chat template, and this one has none: use the tokenizer of a "
                "chat model, or examples of `prompt` and `completion`"
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

    def begin(self, shape: shapes.Shape) -> None:
        """All rows have this shape."""
        self.shape, self.packs_text = shape.name, shape is shapes.TEXT

    def read(self, rows: int = 1) -> None:
        """So many more were read."""
        self.rows += rows

    def cut(self, *, left_out: bool) -> None:
        """One was cut, or had nothing left to learn."""
        self.truncated += 1
        self.left_out += left_out

    def take(self, tokens: Tokens) -> None:
        """One more sequence is trained on."""
        self.sequences += 1
        self.tokens += len(tokens.ids)
        # Nothing foretells the first one.
        self.learnt += sum(tokens.learnt[1:])

    def said(self, max_length: int) -> str:
        """In words."""
        text = f"{counted(self.rows, 'example')} of {self.shape}: {counted(self.tokens, 'token')}, "
        text += f"trained on {self.learnt:,} of them"
        if self.packs_text:
            text += f"; packed into {counted(self.sequences, 'sequence')} of up to {max_length:,}"
        if self.truncated:
            text += f"; {counted(self.truncated, 'example')} cut at --max-length {max_length:,}"
        if self.left_out:
            text += f", {self.left_out:,} of them left out since no token to train on remained"
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
                f"{type(self.tokenizer).__name__} does not report which characters a token stands for: the folder "
                "needs a fast tokenizer (tokenizer.json)"
            )
        if self.tokenizer.eos_token_id is None:
            raise ConfigError(
                "the tokenizer has no end-of-sequence token, which ends each answer: set eos_token in "
                "tokenizer_config.json"
            )

    def run(self, rows: Iterable[Row], counts: Counts) -> Iterator[Tokens]:
        """Encode rows of one kind; texts are packed."""
        rows = iter(rows)
        first = next(rows)
        counts.begin(first.shape)
        every = itertools.chain([first], rows)
        made = self._packed(every, counts) if counts.packs_text else self._each(every, counts)
        told = time.monotonic()
        for tokens in made:
            if time.monotonic() - told > _TOLD_SECONDS:
                told = time.monotonic()
                self.tell(f"{counted(counts.rows, 'example')} read so far")
            counts.take(tokens)
            yield tokens
        if not counts.learnt:
            raise ConfigError(
                f"none of {counted(counts.rows, 'example')} has a token to train on within --max-length "
                f"{self.max_length}: raise it"
            )

    def _each(self, rows: Iterable[Row], counts: Counts) -> Iterator[Tokens]:
        for row in rows:
            counts.read()
            try:
                whole = self._row(row)
            except ConfigError as error:
                raise ConfigError(f"{row.place}: {error}") from error
            if not any(whole.learnt[1:]):
                raise ConfigError(f"{row.place}: this example has no token to train on: remove it")
            if len(whole.ids) > self.max_length:
                whole = Tokens(whole.ids[: self.max_length], whole.learnt[: self.max_length])
                is_left_out = not any(whole.learnt[1:])
                counts.cut(left_out=is_left_out)
                if is_left_out:
                    continue
            yield whole

    def _packed(self, rows: Iterable[Row], counts: Counts) -> Iterator[Tokens]:
        """Texts one after another, each with an end, cut where a sequence is full."""
        waiting: list[int] = []
        goes_on = False
        for row in rows:
            text = row.values["text"]
            if not isinstance(text, str):
                raise ConfigError(f"{row.place}: `text` must be a text, not {type(text).__name__}")
            counts.read(not goes_on)
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
            raise ConfigError("`prompt` and `completion` must be both texts, or both lists of messages")
        if not completion:
            raise ConfigError("`completion` is empty: remove this example")
        made = self._spans(prompt + completion, [(len(prompt), len(prompt) + len(completion))], special=True)
        end = self.tokenizer.eos_token_id
        if made.ids[-1] == end:
            return Tokens(made.ids, [*made.learnt[:-1], True])
        return Tokens([*made.ids, end], [*made.learnt, True])

    def _messages(self, messages: list[dict[str, Any]], first: int, tools: Any) -> Tokens:
        """A conversation; the assistant's words are learnt from a turn on."""
        count = sum(message["role"] == "assistant" for message in messages[first:])
        if not count:
            raise ConfigError("no message has the role 'assistant', whose text is trained on: remove this example")
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


_TOKEN_BYTES = 4
# What no loss is taken on, by torch's default.
_IGNORED = -100


class Sequences(Closing):
    """Sequences of tokens by number. What is not learnt is stored with its bits inverted, as a negative number."""

    def __init__(self, made: Iterable[Tokens], folder: Path) -> None:
        """Write all of them to a file in `folder`, which has no name."""
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
        # Of all tokens, and which are learnt.
        self.digest = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and labels of one."""
        assert self._map is not None
        start, end = self._starts[number], self._starts[number + 1]
        stored = torch.frombuffer(self._map, dtype=torch.int32, offset=start * _TOKEN_BYTES, count=end - start).long()
        hidden = stored < 0
        return torch.where(hidden, ~stored, stored), torch.where(hidden, _IGNORED, stored)

    def length(self, number: int) -> int:
        """Tokens of one."""
        return self._starts[number + 1] - self._starts[number]

    def close(self) -> None:
        """The file is gone."""
        if self._map is not None:
            self._map.close()
            self._map = None
        self._file.close()


# Sequences that wait for a row that fills them.
_OPEN_MAX = 64


def seed_of(seed: int, what: str, number: int) -> int:
    """A seed of its own for each thing that is random, so that none depends on where another stands."""
    named = f"{seed}/{what}/{number}".encode()
    return int.from_bytes(hashlib.blake2b(named, digest_size=8).digest(), "little") >> 1


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What the model is given at once; the shorter rows are padded at their ends."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    labels: torch.Tensor
    # Of each token in its row, where several rows are in one sequence: what they are told apart by.
    position_ids: torch.Tensor | None = None

    @classmethod
    def of(cls, rows: list[tuple[torch.Tensor, torch.Tensor]], padding: int) -> Batch:
        """Rows of (ids, labels) beside each other."""
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
        """Several rows in each sequence, with positions that begin again at 0: attention then stays within a row."""
        joined = []
        for rows in packs:
            ids, labels = (torch.cat(column) for column in zip(*rows, strict=True))
            starts = torch.tensor([0, *(len(row) for row, _ in rows[:-1])]).cumsum(0)
            # Nothing foretells a row's first token.
            labels[starts] = _IGNORED
            joined.append((ids, labels))
        made = cls.of(joined, padding)
        # Each token of padding is a row of its own.
        positions = torch.zeros_like(made.input_ids)
        for number, rows in enumerate(packs):
            own = torch.cat([torch.arange(len(ids)) for ids, _ in rows])
            positions[number, : len(own)] = own
        return replace(made, position_ids=positions)

    @classmethod
    def of_padding(cls, padding: int) -> Batch:
        """The least that a model computes a loss of, for a rank that has to compute with the others and has no rows."""
        ids = torch.full((2,), padding)
        return cls.of([(ids, ids)], padding)

    @property
    def tokens(self) -> int:
        """Tokens, without padding."""
        return int(self.attention_mask.sum())

    @property
    def learnt(self) -> int:
        """Tokens that a loss is taken on; nothing foretells a row's first."""
        return int((self.labels[:, 1:] != _IGNORED).sum())


def alone(sequences: Sequences) -> list[list[int]]:
    """Each row by itself."""
    return [[number] for number in range(len(sequences))]


def packed(sequences: Sequences, length: int, seed: int) -> list[list[int]]:
    """Rows put together into sequences of a length at most, in an order that the seed decides.

    Each goes into the first of those that wait which has room for it.
    """
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
    """Which sequences each step learns from."""

    sequences: Sequences  # all of them
    packs: list[list[int]]  # the numbers of those that are computed as one
    batch: int  # how many are computed at once
    accumulate: int  # batches of a step; an epoch's last step has what is left
    epochs: float  # passes, the last one perhaps not whole
    seed: int  # of the order
    padding: int  # the token that shorter rows end with
    steps_max: int | None = None  # in place of `epochs`
    is_packed: bool = False  # whether several rows may be in one sequence

    @property
    def steps_of_epoch(self) -> int:
        """Steps of one pass."""
        return math.ceil(len(self.packs) / (self.batch * self.accumulate))

    @property
    def steps(self) -> int:
        """Steps of the run."""
        return self.steps_max or max(1, math.ceil(self.epochs * self.steps_of_epoch))

    def of_step(self, step: int) -> list[Batch]:
        """The batches of a step, counted from 0."""
        epoch, place = divmod(step, self.steps_of_epoch)
        order = self.order(epoch)
        together = self.batch * self.accumulate
        return list(self._batches(order[place * together : (place + 1) * together]))

    def in_file_order(self) -> Iterator[Batch]:
        """All of them once, as an evaluation takes them."""
        return self._batches(range(len(self.packs)))

    def order(self, epoch: int) -> list[int]:
        """The sequences of a pass."""
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
