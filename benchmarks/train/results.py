"""Stores each result in a JSON file, so that an interrupted run can continue."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from memascend.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["Results"]

_NOT_IN_NAMES = re.compile(r"[^\w.-]+")


class Results:
    """A folder of answers.

    Args:
        folder: the folder, which is made if it does not exist.
        again: True means that `get` measures every answer, even if its file exists.
        measures: False means that `get` measures nothing. It returns an error if the answer is not stored.
    """

    def __init__(self, folder: Path, *, again: bool = False, measures: bool = True) -> None:
        self.folder, self.again, self.measures = folder, again, measures
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, name: str, asked: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Returns the stored answer from the file of `name` if the stored question equals `asked`.

        Otherwise, or if `again` is True, calls `measure` and returns the new answer. Writes the new answer to the file,
        unless it is "missing". If `measures` is False, returns an error instead of calling `measure`.

        Raises:
            ConfigError: the file exists, but does not have a question and an answer.
        """
        path = self.folder / f"{_NOT_IN_NAMES.sub('-', name)}.json"
        if path.exists() and not self.again:
            try:
                kept = json.loads(path.read_text())
                if kept["asked"] == asked:
                    answer: dict[str, Any] = kept["answer"]
                    return answer
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(
                    f"{path} is not a result of this benchmark: remove it, or choose another folder with --results"
                ) from error
        answer = measure() if self.measures else {"error": "no stored result: measure it first", "missing": True}
        # An answer is "missing" if DeepSpeed or a permission was missing, or if `measures` is False. It is not written,
        # so that a later run measures it.
        if not answer.get("missing"):
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps({"asked": asked, "answer": answer}, indent=1) + "\n")
            partial.replace(path)
        return answer
