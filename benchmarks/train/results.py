"""Stores results on disk, one JSON file a cell, so that an interrupted run can go on."""

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
        again: True: `get` also measures an answer that has a file.
        measures: False: `get` measures nothing, and returns an error for an answer without a file.
    """

    def __init__(self, folder: Path, *, again: bool = False, measures: bool = True) -> None:
        self.folder, self.again, self.measures = folder, again, measures
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, name: str, asked: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Returns the answer of the file `name` if its question equals `asked`; otherwise measures and writes it.

        Raises:
            ConfigError: the file holds no answer.
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
                    f"{path} is no result of this benchmark: remove it or name another --results"
                ) from error
        answer = measure() if self.measures else {"error": "not measured yet", "missing": True}
        # A "missing" answer, for lack of an environment or a permission, is not written: a later run may measure it.
        if not answer.get("missing"):
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps({"asked": asked, "answer": answer}, indent=1) + "\n")
            partial.replace(path)
        return answer
