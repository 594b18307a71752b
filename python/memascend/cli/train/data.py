"""Reads examples with the library `datasets`, and converts them to TRL's columns. Errors about an example name it.

For chat templates that cannot mark the assistant's messages, this module can label the tokens of these messages.
"""

from __future__ import annotations

import csv
import functools
import glob
import json
import sys
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np
import pyarrow.compute
import transformers
from trl import get_dataset
from trl.chat_template_utils import get_training_chat_template, has_generation_markers

from memascend.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memascend.cli.train.arguments import Command

# For each suffix of a file, the builder of `datasets` that reads the file, and the builder's options. A whole ".txt"
# file is one example.
_BUILDERS: dict[str, tuple[str, dict[str, Any]]] = {
    ".jsonl": ("json", {}),
    ".json": ("json", {}),
    ".csv": ("csv", {}),
    ".tsv": ("csv", {"sep": "\t"}),
    ".parquet": ("parquet", {}),
    ".txt": ("text", {"sample_by": "document"}),
}
# For each kind of training, the sets of columns that an example may have. The columns in `_OTHERS` are optional.
_SHAPES: dict[str, list[tuple[str, ...]]] = {
    "sft": [("messages",), ("conversations",), ("prompt", "completion"), ("instruction", "output"), ("text",)],
    "dpo": [("chosen", "rejected")],
    "reward": [("chosen", "rejected")],
    "kto": [("prompt", "completion", "label")],
}
_OTHERS = ("tools", "images", "system", "input", "margin")
# Columns whose values must be strings.
_TEXTS = ("text", "instruction", "input", "output", "system")
# Columns whose values must be strings or lists of messages. In one example, the values of these columns must be all
# strings, or all lists of messages.
_TEXTS_OR_TURNS = ("prompt", "completion", "chosen", "rejected")
# For each role of a message in the data, the role in chat templates.
_ROLES = {role: role for role in ("system", "developer", "user", "assistant", "tool")}
# The largest number of characters that an error shows of a wrong value.
_SHOWN_MAX = 60
# ShareGPT has other names for the roles.
_ROLES |= {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "observation": "tool"}


def read(command: Command, tokenizer: Any, *, held_out: bool = False) -> Any:
    """Returns the examples for training; with `held_out`, the examples for evaluation.

    May turn on packing or `assistant_only_loss` in the Trainer's arguments, depending on the examples.

    Raises:
        ConfigError: a file or a data set, its columns or an example is wrong, or the examples need a chat template that
            the model's tokenizer does not have. Or `held_out` is True, --data names files, and --eval is missing.
    """
    script, own = command.script, command.own
    if command.mixture.datasets and not (held_out and own.eval):
        # With --test_split_size, TRL splits the examples into training and evaluation at random. Both calls of `read`
        # need the same seed, so that no example is in both splits.
        transformers.set_seed(command.training.seed)
        splits = get_dataset(command.mixture)
        if held_out and "test" not in splits:
            raise ConfigError("`datasets` leaves no examples for evaluation: give --test_split_size or --eval FILE")
        found = splits["test" if held_out else "train"]
        return _shaped(found, "datasets", command, tokenizer)
    split = script.dataset_test_split if held_out else script.dataset_train_split
    parts = []
    for text in own.eval if held_out and own.eval else script.dataset_name or ():
        files = _files(text)
        if files and held_out and not own.eval:
            raise ConfigError(f"{text} is used for training and cannot be used for evaluation, too: give --eval FILE")
        for place in files or [text]:
            builder, options = _BUILDERS.get(Path(place).suffix.lower(), (text, {"name": script.dataset_config}))
            if builder == "csv":
                # The converters keep the numbers in columns of strings as strings. index_col=False is for files whose
                # lines have one field more than the header: without it, pandas would take the first field of a line as
                # an index, and would shift the other columns.
                texts = {"converters": dict.fromkeys(_text_columns(own.columns), str), "keep_default_na": False}
                options = {**options, **texts, "index_col": False}
            given = {"split": "train", "data_files": place} if files else {"split": split}
            try:
                found = _loaded(place, builder, streaming=script.dataset_streaming, **options, **given)
                parts.append(_shaped(found, place, command, tokenizer))
            except UnicodeDecodeError as error:
                # A stream decodes a file only when its examples are read, so this error comes after `_loaded()`.
                raise ConfigError(_wrong_line(place, builder) or f"{place} must be UTF-8: {error}") from error
    return datasets.concatenate_datasets(parts)


