"""Reads rows of training data from .jsonl, .parquet and .txt; what is wrong is said with file and line."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memascend.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# What a row may consist of; the first that it has is what it is.
KINDS = (("messages",), ("prompt", "completion"), ("text",))
# A line is read at once.
_LINE_BYTES_MAX = 64 << 20
# Python's JSON lets these bytes pass, which UTF-8 does not have.
_SURROGATE = b"\xed"
# A text of any length is read in pieces of whole lines.
_PIECE_CHARACTERS = 1 << 20


@dataclass(frozen=True)
class Row:
    """One row, and where it stands."""

    place: str
    kind: str
    values: dict[str, Any]


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a file, in its order.

    Raises:
        ConfigError: it is not there, is of no known kind, or a row is wrong: which, and why.
    """
    readers = {".jsonl": _jsonl, ".parquet": _parquet, ".txt": _text}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(f"{path} ends in none of {', '.join(readers)}")
    if not path.is_file():
        raise ConfigError(f"{path} is not there, or is no file")
    kind = None
    for place, values in reader(path):
        found = next((keys for keys in KINDS if all(values.get(key) is not None for key in keys)), None)
        if found is None:
            raise ConfigError(
                f"{place}: a row has `messages`, or `prompt` and `completion`, or `text`; this has "
                f"{', '.join(map(repr, values)) or 'nothing'}"
            )
        kind = kind or found
        if found != kind:
            raise ConfigError(
                f"{place}: a row of {' and '.join(found)} among rows of {' and '.join(kind)}: one file has one kind"
            )
        yield Row(place, found[0], values)
    if kind is None:
        raise ConfigError(f"{path} has no rows")


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
            if not isinstance(values, dict):
                raise ConfigError(f"{place}: a row is an object, and this is a {type(values).__name__}")
            yield place, values


def _require_characters(place: str, values: Any) -> None:
    """Refuse half of a pair of UTF-16, which is no character and which no tokenizer takes."""
    try:
        json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise ConfigError(
            f"{place}: {half} is half of a character, without the other half beside it: write the whole character"
        ) from error


def _parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError(f"{path} needs pyarrow: pip install 'memascend[train]'") from error
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            wanted = [name for name in file.schema_arrow.names if any(name in keys for keys in (*KINDS, ("tools",)))]
            for batch in file.iter_batches(batch_size=256, columns=wanted):
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
            yield place, {"text": "".join(text), "goes_on": file.peek(1) != b""}
