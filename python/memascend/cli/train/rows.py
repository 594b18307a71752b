"""Reads rows of training data from files; what is wrong is said with file and line."""

from __future__ import annotations

import csv
import itertools
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memascend.cli.train.files import SUFFIXES
from memascend.cli.train.shapes import Columns
from memascend.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from memascend.cli.train.shapes import Shape

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
                raise ConfigError(f"{place}: a row of {shape.name} among rows of {first.name}: a run has one kind")
            if GOES_ON in values:
                own[GOES_ON] = True
            yield Row(place, shape, own)
        if not count:
            raise ConfigError(f"{path} has no rows")


def _rows_of(path: Path, columns: Columns) -> Iterator[tuple[str, dict[str, Any]]]:
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise ConfigError(f"{path} ends in none of {', '.join(SUFFIXES)}")
    if not path.is_file():
        raise ConfigError(f"{path} is not there, or is no file")
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
                raise ConfigError(f"{place}: a line of more than {_LINE_BYTES_MAX} bytes")
            if not line.strip():
                continue
            try:
                values = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{place}: no JSON: {error}") from error
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
            f"{place}: {half} is half of a character, without the other half beside it: write the whole character"
        ) from error


def _object(place: str, values: Any) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise ConfigError(f"{place}: a row is an object, and this is a {type(values).__name__}")
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
        if ": no JSON" not in str(error):
            raise
        raise ConfigError(
            f"{error}; a .json file is an array of rows, [{{...}}, ...], or has one on each line"
        ) from error


def _array(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    decoder = json.JSONDecoder()
    with path.open(encoding="utf-8-sig") as file:
        try:
            waiting = file.read(_PIECE_CHARACTERS).lstrip()[1:].lstrip()
            for number in itertools.count(1):
                place = f"{path}: row {number}"
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
                    raise ConfigError(f"{place}: no JSON: neither a comma nor the array's end is behind it")
                waiting = waiting[1:].lstrip()
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: no UTF-8: {error}") from error


def _decoded(decoder: json.JSONDecoder, file: Any, waiting: str, place: str) -> tuple[Any, str]:
    """The next value, and what is behind it; read on until it is whole."""
    while True:
        try:
            values, end = decoder.raw_decode(waiting)
        except (ValueError, RecursionError) as error:
            # Twice as much each time, so that a long row is not decoded too often.
            more = file.read(max(_PIECE_CHARACTERS, len(waiting))) if len(waiting) <= _LINE_BYTES_MAX else ""
            if not more:
                raise ConfigError(f"{place}: no JSON: {error}") from error
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
                    raise ConfigError(f"{place}: this row {what}; commas and line ends within a field are quoted")
                yield place, values
        except (csv.Error, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}:{reader.line_num + 1}: no readable CSV: {error}") from error


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
                    yield f"{path}: row {number}", _without_nothing(values)
    except pa.ArrowException as error:
        raise ConfigError(f"{path}: row {number + 1}: no readable parquet: {error}") from error


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
                    raise ConfigError(f"{path}:{number}: no UTF-8: {error}") from error
                number += 1
            yield place, {"text": "".join(text), **({GOES_ON: True} if file.peek(1) else {})}