def _renamed(columns: str | None) -> dict[str, str]:
    """Parses `--columns`. Returns a dict from memascend's names of columns to the names of columns in the data."""
    return dict(part.split("=", 1) for part in (columns or "").split(",") if "=" in part)


def _text_columns(columns: str | None) -> list[str]:
    given = _renamed(columns)
    return [given.get(name, name) for name in (*_TEXTS, *_TEXTS_OR_TURNS)]


def _files(text: str) -> list[str]:
    """Returns the files whose names match `text`; no files if `text` is a folder or a data set of the hub."""
    if Path(text).is_dir():
        return []
    found = [text] if Path(text).is_file() else sorted(glob.glob(text, recursive=True))  # noqa: PTH207
    if not found and (glob.has_magic(text) or text.count("/") != 1 or Path(text).suffix.lower() in _BUILDERS):
        raise ConfigError(f"{text} does not exist: correct this path, or give a data set of the hub as OWNER/NAME")
    for file in found:
        if Path(file).suffix.lower() not in _BUILDERS:
            raise ConfigError(
                f"{file} has an unknown suffix: give a file whose name ends in one of {', '.join(_BUILDERS)}"
            )
        if not Path(file).stat().st_size:
            raise ConfigError(f"{file} is empty: give a file with examples")
    return found


def _loaded(place: str, builder: str, **options: Any) -> Any:
    try:
        with warnings.catch_warnings():
            # pandas gives this warning when it drops fields of a line. Here the warning becomes an error.
            warnings.filterwarnings("error", "Length of header or names")
            return datasets.load_dataset(builder, **options)
    except Exception as error:
        # `datasets` raises an error without details. The cause of this error has the reason.
        why = error.__cause__ or error
        if "corresponds to no data" in str(why):
            raise ConfigError(f"{place} has no examples: give a file with examples") from error
        raise ConfigError(
            _wrong_line(place, builder)
            or f"{place} cannot be read ({type(why).__name__}: {' '.join(str(why).split())}): check this data set"
        ) from error


def _wrong_line(place: str, builder: str) -> str | None:
    """Returns a message with the file, the line and the first error in the file; None if it finds no error."""
    if builder not in ("json", "csv", "text"):
        return None
    content = Path(place).read_bytes()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as wrong:
        line = content.count(b"\n", 0, wrong.start) + 1
        return f"{place}:{line}: not UTF-8: save the file as UTF-8"
    if builder == "json":
        return _wrong_json(place, text)
    if builder == "csv":
        csv.field_size_limit(sys.maxsize)
        lines = csv.reader(text.splitlines(keepends=True), delimiter="\t" if place.lower().endswith(".tsv") else ",")
        count = len(next(lines, []))
        for fields in lines:
            if len(fields) > count:
                return (
                    f"{place}:{lines.line_num}: {len(fields)} fields, but the first line has {count}: put texts that "
                    "contain the separator in quotes"
                )
    return None


def _wrong_json(place: str, text: str) -> str | None:
    """Returns a message with the file, the line and the first error in a JSON file; None if it finds no error."""
    try:
        json.loads(text)
    except ValueError as wrong:
        first = getattr(wrong, "msg", "") != "Extra data" and not place.lower().endswith(".jsonl")
        if first:
            return f"{place}:{getattr(wrong, 'lineno', 1)}: not valid JSON: {wrong}"
    for number, line in enumerate(text.splitlines(), 1):
        try:
            if line.strip() and not isinstance(json.loads(line), dict):
                return f'{place}:{number}: not an example: write a JSON object instead, such as {{"text": "..."}}'
        except ValueError as wrong:
            return f"{place}:{number}: not valid JSON: {wrong}"
    return None


