"""Finds and reads the files of training data, and turns their examples into conversations or texts."""

from __future__ import annotations

import csv
import glob
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memascend.errors import ConfigError
from memascend.text import bytes_shown

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt")
# JSON files beside data sets that have no examples.
_ABOUT = {"dataset_info.json", "dataset_infos.json", "state.json", "config.json"}
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(?:/.+)?")
_SPLIT = re.compile(r"(?:^|[-_./])(train|training|validation|valid|val|dev|eval|test)(?=[-_./\d]|$)")
_TRAIN = ("train", "training")
_HELD_OUT = ("validation", "valid", "val", "dev", "eval", "test")
_MODEL_FILES = ["*.safetensors", "*.json", "*.model", "*.jinja", "tokenizer*", "*.txt"]


def is_hub_name(text: str) -> bool:
    """Whether the text is OWNER/NAME, perhaps followed by a path or pattern, and names no local file."""
    path = Path(text)
    if not _HUB_NAME.fullmatch(text) or path.exists() or path.parent.is_dir():
        return False
    return text.count("/") > 1 or path.suffix.lower() not in SUFFIXES


def find_model(text: str) -> Path:
    """The folder of a model; a model on the hub is downloaded into its cache.

    Raises:
        ConfigError: there is no such model, neither in a folder nor on the hub.
    """
    folder = Path(text)
    if folder.is_dir():
        return folder
    if text.count("/") == 1 and is_hub_name(text):
        return _downloaded(text, "model", _MODEL_FILES)
    raise ConfigError(
        f"--model {text} is not a folder: download the model first, with `hf download NAME --local-dir {text}`"
    )


def find_files(texts: Sequence[str], *, held_out: bool = False) -> tuple[list[Path], str]:
    """The files of examples in the order in which they are read, and a sentence about files that were left out.

    Args:
        texts: each a file, a pattern, a folder, or a data set on the hub.
        held_out: whether to take the held-out split of a folder, and not the one for training.

    Raises:
        ConfigError: a text matches no file, or is ambiguous.
    """
    files: list[Path] = []
    said = []
    for text in texts:
        found, note = _found(text, _HELD_OUT if held_out else _TRAIN)
        files += found
        if note:
            said.append(note)
    return files, "; ".join(said)


def _found(text: str, splits: tuple[str, ...]) -> tuple[list[Path], str]:
    path = Path(text)
    if path.is_file():
        return [path], ""
    if path.is_dir():
        return _in_folder(path, splits)
    if is_hub_name(text):
        owner, name, *rest = text.split("/", 2)
        folder = _downloaded(f"{owner}/{name}", "dataset", rest or [f"*{suffix}" for suffix in SUFFIXES])
        return _matching(str(folder / rest[0])) if rest else _in_folder(folder, splits)
    if glob.has_magic(text):
        return _matching(text)
    raise ConfigError(f"{path} does not exist, or is not a file: correct --data or --eval")


def _matching(pattern: str) -> tuple[list[Path], str]:
    files = sorted(path for path in map(Path, glob.glob(pattern, recursive=True)) if path.is_file())  # noqa: PTH207
    if not files:
        raise ConfigError(f"no file matches {pattern}: correct --data or --eval")
    return files, ""


def _in_folder(folder: Path, splits: tuple[str, ...]) -> tuple[list[Path], str]:
    """The files of examples in a folder, of one split if it has several."""
    there = sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in SUFFIXES
        and path.name not in _ABOUT
        and path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )
    # A .txt file beside files of examples describes them.
    rows = [path for path in there if path.suffix.lower() != ".txt"] or there
    if not rows:
        saved = (
            "; it was written by save_to_disk(): write it by dataset.to_parquet() instead"
            if list(folder.glob("*.arrow"))
            else ": name another"
        )
        raise ConfigError(f"{folder} has no file with examples ({', '.join(SUFFIXES)}){saved}")
    kinds = sorted({path.suffix.lower() for path in rows})
    if len(kinds) > 1:
        raise ConfigError(
            f"{folder} has files of several kinds ({', '.join(kinds)}): name one, as '{folder}/*{kinds[0]}'"
        )
    by_split: dict[str, list[Path]] = {}
    for path in rows:
        named = _SPLIT.search(str(path.relative_to(folder)).lower())
        by_split.setdefault(named[1] if named else "", []).append(path)
    if len(by_split) == 1:
        return rows, ""
    chosen = next((split for split in splits if split in by_split), None)
    if chosen is None:
        names = ", ".join(sorted(split or "without a split" for split in by_split))
        raise ConfigError(f"{folder} has files of several splits ({names}): name one, as '{folder}/NAME*{kinds[0]}'")
    others = len(rows) - len(by_split[chosen])
    return by_split[chosen], f"the {chosen} split of {folder}, without {others} of its {len(rows)} files"


