"""Shows a progress bar on standard error where that is a terminal."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from memascend.closing import Closing
from memascend.formatting import bytes_shown

if TYPE_CHECKING:
    from typing import TextIO

__all__ = ["Progress"]

_WIDTH = 30
# Work that is done sooner shows nothing, and a terminal is not written to more often than eyes follow.
_PATIENCE_SECONDS, _REDRAW_SECONDS = 0.5, 0.1


class Progress(Closing):
    """How many of so many bytes are done. The line is gone at the end."""

    def __init__(self, what: str, nbytes: int, stream: TextIO | None = None) -> None:
        """Begin; `stream` is standard error where None."""
        self._what = what
        self._nbytes = nbytes
        self._stream = sys.stderr if stream is None else stream
        # None where a daemon has closed it.
        self._on = self._stream is not None and self._stream.isatty()
        self._done = 0
        self._began = time.monotonic()
        self._drawn_at = self._began + _PATIENCE_SECONDS - _REDRAW_SECONDS
        self._drawn = False

    def add(self, nbytes: int) -> None:
        """So many more bytes are done."""
        self._done += nbytes
        now = time.monotonic()
        if self._on and now - self._drawn_at >= _REDRAW_SECONDS:
            self._drawn_at = now
            self._draw(now - self._began)

    def close(self) -> None:
        """Take the line away."""
        if self._drawn:
            self._drawn = False
            self._write("\r\x1b[K")

    def _draw(self, seconds: float) -> None:
        part = min(1.0, self._done / self._nbytes) if self._nbytes else 1.0
        full = int(part * _WIDTH)
        rate = bytes_shown(int(self._done / seconds)) if seconds > 0 else "-"
        left = f", {seconds / part - seconds:.0f} s left" if part > 0 else ""
        bar = "#" * full + "." * (_WIDTH - full)
        self._drawn = True
        self._write(
            f"\r\x1b[K{self._what} [{bar}] {bytes_shown(self._done)} of {bytes_shown(self._nbytes)}, {rate}/s{left}"
        )

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            # A terminal that went away must not end the work.
            self._on = False
