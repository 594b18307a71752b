"""Rounds sizes to pages, the unit of direct I/O and pinned memory."""

from __future__ import annotations

PAGE_BYTES = 4096


def whole_pages(nbytes: int) -> int:
    """So many bytes, rounded up to whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
