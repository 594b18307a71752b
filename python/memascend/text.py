"""Formats text for people (sizes, tables, progress, warnings). Also expands paths and has helpers for `with` blocks."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
import warnings
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Self

from memascend.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import TextIO


class Closing:
    """A base class for objects that close at the end of their `with` block."""

    __slots__ = ()

    @abstractmethod
    def close(self) -> None:
        """Releases all resources of the object. A second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Sets the attribute `name` of `owner` to `value` for the duration of a `with` block."""
    # If `owner` only inherits the attribute, `delattr` removes the value set here, so that `owner` inherits it again.
    is_own, own = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, own)
        else:
            delattr(owner, name)


# Packages whose frames `warn` skips, so that a warning names a line of the user's code.
_PASSED_OVER = frozenset({"memascend", "torch", "contextlib", "weakref"})


def warn(message: str) -> None:
    """Warns at the innermost line of user code on the call stack: skips frames of packages in `_PASSED_OVER`."""
    level, frame = 2, sys._getframe(1)  # noqa: SLF001
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _PASSED_OVER:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


# The largest number of names that a message lists.
_LISTED = 10


def _digits(value: float) -> str:
    """Formats a number below 1024 with three significant digits, or as a whole number if it has four."""
    return f"{value:.3g}" if value < 999.5 else f"{value:.0f}"


def bytes_shown(nbytes: int) -> str:
    """Formats a size with at most four digits, in the largest binary unit in which it is at least 1."""
    size, unit = float(nbytes), 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{nbytes} bytes" if unit == 0 else f"{_digits(size)} {_UNITS[unit]}"


def size_option(nbytes: int, *, up: bool = True) -> str:
    """Formats a size with at most four digits as options accept it, such as "2.8MiB".

    By default the size is rounded up: if a budget of `nbytes` is large enough, the shown budget is large enough, too.
    `up=False` rounds down: then a budget just below the smallest possible budget is not shown as the smallest possible
    budget.
    """
    # Options accept no unit above TiB.
    unit = min((max(1, nbytes).bit_length() - 1) // 10, 4)
    if unit == 0:
        return f"{nbytes}B"
    size = 1 << (10 * unit)
    scale = 100 if nbytes < 10 * size else 10 if nbytes < 100 * size else 1
    parts = -(-nbytes * scale // size) if up else nbytes * scale // size
    return f"{parts / scale:.15g}{_UNITS[unit]}"


def seconds_shown(seconds: float) -> str:
    """Formats a duration in s, ms, us or ns: with three significant digits, from 1,000 s on in whole seconds."""
    if seconds >= 1000:
        return f"{seconds:,.0f} s"
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * factor >= 1:
            return f"{_digits(seconds * factor)} {unit}"
    return f"{_digits(seconds * 1e9)} ns"


def duration_shown(seconds: float) -> str:
    """Formats a duration roughly, in minutes, hours or days; below a minute as `seconds_shown` does."""
    if seconds < 60:
        return seconds_shown(seconds)
    hours = seconds / 3600
    if hours < 1:
        number, unit = f"{seconds / 60:,.2g}", "minute"
    elif hours < 240:
        number, unit = f"{hours:,.2g}" if hours < 10 else f"{hours:,.0f}", "hour"
    else:
        number, unit = f"{hours / 24:,.0f}", "day"
    return f"{number} {unit}{'' if number == '1' else 's'}"


def terabytes_shown(nbytes: int) -> str:
    """Formats a size in decimal TB, GB or MB, as vendors of drives do."""
    tb = nbytes / 10**12
    if tb >= 1:
        return f"{tb:,.0f} TB" if tb >= 100 else f"{tb:.3g} TB"
    return f"{_digits(tb * 1e3)} GB" if tb >= 1e-3 else f"{_digits(tb * 1e6)} MB"


def listed(names: Sequence[str], separator: str = ", ") -> str:
    """Joins the first `_LISTED` names, and adds the number of names that are left out."""
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return separator.join(names[:_LISTED]) + more


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Formats a text table: each column is as wide as its widest cell, and columns of numbers are right-aligned."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    numeric = [all(row[column][:1].isdigit() for row in rows) for column in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = zip(row, widths, numeric, strict=True)
        return "  ".join(cell.rjust(width) if right else cell.ljust(width) for cell, width, right in cells).rstrip()

    return "\n".join([line(head), "  ".join("-" * width for width in widths), *(line(row) for row in rows)])


def counted(count: int, what: str) -> str:
    """Formats a count with its noun: "1 row", "2,000 rows"."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


