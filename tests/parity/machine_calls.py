"""What the rules of the state machine do to gradients and weights; and a fuse in the calls of the engine."""

from __future__ import annotations

import contextlib
import logging
import re
from typing import TYPE_CHECKING

import pytest
import torch

from memascend import StorageError
from memascend.engine import Engine

if TYPE_CHECKING:
    from collections.abc import Iterator

CALLS = ("spill", "update", "update_spilling", "update_spilled", "apply", "take_back", "discard", "commit")


class Learned(logging.Handler):
    """How gradients wait from now on, as the log says it after the first step of "auto"."""

    mode = None

    def emit(self, record):
        found = re.match(r'gradients="auto": .*\("(fused|ssd)"\)', record.getMessage())
        self.mode = found[1] if found else self.mode


class Fuse:
    """Stands in the calls of every engine: kills at one of the next, or lets the next commit fail."""

    def __init__(self):
        self.left = 0
        # Only before and after commits.
        self.at_commits = False
        self.kill = None
        self.fails = False
        self.commits = 0
        self.learned = Learned()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patched:
            for name in CALLS:
                patched.setattr(Engine, name, self._watched(name, getattr(Engine, name)))
            log, level = logging.getLogger("memascend"), logging.getLogger("memascend").level
            log.setLevel(logging.INFO)
            log.addHandler(self.learned)
            try:
                yield
            finally:
                log.removeHandler(self.learned)
                log.setLevel(level)

    def _watched(self, name, own):
        def call(engine, *arguments, **options):
            self._burn(name, "before")
            if name == "commit" and self.fails:
                self.fails = False
                raise StorageError("no room")
            found = own(engine, *arguments, **options)
            if name == "commit":
                self.commits += 1
                self._burn(name, "after")
            return found

        return call

    def _burn(self, name, when):
        if self.left and (name == "commit" or not self.at_commits):
            self.left -= 1
            if not self.left and self.kill:
                self.kill(when)


FUSE = Fuse()

# Of a parameter, to its gradient.
CHANGES = {
    "scale": lambda p: p.grad.mul_(3.0).div_(7.0),
    "clamp": lambda p: p.grad.clamp_(-1e-3, 1e-3),
    "mask": lambda p: p.grad.__setitem__(torch.arange(0, len(p), 2), 0),
    "replace": lambda p: setattr(p, "grad", p.grad * 0.5),
}

# Of a model: what has to be the same in memory.
READS = {
    "clones": lambda model: [p.detach().clone() for p in model.parameters()],
    "sums": lambda model: [p.float().sum() for p in model.parameters()],
    "vector": lambda model: [torch.nn.utils.parameters_to_vector(model.parameters())],
    "state dict": lambda model: [value.clone() for value in model.state_dict().values()],
    "norms": torch.no_grad()(lambda model: torch._foreach_norm(list(model.parameters()))),
}

# Of a parameter: what writes to it past the doors.
WRITES = {
    "in place": torch.no_grad()(lambda p: p.add_(1)),
    "data": lambda p: p.data.add_(1),
    "data is set": lambda p: setattr(p, "data", torch.full(p.shape, 7, dtype=p.dtype)),
    "view": lambda p: p.detach().view(-1)[:1].fill_(7),
    "numpy": lambda p: p.detach().view(-1).view(torch.uint8).numpy().fill(1),
    "foreach": lambda p: torch._foreach_add_([p.data], 1),
}
