"""Numbers and words that all ranks have to know of each other: sums, flags, what each has found."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from memascend.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import TypeVar

    from memascend.errors import MemascendError

    _T = TypeVar("_T")

__all__ = ["Figures"]


class Figures:
    """What ranks tell each other, over a group of processes of its own, on the CPU.

    Every call is made by all ranks, and waits for all.
    """

    def __init__(self, timeout: float) -> None:
        """`timeout` is how many seconds a rank waits for the others."""
        self._group: Any = distributed.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        self.rank = distributed.get_rank()
        self.world_size = distributed.get_world_size()

    def totals(self, *numbers: float) -> list[float]:
        """The sum over all ranks of each number, added in the order of ranks: the same bits on each."""
        mine = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        all_of_them = [torch.empty_like(mine) for _ in range(self.world_size)]
        distributed.all_gather(all_of_them, mine, group=self._group)
        return [sum(column) for column in zip(*(row.tolist() for row in all_of_them), strict=True)]

    def any(self, flag: bool) -> bool:
        """Whether it is so on some rank."""
        return self.totals(float(flag))[0] > 0

    def union(self, words: Iterable[str]) -> set[str]:
        """What any rank says."""
        return {word for theirs in self.everyone(sorted(words)) for word in theirs}

    def together(self, do: Callable[[], _T], other: type[MemascendError] = ConfigError) -> _T:
        """Do what may be refused. Where one rank's is, no rank goes on, and each says whose it was.

        Raises:
            MemascendError: another rank refused; of the class `other`.
        """
        refused: Exception | None = None
        done: Any = None
        try:
            done = do()
        except Exception as error:  # noqa: BLE001 - handed on below
            refused = error
        told = self.everyone(None if refused is None else f"{type(refused).__name__}: {refused}")
        if refused is not None:
            raise refused
        for rank, words in enumerate(told):
            if words is not None:
                raise other(f"rank {rank} refused, and so do all ranks: {words}")
        found: _T = done
        return found

    def everyone(self, mine: Any) -> list[Any]:
        """What each rank says, in the order of ranks."""
        found: list[Any] = [None] * self.world_size
        distributed.all_gather_object(found, mine, group=self._group)
        return found
