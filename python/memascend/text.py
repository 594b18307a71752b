"""Formats what people read and give: sizes, tables, progress, pictures, paths; closes what has a `with` block."""

from __future__ import annotations

import errno
import os
import sys
import time
import warnings
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Self

from memascend.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TextIO


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


_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


# Names of a kind that a message lists.
_LISTED = 10


def bytes_shown(nbytes: int) -> str:
    """A size in the largest binary unit that leaves at least 1, with three digits."""
    size, unit = float(nbytes), 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return (
        f"{nbytes} bytes"
        if unit == 0
        else f"{size:.3g} {_UNITS[unit]}"
        if size < 1000
        else f"{size:.0f} {_UNITS[unit]}"
    )


def seconds_shown(seconds: float) -> str:
    """A duration in s, ms, us or ns, with three digits."""
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def listed(names: Sequence[str], separator: str = ", ") -> str:
    """The first ten of the names, and how many more there are."""
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return separator.join(names[:_LISTED]) + more


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their content; those that hold numbers are aligned to the right."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    numeric = [all(row[column][:1].isdigit() for row in rows) for column in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = zip(row, widths, numeric, strict=True)
        return "  ".join(cell.rjust(width) if right else cell.ljust(width) for cell, width, right in cells).rstrip()

    return "\n".join([line(head), "  ".join("-" * width for width in widths), *(line(row) for row in rows)])


def counted(count: int, what: str) -> str:
    """A number of things: "1 row", "2,000 rows"."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


_Path = str | os.PathLike[str]


def expanded(path: _Path) -> str:
    """The path with a leading "~" or "~name" replaced, as a shell does it where it sees the path."""
    return os.path.expanduser(os.fspath(path))  # noqa: PTH111 (a trailing "/" says that it is a folder)


def refusal_of(path: _Path) -> str | None:
    """Why no file of the system can have this path; None where one can."""
    try:
        os.lstat(expanded(path))
    except ValueError as error:
        return str(error)
    except OSError as error:
        # What else is wrong with it depends on what it is for.
        return f"{len(os.fsencode(path))} bytes are too long" if error.errno == errno.ENAMETOOLONG else None
    return None


def paths_listed(paths: _Path | Sequence[_Path]) -> list[str]:
    """One path or several."""
    several = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    return [expanded(path) for path in several]


_WIDTH = 30


# Work that is done sooner shows nothing, and a terminal is not written to more often than eyes follow.
_PATIENCE_SECONDS, _REDRAW_SECONDS = 0.5, 0.1


# A log gets a line so often, and none of what is done before the first.
_LINE_SECONDS = 15.0


class Progress(Closing):
    """How many of so many bytes, or of other units, are done.

    In a terminal or a notebook it is tqdm's bar where tqdm is installed, and in a terminal one of our own otherwise;
    it is gone at the end. Anywhere else, as in the log of a batch job, a line is written every quarter of a minute.
    """

    def __init__(self, what: str, total: int, stream: TextIO | None = None, *, unit: str = "bytes") -> None:
        """Begin; `stream` is standard error where None."""
        self._what = what
        self._total = total
        self._unit = unit
        self._ours = stream is None
        self._stream = sys.stderr if stream is None else stream
        self._notebook = stream is None and _in_notebook()
        # None where a daemon has closed it.
        self._on = self._stream is not None
        self._bars = self._notebook or (self._on and self._stream.isatty())
        self._done = 0
        self._began = time.monotonic()
        wait = _PATIENCE_SECONDS - _REDRAW_SECONDS if self._bars else 0.0
        self._drawn_at = self._began + wait
        self._drawn = False
        self._tqdm: Any = None

    def add(self, count: int) -> None:
        """So many more are done."""
        self._done += count
        if not self._on:
            return
        now = time.monotonic()
        if now - self._drawn_at >= (_REDRAW_SECONDS if self._bars else _LINE_SECONDS):
            self._drawn_at = now
            if self._bars:
                self._draw(now - self._began)
            else:
                self._write(f"memascend: {self._what}: {self._figures(now - self._began)}\n")

    def reached(self, done: int, nbytes: int) -> None:
        """So many bytes are done, of so many in all, which the beginning need not have known."""
        self._total = nbytes
        self.add(done - self._done)

    def close(self) -> None:
        """Take the bar away."""
        if self._tqdm is not None:
            self._tqdm.close()
            self._tqdm = None
        elif self._drawn:
            self._write("\r\x1b[K")
        self._drawn = False

    def _draw(self, seconds: float) -> None:
        if not self._drawn and self._ours:
            self._tqdm = self._begun_tqdm()
        self._drawn = True
        if self._tqdm is not None:
            self._tqdm.total = self._total
            self._tqdm.update(self._done - self._tqdm.n)
            return
        full = int(self._part * _WIDTH)
        bar = "#" * full + "." * (_WIDTH - full)
        self._write(f"\r\x1b[K{self._what} [{bar}] {self._figures(seconds)}")

    def _begun_tqdm(self) -> Any:
        try:
            from tqdm.auto import tqdm
        except ImportError:
            return None
        size: dict[str, Any] = {"unit": f" {self._unit}"}
        if self._unit == "bytes":
            size = {"unit": "B", "unit_scale": True, "unit_divisor": 1024}
        with warnings.catch_warnings():
            # A notebook without widgets gets tqdm's bar of text.
            warnings.simplefilter("ignore")
            bar = tqdm(total=self._total, desc=self._what, leave=False, **size)
        # What was done before the bar was there counts in its speed.
        bar.start_t -= time.monotonic() - self._began
        return bar

    @property
    def _part(self) -> float:
        return min(1.0, self._done / self._total) if self._total else 1.0

    def _figures(self, seconds: float) -> str:
        left = f", {seconds / self._part - seconds:.0f} s left" if self._part > 0 else ""
        if self._unit != "bytes":
            return f"{self._done} of {self._total} {self._unit}{left}"
        rate = bytes_shown(int(self._done / seconds)) if seconds > 0 else "-"
        return f"{bytes_shown(self._done)} of {bytes_shown(self._total)}, {rate}/s{left}"

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            # A terminal that went away must not end the work.
            self._on = False


def _in_notebook() -> bool:
    """Whether this process is the kernel of one, which has no terminal and shows bars all the same."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and type(shell).__name__ == "ZMQInteractiveShell"


# In every picture: what memascend has, and what the same training has in memory.
OURS, IN_MEMORY = "#0b6bcb", "#57606a"


def open_pyplot() -> Any:
    """`matplotlib.pyplot`, which draws into files and opens no window.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ConfigError("a picture needs matplotlib: pip install 'memascend[plot]'") from error
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    return plt