def _shaped(data: Any, place: str, command: Command, tokenizer: Any) -> Any:
    """Returns a data set with TRL's columns. May turn on packing or `assistant_only_loss` in the Trainer's arguments.

    Errors name the data as `place`.
    """
    found = data.column_names or list(next(iter(data)))
    if "input_ids" in found:
        kind = getattr((data.features or {}).get("input_ids"), "feature", None)
        if data.features is not None and not str(getattr(kind, "dtype", "")).startswith(("int", "uint")):
            raise ConfigError(f"{place}: `input_ids` must be lists of whole numbers: correct or rename this column")
        return data
    given = _renamed(command.own.columns)
    shape = _shape(found, given, place, command.kind)
    by_prefixes = False
    if shape == ("text",) and command.finds_packing:
        # The strategy "bfd_split" splits long texts into several rows, so that no tokens are lost.
        command.training.packing, command.training.packing_strategy = True, "bfd_split"
    if shape[0] in ("messages", "conversations", "instruction"):
        if not tokenizer.chat_template:
            raise ConfigError(
                f"the column `{shape[0]}` needs a chat template, but the model's tokenizer has none: give a model that "
                "has a chat template"
            )
        if command.finds_answers and shape[0] != "instruction":
            by_prefixes = not _marks_answers(tokenizer)
            command.training.assistant_only_loss = not by_prefixes
    others = (*_OTHERS, *(["prompt"] if "chosen" in shape else ()))
    columns = {name: given.get(name, name) for name in (*shape, *others)}
    # `datasets` caches the result, and finds it again by the arguments of `convert`. One argument is the version of
    # memascend, so that another version does not use this result.
    convert = functools.partial(_row, place, shape, columns, tokenizer if by_prefixes else None, version("memascend"))
    return data.map(convert, with_indices=True, remove_columns=found)


def _shape(found: list[str], given: Mapping[str, str], place: str, kind: str) -> tuple[str, ...]:
    """Returns the shape in `_SHAPES` that fits the columns `found`. `given` is the value of `--columns`."""
    has = f"{place} has columns {', '.join(map(repr, found))}"
    if missing := [name for name in given.values() if name not in found]:
        raise ConfigError(f"{has}, but no {', '.join(map(repr, missing))}: correct --columns")
    shapes = _SHAPES[kind]
    fitting = [shape for shape in shapes if {*shape} <= {*found, *given} and ({*shape} & {*given} or not given)]
    wanted = " or ".join(" with ".join(f"`{name}`" for name in shape) for shape in fitting or shapes)
    if not fitting:
        raise ConfigError(
            f"{has}, but memascend train {kind} needs {wanted}: "
            "name the columns with --columns, for example --columns prompt=question,completion=answer"
        )
    if len(fitting) > 1:
        one = ",".join(f"{name}={given.get(name, name)}" for name in fitting[-1])
        raise ConfigError(f"{has}, which fit {wanted}: choose one of these, for example with --columns {one}")
    return fitting[0]


def _row(
    place: str, shape: tuple[str, ...], columns: Mapping[str, str], tokenizer: Any, _: str, values: Any, number: int
) -> dict[str, Any]:
    """Converts an example to TRL's columns. If `tokenizer` is given, the columns are tokens and labels.

    `columns` is a dict from memascend's names of columns to the names of columns in the data.
    """
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
    _require_kinds(row)
    if "instruction" in shape:
        asked = row["instruction"] + (f"\n\n{row['input']}" if row.get("input") else "")
        turns = [{"role": "system", "content": row["system"]}] if row.get("system") else []
        turns += [{"role": "user", "content": asked}, {"role": "assistant", "content": row["output"]}]
        return {"prompt": turns[:-1], "completion": turns[-1:]}
    if shape[0] in ("messages", "conversations"):
        messages = _conversation(row.pop(shape[0]), row.pop("system", None))
        if all(message["role"] != "assistant" for message in messages):
            raise ConfigError(
                "no message is the assistant's, but each example must have such a message: remove this example"
            )
        row["messages"] = messages
        return row if tokenizer is None else _labelled(tokenizer, messages, row.get("tools"))
    return row | {name: _conversation(row[name]) for name in _TEXTS_OR_TURNS if isinstance(row.get(name), list)}


def _require_kinds(row: Mapping[str, Any]) -> None:
    """Raises ConfigError if the type of a value is wrong for the value's column."""
    for name in (*_TEXTS, *_TEXTS_OR_TURNS):
        value = row.get(name)
        may_be_turns = name in _TEXTS_OR_TURNS
        if not isinstance(value, str | (list if may_be_turns else str) | None):
            kinds = "a string or a list of messages" if may_be_turns else "a string"
            raise ConfigError(f"`{name}` is {_shown(value)}, but must be {kinds}: correct this example")
    among = [name for name in _TEXTS_OR_TURNS if row.get(name) is not None]
    if len({isinstance(row[name], str) for name in among}) > 1:
        raise ConfigError(
            f"{' and '.join(f'`{name}`' for name in among)} must be all strings, or all lists of messages: correct "
            "this example"
        )
    if row.get("label", 0) not in (0, 1):
        raise ConfigError(f"`label` is {_shown(row['label'])}, but must be true or false: correct this example")
    if isinstance(row.get("tools"), str):
        try:
            json.loads(row["tools"])
        except ValueError as error:
            raise ConfigError(f"`tools` is not valid JSON ({error}): correct this example") from error


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}..."


