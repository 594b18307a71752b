"""Reads examples by `datasets` in TRL's columns, labels what the assistant wrote, and names a wrong example."""

from __future__ import annotations

import functools
import glob
import json
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import transformers
from trl import get_dataset
from trl.chat_template_utils import get_training_chat_template, has_generation_markers

from memascend.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memascend.cli.train.arguments import Command

# How `datasets` reads files. A text is one example: lines of it would mean little.
_BUILDERS: dict[str, tuple[str, dict[str, Any]]] = {
    ".jsonl": ("json", {}),
    ".json": ("json", {}),
    ".csv": ("csv", {}),
    ".tsv": ("csv", {"sep": "\t"}),
    ".parquet": ("parquet", {}),
    ".txt": ("text", {"sample_by": "document"}),
}
# The columns that an example has; beside them it may have others.
_SHAPES: dict[str, list[tuple[str, ...]]] = {
    "sft": [("messages",), ("conversations",), ("prompt", "completion"), ("instruction", "output"), ("text",)],
    "dpo": [("chosen", "rejected")],
    "reward": [("chosen", "rejected")],
    "kto": [("prompt", "completion", "label")],
}
_OTHERS = ("tools", "images", "system", "input", "margin")
_ROLES = {role: role for role in ("system", "developer", "user", "assistant", "tool")}
# ShareGPT's names.
_ROLES |= {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "observation": "tool"}


def read(command: Command, tokenizer: Any, *, held_out: bool = False) -> Any:
    """The examples of a command; also decides how their loss is taken. A wrong one is a ConfigError that names it."""
    script, own = command.script, command.own
    if command.mixture.datasets and not (held_out and own.eval):
        # TRL draws the examples of its test split.
        transformers.set_seed(command.training.seed)
        found = get_dataset(command.mixture)["test" if held_out else "train"]
        return _shaped(found, "datasets", command, tokenizer)
    split = script.dataset_test_split if held_out else script.dataset_train_split
    parts = []
    for text in own.eval if held_out and own.eval else script.dataset_name or ():
        files = _files(text)
        if files and held_out and not own.eval:
            raise ConfigError(f"an evaluation needs other examples than those of {text}: give --eval FILE")
        for place in files or [text]:
            builder, options = _BUILDERS.get(Path(place).suffix.lower(), (text, {"name": script.dataset_config}))
            given = {"split": "train", "data_files": place} if files else {"split": split}
            found = _loaded(place, builder, streaming=script.dataset_streaming, **options, **given)
            parts.append(_shaped(found, place, command, tokenizer))
    return datasets.concatenate_datasets(parts)


def _files(text: str) -> list[str]:
    """The files that a text names; none for a folder, or a data set of the hub."""
    if Path(text).is_dir():
        return []
    found = [text] if Path(text).is_file() else sorted(glob.glob(text, recursive=True))  # noqa: PTH207
    if not found and (glob.has_magic(text) or text.count("/") != 1 or Path(text).suffix.lower() in _BUILDERS):
        raise ConfigError(f"{text} does not exist: correct --data or --eval")
    for file in found:
        if Path(file).suffix.lower() not in _BUILDERS or not Path(file).stat().st_size:
            raise ConfigError(f"{file} has no examples: give a file that ends in {', '.join(_BUILDERS)}")
    return found


def _loaded(place: str, builder: str, **options: Any) -> Any:
    try:
        return datasets.load_dataset(builder, **options)
    except Exception as error:
        for number, line in enumerate(Path(place).read_bytes().splitlines() if builder == "json" else (), 1):
            try:
                json.loads(line or "{}")
            except ValueError as wrong:
                raise ConfigError(f"{place}:{number}: not valid JSON: {wrong}") from error
        # `datasets` tells the reason in the cause of its error.
        why = error.__cause__ or error
        raise ConfigError(f"{place} cannot be read: {type(why).__name__}: {' '.join(str(why).split())}") from error


def _shaped(data: Any, place: str, command: Command, tokenizer: Any) -> Any:
    """A data set with TRL's columns."""
    found = data.column_names or list(next(iter(data)))
    if "input_ids" in found:
        return data
    shapes = _SHAPES[command.kind]
    given = dict(part.split("=", 1) for part in (command.own.columns or "").split(",") if "=" in part)
    fitting = [shape for shape in shapes if {*shape} <= {*found, *given} and ({*shape} & {*given} or not given)]
    if len(fitting) != 1 or {*given.values()} - {*found}:
        wanted = " or ".join(" with ".join(f"`{name}`" for name in shape) for shape in fitting or shapes)
        raise ConfigError(
            f"{place} has columns {', '.join(map(repr, found))}, and memascend train {command.kind} takes {wanted}: "
            "name them by --columns, as prompt=question,completion=answer"
        )
    (shape,) = fitting
    by_prefixes = False
    if shape == ("text",) and command.finds_packing:
        # No end of a text is cut off.
        command.training.packing, command.training.packing_strategy = True, "bfd_split"
    if shape[0] in ("messages", "conversations", "instruction"):
        if not tokenizer.chat_template:
            raise ConfigError(f"`{shape[0]}` needs a chat template, and the tokenizer has none: give another model")
        if command.finds_answers and shape[0] != "instruction":
            by_prefixes = not _marks_answers(tokenizer)
            command.training.assistant_only_loss = not by_prefixes
    others = (*_OTHERS, *(["prompt"] if "chosen" in shape else ()))
    columns = {name: given.get(name, name) for name in (*shape, *others)}
    # `datasets` caches the result under these arguments.
    convert = functools.partial(_row, place, shape, columns, tokenizer if by_prefixes else None, version("memascend"))
    return data.map(convert, with_indices=True, remove_columns=found)


