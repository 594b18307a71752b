"""Creates and destroys a run's own gloo groups, over which its ranks exchange messages and rows."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from memascend.errors import RankError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["bytes_of", "let_go", "make_group"]


def make_group(timeout: float, ranks: Sequence[int] | None = None) -> Any:
    """A group; all ranks make it together.

    Args:
        timeout: seconds that one waits for another.
        ranks: in their order; None: all.

    Raises:
        RankError: they do not meet; torch does not say who is missing.
    """
    members = None if ranks is None else list(ranks)
    try:
        return distributed.new_group(members, backend="gloo", timeout=timedelta(seconds=timeout))
    except RuntimeError as error:
        why = str(error).splitlines()[0][:200]
        raise RankError(
            f"a rank is gone, or did not come within {timeout:g} s, before all ranks could talk; nothing was changed "
            f"({why})",
            ranks=(),
        ) from error


def let_go(group: Any) -> None:
    """Leave a group; who waits in it for this rank waits no longer. None, and twice, are fine."""
    if group is not None:
        # Of what the user destroyed nothing is left.
        with contextlib.suppress(ValueError, AssertionError):
            distributed.destroy_process_group(group)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's memory, as gloo moves it."""
    return tensor.reshape(-1).view(torch.uint8)