def _downloaded(name: str, kind: str, patterns: list[str]) -> Path:
    """The folder of a repository on the hub, in huggingface_hub's own cache."""
    line = f"`hf download {'--repo-type dataset ' if kind == 'dataset' else ''}{name} --local-dir FOLDER`"
    try:
        import huggingface_hub
    except ImportError as error:
        raise ConfigError(
            f"{name} does not exist here, and huggingface_hub is not installed: run {line}, and give FOLDER"
        ) from error
    try:
        return Path(huggingface_hub.snapshot_download(name, repo_type=kind, allow_patterns=patterns))
    except Exception as error:
        raise ConfigError(
            f"{name} does not exist here, and the hub's {kind} of this name cannot be loaded ({type(error).__name__}: "
            f"{str(error).strip().splitlines()[0] if str(error).strip() else 'no reason given'}): correct it, or run "
            f"{line} where there is a network, and give FOLDER"
        ) from error


@dataclass(frozen=True)
class Shape:
    """A set of columns that an example may have."""

    name: str  # in messages
    keys: tuple[str, ...]  # required columns
    others: tuple[str, ...] = ()  # optional columns

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns."""
        return (*self.keys, *self.others)


MESSAGES = Shape("`messages`", ("messages",), ("tools",))
SHARED = Shape("`conversations` (ShareGPT)", ("conversations",), ("system", "tools"))
COMPLETED = Shape("`prompt` and `completion`", ("prompt", "completion"), ("tools",))
INSTRUCTED = Shape("`instruction` and `output` (Alpaca)", ("instruction", "output"), ("input", "system", "history"))
TEXT = Shape("`text`", ("text",))
SHAPES = (MESSAGES, SHARED, COMPLETED, INSTRUCTED, TEXT)
KEYS = tuple(dict.fromkeys(key for shape in SHAPES for key in shape.columns))
_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "model": "assistant", "system": "system", "tool": "tool", "observation": "tool",
}  # fmt: skip
# The prompt of Stanford's Alpaca, for tokenizers without a chat template.
_ALPACA = (
    "Below is an instruction that describes a task{paired}. Write a response that appropriately completes the request."
    "\n\n### Instruction:\n{instruction}\n\n{input}### Response:\n"
)


class Columns:
    """Columns that the files name differently: OURS=THEIRS, with commas in between."""

    def __init__(self, text: str | None) -> None:
        """Parse `text`.

        Raises:
            ConfigError: `text` has another form, or OURS is no known column.
        """
        self.theirs: dict[str, str] = {}
        for part in text.split(",") if text else []:
            ours, equals, theirs = (word.strip() for word in part.partition("="))
            if not equals or not theirs or ours not in KEYS:
                raise ConfigError(
                    f"--columns takes OURS=THEIRS, as prompt=question,completion=answer, not {part!r}; OURS is one of "
                    f"{', '.join(KEYS)}"
                )
            self.theirs[ours] = theirs

    @property
    def wanted(self) -> set[str]:
        """The columns that an example may need."""
        return {*KEYS, *self.theirs.values(), "chosen", "rejected"}

    def shape_of(self, values: Mapping[str, Any]) -> tuple[Shape, dict[str, Any]]:
        """The shape that an example fits, and its values under our names.

        Raises:
            ConfigError: it fits no shape, or several.
        """
        named = {**values, **{ours: values.get(theirs) for ours, theirs in self.theirs.items()}}
        fitting = [
            shape
            for shape in SHAPES
            if all(named.get(key) is not None for key in shape.keys) and self.theirs.keys() <= set(shape.columns)
        ]
        if not fitting:
            raise ConfigError(_unfit(values, self.theirs))
        if len(fitting) > 1:
            choices = " or ".join(f"--columns {shape.keys[0]}={shape.keys[0]}" for shape in fitting)
            raise ConfigError(
                f"this example fits several shapes, {' and '.join(one.name for one in fitting)}: choose by {choices}"
            )
        (shape,) = fitting
        return shape, {key: named[key] for key in shape.columns if named.get(key) is not None}


def _unfit(values: Mapping[str, Any], theirs: Mapping[str, str]) -> str:
    has = ", ".join(map(repr, values)) or "nothing"
    absent = [name for name in theirs.values() if values.get(name) is None]
    if absent:
        return f"--columns names {absent[0]!r}, and this example has {has}"
    if "chosen" in values and "rejected" in values:
        return (
            "this example is a preference (`chosen`, `rejected`), for DPO or a reward model (docs/recipes.md). To "
            f"train on `chosen` alone, give --columns {'completion' if 'prompt' in values else 'messages'}=chosen"
        )
    return (
        "an example has `messages`, `conversations`, `prompt` and `completion`, `instruction` and `output`, or `text`, "
        f"and this one has {has}: name its columns by --columns"
    )


def turns(shape: Shape, values: dict[str, Any]) -> tuple[list[dict[str, Any]], int]:
    """The turns of a conversation, and the number of the first turn whose assistant text is trained on.

    Raises:
        ConfigError: the values are not a conversation.
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
        raise ConfigError(f"`{key}` must be a list of messages with at least one: correct or remove this example")
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
        raise ConfigError(f"message {number} must be an object with `from` and `value`, or `role` and `content`")
    role = _ROLES.get(str(turn["from"]).lower())
    if role is None:
        raise ConfigError(
            f"message {number} is from {turn['from']!r}, which is no known role: name one of {', '.join(_ROLES)}"
        )
    return {"role": role, "content": turn["value"]}


