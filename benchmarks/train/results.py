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
        folder: made where it is not there.
        again: measure also what is there already.
        measures: False: what is not there is an error, and nothing is measured.
    """

    def __init__(self, folder: Path, *, again: bool = False, measures: bool = True) -> None:
        self.folder, self.again, self.measures = folder, again, measures
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, name: str, asked: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The answer to what is asked: from its file if that was asked the same, else measured and written.

        Raises:
            ConfigError: the file is no answer.
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
        # What was not measured for want of an environment or of a right is measured as soon as it is there.
        if not answer.get("missing"):
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps({"asked": asked, "answer": answer}, indent=1) + "\n")
            partial.replace(path)
        return answer
