"""Formats sizes, durations and plain tables for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

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
