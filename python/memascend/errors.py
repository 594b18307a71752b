"""Defines every error that memascend raises."""

from __future__ import annotations

from functools import partial
from typing import Any


class MemascendError(Exception):
    """The base of every error that memascend raises by itself."""

    # Keyword arguments of the class, which are attributes: an error is pickled with them.
    _keywords: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        keywords: dict[str, Any] = {name: getattr(self, name) for name in self._keywords}
        return partial(type(self), *self.args, **keywords), (), vars(self)


class ConfigError(MemascendError, ValueError):
    """An option, model or optimizer is wrong or refused; the message says what works."""


class BudgetError(MemascendError, MemoryError):
    """A memory budget is too small.

    Attributes:
        smallest: the budget that works, in bytes.
    """

    _keywords = ("smallest",)

    def __init__(self, message: str, *, smallest: int) -> None:
        super().__init__(message)
        self.smallest = smallest


class MemoryLimitError(MemascendError, MemoryError):
    """The machine, or the cgroup that the process runs in, does not have the memory that was asked for.

    Raised before the memory is touched: the kernel would answer by killing the process.

    Attributes:
        needed: bytes that were asked for.
        available: bytes that could be had; None where the kernel refused without saying (RLIMIT_AS, for one).
    """

    _keywords = ("needed", "available")

    def __init__(self, message: str, *, needed: int, available: int | None) -> None:
        super().__init__(message)
        self.needed = needed
        self.available = available


class StorageError(MemascendError, OSError):
    """A device failed, is full, mounted, foreign or in use, or its store is unfinished or unclosed.

    Attributes:
        errno: the system's error number, or None where the system was not asked.
        path: the file or device.
        offset: where on that device, in bytes, or None.
        nbytes: how many bytes the operation was about, or None.
    """

    _keywords = ("errno", "path", "offset", "nbytes")

    def __init__(
        self,
        message: str,
        *,
        errno: int | None = None,
        path: str | None = None,
        offset: int | None = None,
        nbytes: int | None = None,
    ) -> None:
        super().__init__(message)
        self.errno = errno
        self.path = path
        self.offset = offset
        self.nbytes = nbytes

    def __str__(self) -> str:
        return str(self.args[0])


class CorruptionError(StorageError):
    """A checksum or a format is wrong; the message names the parameter, chunk and offset."""


class RankError(MemascendError, RuntimeError):
    """A rank died, hangs or failed, and the step ended on all of them; the message says which and why.

    Attributes:
        ranks: which, by their numbers.
    """

    _keywords = ("ranks",)
    ranks: tuple[int, ...]

    def __init__(self, message: str, *, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.ranks = ranks


class DeviceError(MemascendError, RuntimeError):
    """The device that computes failed, or was lost; what was committed stands, and opens in a new process."""


class UsageError(MemascendError, RuntimeError):
    """A call that cannot be exact, or cannot be made now; the message says what to do instead."""


class TimeoutExpired(MemascendError, TimeoutError):
    """A `timeout=` ran out; the message says what was waited for."""
