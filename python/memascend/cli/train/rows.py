"""Finds and reads the files of training data, and makes conversations or texts of their rows."""

from __future__ import annotations

import csv
import glob
import itertools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memascend.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt")
# What lies beside rows and is none.
_ABOUT = {"dataset_info.json", "dataset_infos.json", "state.json", "config.json"}
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(?:/.+)?")
_SPLIT = re.compile(r"(?:^|[-_./])(train|training|validation|valid|val|dev|eval|test)(?=[-_./\d]|$)")
_TRAIN = ("train", "training")
_HELD_OUT = ("validation", "valid", "val", "dev", "eval", "test")
_MODEL_FILES = ["*.safetensors", "*.json", "*.model", "*.jinja", "tokenizer*", "*.txt"]


def is_hub_name(text: str) -> bool:
    """Whether it is OWNER/NAME, perhaps with a path or pattern behind it, and nothing that lies here."""
    path = Path(text)
    if not _HUB_NAME.fullmatch(text) or path.exists() or path.parent.is_dir():
        return False
    return text.count("/") > 1 or path.suffix.lower() not in SUFFIXES


def find_model(text: str) -> Path:
    """The folder of a model; one of the hub is downloaded into its cache.

    Raises:
        ConfigError: it is neither here nor there.
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
    """The files of rows, in the order in which they are read; and what of them was left out, in words.

    Args:
        texts: each a file, a pattern, a folder, or a data set on the hub.
        held_out: whether a folder with several splits means those that are held out, and not the one for training.

    Raises:
        ConfigError: one of them is nothing, or leaves open what is meant.
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
    """All rows of a folder, of one split where it has several."""
    there = sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in SUFFIXES
        and path.name not in _ABOUT
        and path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )
    # A text beside rows says something about them.
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
    """What the hub has under a name, in huggingface_hub's own cache."""
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
    """What a row may consist of."""

    name: str  # as it is told
    keys: tuple[str, ...]  # that it has
    others: tuple[str, ...] = ()  # that it may have

    def fits(self, values: Mapping[str, Any]) -> bool:
        """Whether a row has all of it."""
        return all(values.get(key) is not None for key in self.keys)


MESSAGES = Shape("`messages`", ("messages",), ("tools",))
SHARED = Shape("`conversations` (ShareGPT)", ("conversations",), ("system", "tools"))
COMPLETED = Shape("`prompt` and `completion`", ("prompt", "completion"), ("tools",))
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
                    f"--columns takes OURS=THEIRS, as prompt=question,completion=answer, not {part!r}; OURS is one of "
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
                f"this example fits several shapes, {' and '.join(one.name for one in fitting)}: choose by {choices}"
            )
        (shape,) = fitting
        return shape, {key: named[key] for key in (*shape.keys, *shape.others) if named.get(key) is not None}


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
    """A row of Alpaca as prompt and completion, in Alpaca's own words.

    Raises:
        ConfigError: it has what these words have no place for.
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
    """A turn whose content is one text."""
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


# A line, or an object of an array, is read at once.
_LINE_BYTES_MAX = 64 << 20
# Python's JSON lets these bytes pass, which UTF-8 does not have.
_SURROGATE = b"\xed"
# A text of any length is read in pieces of whole lines; an array, in pieces of this size.
_PIECE_CHARACTERS = 1 << 20
# Of a piece of a text that has another behind it; no column has this name.
GOES_ON = "\0goes on"


@dataclass(frozen=True)
class Row:
    """One row, and where it stands."""

    place: str
    shape: Shape
    values: dict[str, Any]


def read_rows(*paths: Path, columns: str | None = None) -> Iterator[Row]:
    """The rows of files, in their order.

    Args:
        paths: of the files.
        columns: what their rows call otherwise.

    Raises:
        ConfigError: one is not there, is of no known kind, or a row is wrong: which, and why.
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
            if GOES_ON in values:
                own[GOES_ON] = True
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
    """Refuse half of a pair of UTF-16, which is no character and which no tokenizer takes."""
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
    """An array of objects, one of them in memory at a time; or lines, as many files of this name are."""
    with path.open("rb") as file:
        first = file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
    if first == b"[":
        yield from _array(path)
        return
    try:
        yield from _jsonl(path)
    except ConfigError as error:
        if ": not valid JSON" not in str(error):
            raise
        raise ConfigError(
            f"{error}; a .json file must be an array of examples, [{{...}}, ...], or have one on each line"
        ) from error


def _array(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    decoder = json.JSONDecoder()
    with path.open(encoding="utf-8-sig") as file:
        try:
            waiting = file.read(_PIECE_CHARACTERS).lstrip()[1:].lstrip()
            for number in itertools.count(1):
                place = f"{path}: example {number}"
                if not waiting:
                    waiting = file.read(_PIECE_CHARACTERS).lstrip()
                if number == 1 and waiting.startswith("]"):
                    return
                values, waiting = _decoded(decoder, file, waiting, place)
                _require_characters(place, values)
                yield place, _object(place, values)
                waiting = waiting.lstrip() or file.read(_PIECE_CHARACTERS).lstrip()
                if waiting.startswith("]"):
                    return
                if not waiting.startswith(","):
                    raise ConfigError(f"{place}: not valid JSON: neither a comma nor the end of the array follows it")
                waiting = waiting[1:].lstrip()
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: not valid UTF-8: {error}") from error


def _decoded(decoder: json.JSONDecoder, file: Any, waiting: str, place: str) -> tuple[Any, str]:
    """The next value, and what is behind it; read on until it is whole."""
    while True:
        try:
            values, end = decoder.raw_decode(waiting)
        except (ValueError, RecursionError) as error:
            # Twice as much each time, so that a long row is not decoded too often.
            more = file.read(max(_PIECE_CHARACTERS, len(waiting))) if len(waiting) <= _LINE_BYTES_MAX else ""
            if not more:
                raise ConfigError(f"{place}: not valid JSON: {error}") from error
            waiting += more
            continue
        return values, waiting[end:]


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
                    yield f"{path}: example {number}", _without_nothing(values)
    except pa.ArrowException as error:
        raise ConfigError(
            f"{path}: example {number + 1}: not readable as parquet ({error}): fetch the file again"
        ) from error


def _without_nothing(value: Any) -> Any:
    """What a column has for some rows only is None in all others, where JSON would have nothing."""
    if isinstance(value, dict):
        return {key: _without_nothing(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_without_nothing(each) for each in value]
    return value


def _text(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """One text; every piece but the last ends with a line."""
    number = 1
    with path.open("rb") as file:
        while lines := file.readlines(_PIECE_CHARACTERS):
            place = f"{path}:{number}"
            text = []
            for line in lines:
                try:
                    text.append(line.decode())
                except UnicodeDecodeError as error:
                    raise ConfigError(f"{path}:{number}: not valid UTF-8: {error}") from error
                number += 1
            yield place, {"text": "".join(text), **({GOES_ON: True} if file.peek(1) else {})}
