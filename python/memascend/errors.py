"""Defines memascend's own exceptions."""

from __future__ import annotations

from functools import partial
from typing import Any


class MemascendError(Exception):
    """The base class of memascend's own exceptions; also raised itself, for example if a thread panicked."""

    # The names of the keyword-only arguments of `__init__`, which are also attributes. `__reduce__` makes pickle pass
    # them to `__init__`; by default pickle passes only the positional arguments of an exception.
    _keywords: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        keywords: dict[str, Any] = {name: getattr(self, name) for name in self._keywords}
        return partial(type(self), *self.args, **keywords), (), vars(self)


class ConfigError(MemascendError, ValueError):
    """An option, an argument, the model or the optimizer is wrong or not supported; the message says what to change."""


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
    """The machine, the cgroup of the process or the GPU has less free memory than was requested.

    For host memory, the error is raised before the memory is touched: the kernel would kill the process at the first
    access past the limit.

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
    """A file, device or store cannot be used: it failed, is full, mounted, in use, foreign or unfinished, for example.

    Attributes:
        errno: the system's error number, or None if no system error applies.
        path: the file or device, or None.
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
    """A checksum or a format on storage is wrong; the message names the damaged part, such as a file or a chunk."""


class RankError(MemascendError, RuntimeError):
    """A rank failed, died, did not answer or differs from other ranks, so the call fails on all ranks.

    The message gives the cause, and names the ranks at fault if they are known.

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
    """The call cannot give an exact result, is not allowed now, or ran an optimizer's own code that failed.

    The message says what to do.
    """


class TimeoutExpired(MemascendError, TimeoutError):
    """A `timeout=` ran out; the message names the event that did not happen in time."""
