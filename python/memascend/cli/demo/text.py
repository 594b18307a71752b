"""Finds training text that is on every machine: the sources of Python's standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

_TEXT_BYTES_MAX = 4 << 20


def read_text() -> torch.Tensor:
    """The bytes of Python's licence and sources, the same ones in the same order each time."""
    library = Path(sysconfig.get_path("stdlib"))
    # A Python whose library is an archive has no sources; torch has.
    files = sorted(library.glob("*.py")) or sorted(Path(torch.__file__).parent.glob("*.py"))
    text = bytearray()
    for file in [*library.glob("LICENSE*"), *files]:
        if len(text) >= _TEXT_BYTES_MAX:
            break
        text += file.read_bytes()
    return torch.frombuffer(text[:_TEXT_BYTES_MAX], dtype=torch.uint8)


def batch(text: torch.Tensor, step: int, rows: int, length: int) -> torch.Tensor:
    """What step number `step` learns from: `rows` pieces of `length` bytes, and one more byte to be foretold."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - length - 1, (rows,), generator=generator)
    return torch.stack([text[start : start + length + 1] for start in starts.tolist()]).long()
