"""Creates and destroys a run's own gloo groups, over which its ranks exchange messages and rows."""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from memascend.errors import RankError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["bytes_of", "let_go", "make_group"]

# How often who waits for others looks for them.
_LOOK_SECONDS = 0.01
# How long those that did not meet are waited for: each has waited as long as the others.
_SECONDS_AFTER = 5.0
# Of the groups of this process; ranks make them together.
_numbers = count()


def make_group(timeout: float, ranks: Sequence[int] | None = None) -> Any:
    """A group; all ranks make it together.

    gloo does not say who is missing, so the ranks look for each other first, over the store that torch's own group was
    made with, and once more where they did not meet all the same.

    Args:
        timeout: seconds that one waits for another.
        ranks: in their order; None: all.

    Raises:
        RankError: they do not meet; it names who is missing, unless the store is gone, too.
    """
    members = None if ranks is None else list(ranks)
    number = next(_numbers)
    missing: tuple[int, ...] = ()
    try:
        missing = _missing(number, "begins", timeout)
        if not missing:
            return distributed.new_group(members, backend="gloo", timeout=timedelta(seconds=timeout))
        why = "it did not come"
    except RuntimeError as error:
        why = str(error).splitlines()[0][:200]
        with contextlib.suppress(RuntimeError):
            missing = _missing(number, "fails", min(timeout, _SECONDS_AFTER))
    named = ", ".join(f"rank {rank}" for rank in missing) or "a rank"
    raise RankError(
        f"{named} is gone, or did not come within {timeout:g} s, before all ranks could talk; nothing was changed "
        f"({why})",
        ranks=missing,
    )


def _missing(number: int, moment: str, seconds: float) -> tuple[int, ...]:
    """The ranks that do not come to this moment of making a group within so many seconds."""
    store = distributed.distributed_c10d._get_default_store()  # noqa: SLF001
    keys = [f"memascend/{number}/{moment}/{rank}" for rank in range(distributed.get_world_size())]
    store.set(keys[distributed.get_rank()], "here")
    until = time.monotonic() + seconds
    while not store.check(keys):
        if time.monotonic() > until:
            return tuple(rank for rank, key in enumerate(keys) if not store.check([key]))
        time.sleep(_LOOK_SECONDS)
    return ()


def let_go(group: Any) -> None:
    """Leave a group; who waits in it for this rank waits no longer. None, and twice, are fine."""
    if group is not None:
        # Of what the user destroyed nothing is left.
        with contextlib.suppress(ValueError, AssertionError):
            distributed.destroy_process_group(group)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's memory, as gloo moves it."""
    return tensor.reshape(-1).view(torch.uint8)
