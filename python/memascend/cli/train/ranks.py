"""Lets the processes that torchrun starts train one model together."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from memascend.closing import Closing
from memascend.errors import ConfigError, RankError
from memascend.run.optimizer import session_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeVar

    from memascend.cli.train.settings import Settings
    from memascend.run.optimizer import OffloadedOptimizer

    _T = TypeVar("_T")

# How long ranks wait for each other while they look at data and model: they have about the same to read.
_TIMEOUT_SECONDS = 3600.0
_NEEDED = ("RANK", "MASTER_ADDR", "MASTER_PORT")


class Ranks(Closing):
    """The processes of one run, and which one this is.

    Micro-batch j W + r of a step is that of rank r in round j, of W ranks.

    Attributes:
        rank: the number of this process; 0 tells and writes.
        count: how many there are.
    """

    def __init__(self) -> None:
        """Meet those that torchrun started, if it did.

        Raises:
            ConfigError: they are several, and something else than torchrun started this one.
            RankError: they do not meet.
        """
        self.rank, self.count = 0, _number("WORLD_SIZE", 1)
        if self.count < 1:
            raise ConfigError(f"WORLD_SIZE is {self.count}, and a run has at least one process: unset it")
        self._figures: Any = None
        if self.count == 1:
            return
        missing = [name for name in _NEEDED if not os.environ.get(name)]
        if missing:
            raise ConfigError(
                f"WORLD_SIZE is {self.count}, and {missing[0]} is not set: start several ranks by torchrun "
                f"--nproc-per-node {self.count} -m memascend train, or unset WORLD_SIZE"
            )
        rank = _number("RANK", 0)
        if not 0 <= rank < self.count:
            raise ConfigError(f"RANK is {rank} of WORLD_SIZE {self.count}: start the ranks by torchrun")
        _number("MASTER_PORT", 0)
        # One process needs nothing of these.
        from memascend.ranks.exchange import Exchange
        from memascend.ranks.figures import Figures

        try:
            torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
            self._figures = Figures(Exchange(_TIMEOUT_SECONDS))
        except RuntimeError as error:
            raise RankError(f"the {self.count} ranks of this run do not meet: {error}", ranks=()) from error
        self.rank = self._figures.rank

    def of_this(self, settings: Settings) -> Settings:
        """The settings as this rank has them: each computes on a device of its own.

        Raises:
            ConfigError: they do not go with so many ranks.
        """
        if self.count == 1:
            return settings
        if settings.accumulate % self.count:
            raise ConfigError(
                f"--accumulate {settings.accumulate} is not divisible by {self.count} ranks, which share the batches "
                "of a step: give a multiple, or start another number of ranks"
            )
        device = settings.device or ("cuda" if torch.cuda.is_available() else "cpu")
        if device.startswith("cuda:"):
            raise ConfigError(f"--device {device} is one device, and {self.count} ranks compute: give --device cuda")
        if device == "cuda":
            local = _number("LOCAL_RANK", 0)
            torch.cuda.set_device(local)
            device = f"cuda:{local}"
        return replace(settings, device=device)

    # --- whose is what -----------------------------------------------------------------

    def numbers(self, count: int) -> range:
        """The micro-batches of this rank among so many; all ranks have as many, the last ones of some are not there."""
        return range(self.rank, -(-count // self.count) * self.count, self.count)

    def in_order(self, mine: Sequence[float], count: int) -> list[float]:
        """What each of `count` micro-batches has, in their order; `mine` are those of `numbers()`."""
        told = self.everyone(list(mine))
        return [told[number % self.count][number // self.count] for number in range(count)]

    # --- talking -----------------------------------------------------------------------

    def everyone(self, mine: Any) -> list[Any]:
        """What each rank says, a JSON value, in the order of ranks."""
        return [mine] if self._figures is None else list(self._figures.everyone(mine))

    def together(self, do: Callable[[], _T]) -> _T:
        """Do what may fail. Where it does on one rank, all raise, and each says whose it was."""
        if self._figures is None:
            return do()
        done: _T = self._figures.together(do)
        return done

    def note(self, text: str) -> None:
        """Say something while there is no display yet: the first rank, on standard error."""
        if not self.rank and sys.stderr is not None:
            print(f"memascend train: {text}", file=sys.stderr, flush=True)

    def say(self, text: str, *, as_json: bool) -> None:
        """Say something when there is no display any more: the first rank; standard output may be for JSON alone."""
        if not self.rank:
            print(text, file=sys.stderr if as_json else sys.stdout, flush=True)

    def talk_through(self, optimizer: OffloadedOptimizer) -> None:
        """Talk as the run itself does from now on, so that what fails in one is heard in the other."""
        figures = session_of(optimizer).figures
        if self._figures is not None and figures is not None:
            self._figures.close()
            self._figures = figures

    def divide_nothing(self, model: torch.nn.Module) -> None:
        """Let gradients be sums: the loss is divided by the tokens of all ranks, as one process divides it."""
        if self.count > 1:
            from torch.distributed.fsdp import FSDPModule

            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_gradient_divide_factor(1.0)

    def close(self) -> None:
        """Leave the others."""
        if self._figures is not None:
            self._figures.close()
            self._figures = None
        if self.count > 1 and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _number(name: str, default: int) -> int:
    """A number of the environment, as torchrun sets it."""
    value = os.environ.get(name) or default
    try:
        return int(value)
    except ValueError as error:
        raise ConfigError(
            f"{name} is {value!r} in the environment, and no number: start several ranks by torchrun, or unset it"
        ) from error
