"""Runs a trial of an optimizer without random numbers, and without compiling what it compiles."""

from __future__ import annotations

import contextlib
import random
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memascend.errors import ConfigError
from memascend.optimizers.clone import named

if TYPE_CHECKING:
    from collections.abc import Iterator


class _Draws(TorchDispatchMode):
    """Refuses operations that draw random numbers, whatever their tensors lie on."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled in a trial; to say so to torch's compiler would load it, which takes seconds.
        return False

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._optimizer = optimizer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A generator that the step makes itself begins alike for each parameter.
        if torch.Tag.nondeterministic_seeded in func.tags and (kwargs or {}).get("generator") is None:
            raise _refused(self._optimizer)
        return func(*args, **(kwargs or {}))


def _refused(optimizer: torch.optim.Optimizer) -> ConfigError:
    return ConfigError(
        f"{named(optimizer)} cannot run on streamed state: its step draws random numbers, which streamed parameters "
        "would get in another order than torch's; use an optimizer that draws none"
    )


@contextlib.contextmanager
def undrawn(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Refuse an optimizer that draws random numbers; those of torch, Python and numpy stay as they are."""
    numpy: Any = sys.modules.get("numpy")
    before = random.getstate()
    theirs: Any = numpy.random.get_state() if numpy else None
    try:
        with torch.random.fork_rng(devices=[]), _Draws(optimizer):
            yield
        drawn = random.getstate() != before or (numpy is not None and numpy.random.get_state()[2] != theirs[2])
    finally:
        random.setstate(before)
        if numpy is not None:
            numpy.random.set_state(theirs)
    if drawn:
        raise _refused(optimizer)


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Let functions that a step compiles run as they are written: for small tensors compiling would take minutes."""
    # Where it is not loaded, nothing was compiled yet, and loading it takes seconds.
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
