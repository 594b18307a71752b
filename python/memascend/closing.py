"""Gives objects that have a `close()` a `with` block that calls it."""

from __future__ import annotations

from abc import abstractmethod
from typing import Self


class Closing:
    """The base of what is closed at the end of its `with` block."""

    __slots__ = ()

    @abstractmethod
    def close(self) -> None:
        """Let go of everything. Twice is fine."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
