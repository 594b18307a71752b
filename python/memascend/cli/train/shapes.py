"""Knows the shapes that rows come in, and makes turns of a conversation, or texts, of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memascend.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class Shape:
    """What a row may consist of."""

    name: str  # as it is told
    keys: tuple[str, ...]  # that it has
    others: tuple[str, ...] = ()  # that it may have

    def fits(self, values: Mapping[str, Any]) -> bool:
        """Whether a row has all of it."""
        return all(values.get(key) is not None for key in self.keys)


MESSAGES = Shape("`messages`", ("messages",), ("tools",))
SHARED = Shape("`conversations` (ShareGPT)", ("conversations",), ("system", "tools"))
COMPLETED = Shape("`prompt and completion`", ("prompt", "completion"), ("tools",))
INSTRUCTED = Shape("`instruction` and `output` (Alpaca)", ("instruction", "output"), ("input", "system", "history"))
TEXT = Shape("`text`", ("text",))
SHAPES = (MESSAGES, SHARED, COMPLETED, INSTRUCTED, TEXT)
KEYS = tuple(dict.fromkeys(key for shape in SHAPES for key in (*shape.keys, *shape.others)))

_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "model": "assistant", "system": "system", "tool": "tool", "observation": "tool",
}  # fmt: skip
# Of Stanford's Alpaca, for tokenizers without a chat template.
_ALPACA = (
    "Below is an instruction that describes a task{paired}. Write a response that appropriately completes the request."
    "\n\n### Instruction:\n{instruction}\n\n{input}### Response:\n"
)


class Columns:
    """What the rows of a run call otherwise: OURS=THEIRS, several with commas between them."""

    def __init__(self, text: str | None) -> None:
        """Read it.

        Raises:
            ConfigError: it is none, or names what no row has.
        """
        self.theirs: dict[str, str] = {}
        for part in text.split(",") if text else []:
            ours, equals, theirs = (word.strip() for word in part.partition("="))
            if not equals or not theirs or ours not in KEYS:
                raise ConfigError(
                    f"--columns is OURS=THEIRS, as prompt=question,completion=answer, and not {part!r}; ours are "
                    f"{', '.join(KEYS)}"
                )
            self.theirs[ours] = theirs

    @property
    def wanted(self) -> set[str]:
        """The columns that a row may need."""
        return {*KEYS, *self.theirs.values(), "chosen", "rejected"}

    def shape_of(self, values: Mapping[str, Any]) -> tuple[Shape, dict[str, Any]]:
        """The one shape that a row fits, and the row under our names.

        Raises:
            ConfigError: it fits none, or several.
        """
        named = {**values, **{ours: values.get(theirs) for ours, theirs in self.theirs.items()}}
        fitting = [
            shape
            for shape in SHAPES
            if shape.fits(named) and all(ours in (*shape.keys, *shape.others) for ours in self.theirs)
        ]
        if not fitting:
            raise ConfigError(_unfit(values, self.theirs))
        if len(fitting) > 1:
            choices = " or ".join(f"--columns {shape.keys[0]}={shape.keys[0]}" for shape in fitting)
            raise ConfigError(
                f"a row that could be {' and could be '.join(shape.name for shape in fitting)}: say which, by {choices}"
            )
        (shape,) = fitting
        return shape, {key: named[key] for key in (*shape.keys, *shape.others) if named.get(key) is not None}


def _unfit(values: Mapping[str, Any], theirs: Mapping[str, str]) -> str:
    has = ", ".join(map(repr, values)) or "nothing"
    absent = [name for name in theirs.values() if values.get(name) is None]
    if absent:
        return f"--columns names {absent[0]!r}, and this row has {has}"
    if "chosen" in values and "rejected" in values:
        return (
            "a row of `chosen` and `rejected` is a preference, which DPO or a reward model learns from (the guides "
            "have recipes): memascend train learns from answers, as --columns messages=chosen"
        )
    return (
        "a row has `messages`, `conversations`, `prompt` and `completion`, `instruction` and `output`, or `text`; this "
        f"has {has}; --columns says what it calls otherwise"
    )


def turns(shape: Shape, values: dict[str, Any]) -> tuple[list[dict[str, Any]], int]:
    """The turns of a row that is a conversation, and from which on the assistant's words are learnt.

    Raises:
        ConfigError: it is none.
    """
    if shape is SHARED:
        found = [_shared(turn, number) for number, turn in enumerate(_list(values, "conversations"), 1)]
        first = _system(values, found)
    elif shape is INSTRUCTED:
        found, first = _instructed(values), _system(values, [])
    elif shape is COMPLETED:
        asked, answered = _list(values, "prompt"), _list(values, "completion")
        return [_turn(turn, number) for number, turn in enumerate([*asked, *answered], 1)], len(asked)
    else:
        found, first = _list(values, "messages"), []
    return [_turn(turn, number) for number, turn in enumerate([*first, *found], 1)], 0


def _list(values: dict[str, Any], key: str) -> list[Any]:
    found = values[key]
    if not isinstance(found, list) or not found:
        raise ConfigError(f"`{key}` is a list of turns")
    return found


def _system(values: dict[str, Any], found: list[Any]) -> list[dict[str, Any]]:
    text = values.get("system")
    if not text or (found and found[0]["role"] == "system"):
        return []
    return [{"role": "system", "content": text}]


def _shared(turn: Any, number: int) -> dict[str, Any]:
    if isinstance(turn, dict) and "role" in turn:
        return turn
    if not isinstance(turn, dict) or "from" not in turn or "value" not in turn:
        raise ConfigError(f"message {number} is no object with `from` and `value`, or `role` and `content`")
    role = _ROLES.get(str(turn["from"]).lower())
    if role is None:
        raise ConfigError(f"message {number} is from {turn['from']!r}, and none of {', '.join(_ROLES)}")
    return {"role": role, "content": turn["value"]}


def _instructed(values: dict[str, Any]) -> list[dict[str, Any]]:
    asked = _text(values, "instruction")
    if values.get("input"):
        asked += f"\n\n{_text(values, 'input')}"
    found = []
    for pair in values.get("history") or []:
        if not isinstance(pair, list) or len(pair) != 2:
            raise ConfigError("`history` is a list of pairs, of what was asked and what was answered")
        found += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    return [*found, {"role": "user", "content": asked}, {"role": "assistant", "content": _text(values, "output")}]


def instructed_text(values: dict[str, Any]) -> dict[str, Any]:
    """A row of Alpaca as prompt and completion, in Alpaca's own words.

    Raises:
        ConfigError: it has what these words have no place for.
    """
    if values.get("system") or values.get("history"):
        raise ConfigError("`system` and `history` need a tokenizer with a chat template, and this has none")
    given = _text(values, "input") if values.get("input") else ""
    prompt = _ALPACA.format(
        paired=", paired with an input that provides further context" if given else "",
        instruction=_text(values, "instruction"),
        input=f"### Input:\n{given}\n\n" if given else "",
    )
    return {"prompt": prompt, "completion": _text(values, "output")}


def _text(values: dict[str, Any], key: str) -> str:
    text = values[key]
    if not isinstance(text, str) or (not text and key == "output"):
        raise ConfigError(f"`{key}` is a text, and not {text!r}")
    return text


def _turn(turn: Any, number: int) -> dict[str, Any]:
    """A turn whose content is one text."""
    if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
        raise ConfigError(f"message {number} is no object with a `role`")
    content = turn.get("content")
    if isinstance(content, list):
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind != "text" or not isinstance(part.get("text"), str):
                raise ConfigError(
                    f"message {number} has a part that is no text ({kind!r}): memascend train learns text alone; the "
                    "guides have a recipe for models that see"
                )
        return {**turn, "content": "".join(part["text"] for part in content)}
    if not isinstance(content, str) and not (content is None and turn.get("tool_calls")):
        raise ConfigError(f"message {number} has no text as its `content`")
    return turn