def _instructed(values: dict[str, Any]) -> list[dict[str, Any]]:
    asked = _text_of(values, "instruction")
    if values.get("input"):
        asked += f"\n\n{_text_of(values, 'input')}"
    found = []
    for pair in values.get("history") or []:
        if not isinstance(pair, list) or len(pair) != 2:
            raise ConfigError("`history` must be a list of pairs, [question, answer]")
        found += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    return [*found, {"role": "user", "content": asked}, {"role": "assistant", "content": _text_of(values, "output")}]


def instructed_text(values: dict[str, Any]) -> dict[str, Any]:
    """An example of Alpaca as prompt and completion, in Alpaca's own words.

    Raises:
        ConfigError: it has a system prompt or a history, which Alpaca's prompt does not have.
    """
    if values.get("system") or values.get("history"):
        raise ConfigError(
            "`system` and `history` need a chat template, and this tokenizer has none: use one of a chat model"
        )
    given = _text_of(values, "input") if values.get("input") else ""
    prompt = _ALPACA.format(
        paired=", paired with an input that provides further context" if given else "",
        instruction=_text_of(values, "instruction"),
        input=f"### Input:\n{given}\n\n" if given else "",
    )
    return {"prompt": prompt, "completion": _text_of(values, "output")}


def _text_of(values: dict[str, Any], key: str) -> str:
    text = values[key]
    if not isinstance(text, str) or (not text and key == "output"):
        raise ConfigError(f"`{key}` must be a text{' that is not empty' * (text == '')}, not {text!r}")
    return text


def _turn(turn: Any, number: int) -> dict[str, Any]:
    """The turn, with its content as one text."""
    if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
        raise ConfigError(f"message {number} must be an object with a `role`")
    content = turn.get("content")
    if isinstance(content, list):
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind != "text" or not isinstance(part.get("text"), str):
                raise ConfigError(
                    f"message {number} has a part of type {kind!r}, and memascend train reads text only: for images, "
                    "see docs/recipe-vision.md"
                )
        return {**turn, "content": "".join(part["text"] for part in content)}
    if not isinstance(content, str) and not (content is None and turn.get("tool_calls")):
        raise ConfigError(f"message {number} must have a text as its `content`")
    return turn


# A line is read at once, and so is an array, which takes six times its size when it is parsed.
_LINE_BYTES_MAX, _ARRAY_BYTES_MAX = 64 << 20, 256 << 20
# Python's JSON accepts these bytes, which are not valid in UTF-8.
_SURROGATE = b"\xed"
# A text of any length is read in parts of whole lines.
_PART_CHARACTERS = 1 << 20
# Marks a part that another part of the same text follows; no column has this name.
CONTINUED = "\0continued"


@dataclass(frozen=True)
class Row:
    """One example."""

    place: str  # file and line, or file and number
    shape: Shape
    values: dict[str, Any]


def read_rows(*paths: Path, columns: str | None = None) -> Iterator[Row]:
    """The examples of files, in their order.

    Args:
        paths: of the files.
        columns: the text of --columns.

    Raises:
        ConfigError: a file does not exist or is of no known kind, or an example is wrong.
    """
    named = Columns(columns)
    first = None
    for path in paths:
        count = 0
        for place, values in _rows_of(path, named):
            count += 1
            try:
                shape, own = named.shape_of(values)
            except ConfigError as error:
                raise ConfigError(f"{place}: {error}") from error
            first = first or shape
            if shape is not first:
                raise ConfigError(
                    f"{place}: this example is {shape.name}, and the ones before are {first.name}: give files of one "
                    "shape"
                )
            if CONTINUED in values:
                own[CONTINUED] = True
            yield Row(place, shape, own)
        if not count:
            raise ConfigError(f"{path} has no examples: give another file")