def _conversation(turns: Any, system: str | None = None) -> list[dict[str, Any]]:
    """Converts messages in the form of OpenAI or ShareGPT to the form of OpenAI.

    Drops fields that are None, because `datasets` adds a field of one example, as None, to examples without this field.
    Drops system messages after the first message, and all system messages in `turns` if `system` is given.
    """
    messages = [{"role": "system", "content": system}] if system else []
    for number, turn in enumerate(turns if isinstance(turns, list) else [turns], 1):
        fields = {name: value for name, value in turn.items() if value is not None} if isinstance(turn, dict) else {}
        role, content = fields.pop("from", fields.get("role")), fields.pop("value", fields.get("content"))
        is_known = isinstance(role, str) and role in _ROLES
        if not is_known or not (isinstance(content, str | list) or fields.get("tool_calls")):
            raise ConfigError(f"message {number} needs a role ({', '.join(_ROLES)}) and content: correct this example")
        if role != "system" or not messages:
            messages.append({**fields, "role": _ROLES[role], "content": content})
    return messages


def _marks_answers(tokenizer: Any) -> bool:
    """True if the chat template, or TRL's training template for this model, marks the assistant's messages."""
    try:
        return has_generation_markers(tokenizer.chat_template) or get_training_chat_template(tokenizer) is not None
    except ValueError:
        return False


def _labelled(tokenizer: Any, messages: list[dict[str, Any]], tools: Any) -> dict[str, Any]:
    """Returns the tokens of a conversation, and their labels. The label is -100 outside of the assistant's messages.

    To find the text of a message, renders the messages before this message, and then the same messages together with
    this message.

    Raises:
        ConfigError: the first result is not a prefix of the second result, the second result is not a prefix of the
            whole rendered conversation, or the chat template raises an error.
    """
    tools = json.loads(tools) if isinstance(tools, str) else tools
    render = functools.partial(tokenizer.apply_chat_template, tools=tools, tokenize=False)
    special = tuple(str(token) for token in tokenizer.added_tokens_decoder.values() if token.special)
    try:
        whole, spans = render(messages), []
        for at in (at for at, message in enumerate(messages) if message["role"] == "assistant"):
            before, after = render(messages[:at], add_generation_prompt=True), render(messages[: at + 1])
            if not (whole.startswith(after) and after.startswith(before)):
                raise ValueError(f"it does not show which text of message {at + 1} the assistant wrote")  # noqa: TRY301
            # The token that ends a message gets a label. White space after this token gets no label.
            ended = after.rstrip()
            spans.append((len(before), len(ended) if ended.endswith(special) else len(after)))
    except Exception as error:
        raise ConfigError(
            f"the chat template cannot be used: {error}. Pass --assistant_only_loss, and "
            "--chat_template_path with a .jinja file that contains {% generation %}"
        ) from error
    tokens = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    labels = [
        # A token without characters (start == end) belongs to the span that contains the character before the token.
        token if any(start - (start == end) < last and first < end for first, last in spans) else -100
        for token, (start, end) in zip(tokens["input_ids"], tokens["offset_mapping"], strict=True)
    ]
    return {"input_ids": tokens["input_ids"], "labels": labels}


def token_counts(data: Any) -> Any:
    """Returns an array with the number of tokens of each example of a data set that TRL has prepared.

    If an example is a pair of answers, counts the tokens of the prompt and of the longer answer. Returns None if the
    data set has other columns, such as those of reward training.
    """
    names = set(data.column_names)

    def lengths(column: str) -> Any:
        # Arrow returns the lengths of lists without reading the tokens.
        found = data.with_format("arrow").select_columns([column])[:][column]
        return np.asarray(pyarrow.compute.list_value_length(found))

    if "input_ids" in names:
        return lengths("input_ids")
    answers = [name for name in ("chosen_ids", "rejected_ids", "completion_ids") if name in names]
    if "prompt_ids" not in names or not answers:
        return None
    return lengths("prompt_ids") + np.maximum.reduce([lengths(name) for name in answers])
