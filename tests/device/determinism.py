"""Asks torch for deterministic GPU kernels, and names operations that have none."""

from __future__ import annotations

import contextlib

import torch


@contextlib.contextmanager
def deterministic():
    """Where torch has no deterministic kernel it raises: with a warning alone it would compute with another one.

    Attention is one of these: only so do its backwards take their deterministic ways.
    """
    torch.use_deterministic_algorithms(True, warn_only=False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def refusal(error):
    """What torch has no deterministic kernel for, where that is why an error was raised; else None."""
    while error is not None:
        if isinstance(error, RuntimeError) and "does not have a deterministic implementation" in str(error):
            return str(error).partition(",")[0]
        error = error.__cause__ or error.__context__
    return None
