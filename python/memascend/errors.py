"""Defines every error that memascend raises."""

from __future__ import annotations

from functools import partial
from typing import Any


class MemascendError(Exception):
    """The base class of every error that memascend raises itself."""

    # The names of the keyword-only arguments of `__init__`, which are also attributes. `__reduce__` makes pickle pass
    # them to `__init__`; by default pickle passes only the positional arguments of an exception.
    _keywords: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        keywords: dict[str, Any] = {name: getattr(self, name) for name in self._keywords}
        return partial(type(self), *self.args, **keywords), (), vars(self)


class ConfigError(MemascendError, ValueError):
    """An option, model or optimizer is wrong or rejected; the message names an alternative that works."""


class BudgetError(MemascendError, MemoryError):
    """A memory budget is too small.

    Attributes:
        smallest: the smallest budget that works, in bytes.
    """

    _keywords = ("smallest",)

    def __init__(self, message: str, *, smallest: int) -> None:
        super().__init__(message)
        self.smallest = smallest


class MemoryLimitError(MemascendError, MemoryError):
    """The machine, or the cgroup of the process, has less free memory than was requested.

    The error is raised before the memory is touched: the kernel would kill the process at the first access past the
    limit.

    Attributes:
        needed: bytes that were requested.
        available: bytes that are free; None if the kernel refused without giving a number (as for RLIMIT_AS).
    """

    _keywords = ("needed", "available")

    def __init__(self, message: str, *, needed: int, available: int | None) -> None:
        super().__init__(message)
        self.needed = needed
        self.available = available


class StorageError(MemascendError, OSError):
    """A device failed, is full, is mounted, is in use or has foreign contents; or a store is unfinished or unclosed.

    Attributes:
        errno: the system's error number, or None if no system error applies.
        path: the file or device.
        offset: position of the failed operation on that device, in bytes, or None.
        nbytes: length of the failed operation, in bytes, or None.
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
    """A rank failed, died or did not answer, so the step failed on all ranks; the message names the rank and the cause.

    Attributes:
        ranks: numbers of the ranks at fault; empty if no particular rank is at fault.
    """

    _keywords = ("ranks",)
    ranks: tuple[int, ...]

    def __init__(self, message: str, *, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.ranks = ranks


class DeviceError(MemascendError, RuntimeError):
    """The device that computes failed or was lost. The last commit is intact: a new process can resume from it."""


class UsageError(MemascendError, RuntimeError):
    """The call cannot give an exact result, or is not allowed at this moment; the message says what to do instead."""


class TimeoutExpired(MemascendError, TimeoutError):
    """A `timeout=` ran out; the message names the event that did not happen in time."""
