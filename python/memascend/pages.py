"""Pages: what direct I/O, pinned memory and slots are counted in."""

from __future__ import annotations

__all__ = ["PAGE_BYTES", "whole_pages"]

PAGE_BYTES = 4096


def whole_pages(nbytes: int) -> int:
    """So many bytes, rounded up to whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