_Path = str | os.PathLike[str]


def expanded(path: _Path) -> str:
    """Replaces a leading "~" or "~name" of a path by the home folder, as a shell does."""
    return os.path.expanduser(os.fspath(path))  # noqa: PTH111 (Path drops a trailing "/", which marks a folder)


def refusal_of(path: _Path) -> str | None:
    """Returns the reason why no file can have this path (a null byte, a name too long), or None if a file can."""
    try:
        os.lstat(expanded(path))
    except ValueError as error:
        return str(error)
    except OSError as error:
        # Other errors, such as a missing file, are left to the function that uses the path.
        return f"{len(os.fsencode(path))} bytes are too long" if error.errno == errno.ENAMETOOLONG else None
    return None


def paths_listed(paths: _Path | Sequence[_Path]) -> list[str]:
    """Returns one path, or several, as a list of expanded paths."""
    several = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    return [expanded(path) for path in several]


# tqdm shows its bar only if the work takes longer than this time.
_PATIENCE_SECONDS = 0.5
# The time before the first line of progress in a log, and between two lines.
_LINE_SECONDS = 15.0


class Progress(Closing):
    """Shows the progress of work that is counted in bytes, or in another unit.

    On a terminal, if tqdm is installed, `Progress` shows tqdm's bar and removes it at the end. Otherwise, as in the log
    of a batch job, it writes a line every `_LINE_SECONDS`.
    """

    def __init__(self, what: str, total: int, stream: TextIO | None = None, *, unit: str = "bytes") -> None:
        """Starts at 0 of `total` units; `what` names the work, and `stream` is standard error by default."""
        self._what = what
        self._total = total
        self._unit = unit
        # None if `sys.stderr` is None, as in a daemon: then nothing is shown.
        self._stream = sys.stderr if stream is None else stream
        self._done = 0
        self._began = self._written_at = time.monotonic()
        self._bar = self._begun_tqdm() if self._stream is not None and self._stream.isatty() else None

    def add(self, count: int) -> None:
        """Adds `count` to the number of units that are done."""
        self._done += count
        if self._bar is not None:
            self._bar.update(count)
            return
        now = time.monotonic()
        if self._stream is not None and now - self._written_at >= _LINE_SECONDS:
            self._written_at = now
            try:
                self._stream.write(f"memascend: {self._what}: {self._figures(now - self._began)}\n")
                self._stream.flush()
            except (OSError, ValueError):
                # The terminal may have been closed: `Progress` shows nothing more, and the work continues.
                self._stream = None

    def reached(self, done: int, nbytes: int) -> None:
        """Sets the number of bytes that are done, and the total. Until the first call, the total may be 0 (unknown)."""
        self._total = nbytes
        if self._bar is not None:
            self._bar.total = nbytes
        self.add(done - self._done)

    def close(self) -> None:
        """Removes the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _begun_tqdm(self) -> Any:
        try:
            from tqdm import tqdm
        except ImportError:
            return None
        size: dict[str, Any] = {"unit": f" {self._unit}"}
        if self._unit == "bytes":
            size = {"unit": "B", "unit_scale": True, "unit_divisor": 1024}
        return tqdm(total=self._total, desc=self._what, leave=False, delay=_PATIENCE_SECONDS, file=self._stream, **size)

    def _figures(self, seconds: float) -> str:
        part = min(1.0, self._done / self._total) if self._total else 1.0
        left = f", {seconds / part - seconds:.0f} s left" if part > 0 else ""
        if self._unit != "bytes":
            return f"{self._done} of {self._total} {self._unit}{left}"
        rate = bytes_shown(int(self._done / seconds)) if seconds > 0 else "-"
        return f"{bytes_shown(self._done)} of {bytes_shown(self._total)}, {rate}/s{left}"


def how_to_install(extra: str) -> str:
    """Returns the commands that install the packages of an extra from a clone or a wheel: PyPI has no memascend."""
    return f"""pip install ".[{extra}]" in a clone of memascend, or "dist/NAME.whl[{extra}]" with a wheel's name"""


# Colours in plots: of memascend's figures, and of the same training in memory.
OURS, IN_MEMORY = "#0b6bcb", "#57606a"


def open_pyplot() -> Any:
    """Imports `matplotlib.pyplot` with the Agg backend, which draws into files.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ConfigError(f"a picture needs matplotlib: {how_to_install('plot')}") from error
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    return plt