def _rows_of(path: Path, columns: Columns) -> Iterator[tuple[str, dict[str, Any]]]:
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise ConfigError(f"{path} is of no known kind: give a file that ends in {', '.join(SUFFIXES)}")
    if not path.is_file():
        raise ConfigError(f"{path} does not exist, or is not a file: correct --data or --eval")
    if suffix == ".parquet":
        return _parquet(path, columns.wanted)
    if suffix in (".csv", ".tsv"):
        return _csv(path, "," if suffix == ".csv" else "\t")
    return {".jsonl": _jsonl, ".json": _json, ".txt": _text}[suffix](path)


def _jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open("rb") as file:
        number = 0
        while line := file.readline(_LINE_BYTES_MAX + 1):
            number += 1
            place = f"{path}:{number}"
            if len(line) > _LINE_BYTES_MAX:
                raise ConfigError(f"{place}: this line has more than {_LINE_BYTES_MAX} bytes: split it")
            if not line.strip():
                continue
            try:
                values = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{place}: not valid JSON: {error}") from error
            if b"\\u" in line or _SURROGATE in line:
                _require_characters(place, values)
            yield place, _object(place, values)


def _require_characters(place: str, values: Any) -> None:
    """Reject half of a surrogate pair of UTF-16, which no tokenizer accepts."""
    try:
        json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise ConfigError(
            f"{place}: {half} is half of a surrogate pair, without the other half: write the whole character"
        ) from error


def _object(place: str, values: Any) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise ConfigError(f"{place}: an example must be a JSON object, not a {type(values).__name__}: write {{...}}")
    return values


def _json(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """An array of examples; or one example on each line, as in many .json files."""
    with path.open("rb") as file:
        first = file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
    if first != b"[":
        try:
            yield from _jsonl(path)
        except ConfigError as error:
            if ": not valid JSON" not in str(error):
                raise
            raise ConfigError(
                f"{error}; a .json file must be an array of examples, [{{...}}, ...], or have one on each line"
            ) from error
        return
    if path.stat().st_size > _ARRAY_BYTES_MAX:
        most = bytes_shown(_ARRAY_BYTES_MAX)
        raise ConfigError(
            f"{path} is an array of more than {most}, and an array is read at once: write one example on each line"
        )
    try:
        examples = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from error
    for number, values in enumerate(examples, 1):
        place = f"{path}: example {number}"
        _require_characters(place, values)
        yield place, _object(place, values)


def _csv(path: Path, delimiter: str) -> Iterator[tuple[str, dict[str, Any]]]:
    csv.field_size_limit(_LINE_BYTES_MAX)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, delimiter=delimiter, strict=True)
        try:
            for values in reader:
                place = f"{path}:{reader.line_num}"
                extra, absent = values.pop(None, None), [name for name, value in values.items() if value is None]
                if extra or absent:
                    what = f"has no {absent[0]!r}" if absent else "has more fields than the first line names"
                    raise ConfigError(f"{place}: this row {what}: quote fields that contain commas or line ends")
                yield place, values
        except (csv.Error, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}:{reader.line_num + 1}: not readable as CSV: {error}") from error


def _parquet(path: Path, wanted: set[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError(f"{path} needs pyarrow: pip install 'memascend[train]'") from error
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            own = [name for name in file.schema_arrow.names if name in wanted] or file.schema_arrow.names
            for batch in file.iter_batches(batch_size=256, columns=own):
                for values in batch.to_pylist():
                    number += 1
                    yield f"{path}: example {number}", _without_none(values)
    except pa.ArrowException as error:
        raise ConfigError(
            f"{path}: example {number + 1}: not readable as parquet ({error}): fetch the file again"
        ) from error


def _without_none(value: Any) -> Any:
    """The value without fields that are None: parquet has every field in each row, and JSON leaves absent ones out."""
    if isinstance(value, dict):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_without_none(each) for each in value]
    return value


def _text(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """One text in parts; every part but the last ends with a line."""
    number = 1
    with path.open("rb") as file:
        while lines := file.readlines(_PART_CHARACTERS):
            place = f"{path}:{number}"
            text = []
            for line in lines:
                try:
                    text.append(line.decode())
                except UnicodeDecodeError as error:
                    raise ConfigError(f"{path}:{number}: not valid UTF-8: {error}") from error
                number += 1
            yield place, {"text": "".join(text), **({CONTINUED: True} if file.peek(1) else {})}