def _row(
    place: str, shape: tuple[str, ...], columns: Mapping[str, str], tokenizer: Any, _: str, values: Any, number: int
) -> dict[str, Any]:
    """An example with TRL's columns; with labels, where a tokenizer is given."""
    try:
        row = {ours: values[theirs] for ours, theirs in columns.items() if values.get(theirs) is not None}
        return _converted(row, shape, tokenizer)
    except ConfigError as error:
        line = f":{number + 1}" if place.endswith(".jsonl") else f": example {number + 1}"
        raise ConfigError(f"{place}{line}: {error}") from error


def _converted(row: dict[str, Any], shape: tuple[str, ...], tokenizer: Any) -> dict[str, Any]:
    for name in shape:
        if row.get(name) in (None, "", []):
            raise ConfigError(f"`{name}` is missing or empty: correct or remove this example")
    if "instruction" in shape:
        asked = row["instruction"] + (f"\n\n{row['input']}" if row.get("input") else "")
        turns = [{"role": "system", "content": row["system"]}] if row.get("system") else []
        turns += [{"role": "user", "content": asked}, {"role": "assistant", "content": row["output"]}]
        return {"prompt": turns[:-1], "completion": turns[-1:]}
    if "completion" in shape and isinstance(row["prompt"], str) != isinstance(row["completion"], str):
        raise ConfigError("`prompt` and `completion` must be both texts, or both lists of messages")
    if shape[0] in ("messages", "conversations"):
        row["messages"] = _conversation(row.pop(shape[0]), row.pop("system", None))
        return row if tokenizer is None else _labelled(tokenizer, row["messages"], row.get("tools"))
    return row


def _conversation(turns: Any, system: str | None) -> list[dict[str, Any]]:
    """Messages of OpenAI's or ShareGPT's form, without fields that other examples alone have."""
    messages = [{"role": "system", "content": system}] if system else []
    for number, turn in enumerate(turns if isinstance(turns, list) else [turns], 1):
        fields = {name: value for name, value in turn.items() if value is not None} if isinstance(turn, dict) else {}
        role, content = fields.pop("from", fields.get("role")), fields.pop("value", fields.get("content"))
        if role not in _ROLES or not (isinstance(content, str | list) or fields.get("tool_calls")):
            raise ConfigError(f"message {number} needs a role ({', '.join(_ROLES)}) and a text: correct this example")
        if role != "system" or not messages:
            messages.append({**fields, "role": _ROLES[role], "content": content})
    if all(message["role"] != "assistant" for message in messages):
        raise ConfigError("no message is the assistant's, whose text is trained on: remove this example")
    return messages


def _marks_answers(tokenizer: Any) -> bool:
    """Whether the chat template marks what the assistant wrote, or TRL has one of this model that does."""
    try:
        return has_generation_markers(tokenizer.chat_template) or get_training_chat_template(tokenizer) is not None
    except ValueError:
        return False


def _labelled(tokenizer: Any, messages: list[dict[str, Any]], tools: Any) -> dict[str, Any]:
    """The tokens of a conversation, with labels where the assistant wrote: found by prefixes of the whole text."""
    tools = json.loads(tools) if isinstance(tools, str) else tools
    render = functools.partial(tokenizer.apply_chat_template, tools=tools, tokenize=False)
    special = tuple(str(token) for token in tokenizer.added_tokens_decoder.values() if token.special)
    try:
        whole, spans = render(messages), []
        for at in (at for at, message in enumerate(messages) if message["role"] == "assistant"):
            before, after = render(messages[:at], add_generation_prompt=True), render(messages[: at + 1])
            if not (whole.startswith(after) and after.startswith(before)):
                raise ValueError(f"it does not show which text of message {at + 1} the assistant wrote")  # noqa: TRY301
            # The token that ends a turn is the answer's, the white space behind it is not.
            ended = after.rstrip()
            spans.append((len(before), len(ended) if ended.endswith(special) else len(after)))
    except Exception as error:
        raise ConfigError(
            f"the chat template cannot be used: {error}: give --chat_template_path with one that has {{% generation %}}"
        ) from error
    tokens = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    labels = [
        # A token without characters stands before its place.
        token if any(start - (start == end) < last and first < end for first, last in spans) else -100
        for token, (start, end) in zip(tokens["input_ids"], tokens["offset_mapping"], strict=True)
    ]
    return {"input_ids": tokens["input_ids"], "labels": labels}
