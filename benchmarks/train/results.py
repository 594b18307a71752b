"""Stores results on disk, with one JSON file for each cell. An interrupted run can then continue."""

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
        measures: False means that `get` measures nothing. It returns an error for an answer that has no file.
    """

    def __init__(self, folder: Path, *, again: bool = False, measures: bool = True) -> None:
        self.folder, self.again, self.measures = folder, again, measures
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, name: str, asked: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Returns the stored answer of the file `name` if the stored question equals `asked`.

        Otherwise calls `measure`, writes the new answer to the file, and returns the new answer.

        Raises:
            ConfigError: the file exists, but does not have an answer.
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
        answer = measure() if self.measures else {"error": "not measured yet", "missing": True}
        # An answer is "missing" if an environment or a permission was missing. It is not written, so a later run may
        # measure it.
        if not answer.get("missing"):
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps({"asked": asked, "answer": answer}, indent=1) + "\n")
            partial.replace(path)
        return answer
