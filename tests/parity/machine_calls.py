"""Defines how the state machine changes gradients, reads and edits weights, and makes engine calls fail."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import re
from typing import TYPE_CHECKING

import pytest
import torch

import memascend
from memascend import StorageError
from memascend.engine import Engine

if TYPE_CHECKING:
    from collections.abc import Iterator

CALLS = ("spill", "update", "update_spilled", "apply", "take_back", "discard", "commit")


class Learned(logging.Handler):
    """A log handler that reads from the log which mode gradients="auto" has chosen after the first step."""

    mode = None

    def emit(self, record):
        found = re.match(r'gradients="auto": .*\("(fused|ssd)"\)', record.getMessage())
        self.mode = found[1] if found else self.mode


class Fuse:
    """A patch of `Engine`.

    The patch calls `kill` at one of the engine's next calls, or makes the engine's next commit fail.
    """

    def __init__(self):
        # The number of events until the fuse calls `kill`. The beginning of each call in `CALLS` is an event, and so is
        # the end of each commit. With 0, the fuse never calls `kill`.
        self.left = 0
        # If true, only the beginning and the end of a commit are events.
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

# Functions that change the gradient of a parameter.
CHANGES = {
    "scale": lambda p: p.grad.mul_(3.0).div_(7.0),
    "clamp": lambda p: p.grad.clamp_(-1e-3, 1e-3),
    "mask": lambda p: p.grad.__setitem__(torch.arange(0, len(p), 2), 0),
    "replace": lambda p: setattr(p, "grad", p.grad * 0.5),
}

# Functions that read the weights of a model. The offloaded model and the model in memory must give equal results.
READS = {
    "clones": lambda model: [p.detach().clone() for p in model.parameters()],
    "sums": lambda model: [p.float().sum() for p in model.parameters()],
    "vector": lambda model: [torch.nn.utils.parameters_to_vector(model.parameters())],
    "state dict": lambda model: [value.clone() for value in model.state_dict().values()],
    "saved": lambda model: list(_saved(model.state_dict()).values()),
    "norms": torch.no_grad()(lambda model: torch._foreach_norm(list(model.parameters()))),
    "numbers": lambda model: [torch.tensor(p.abs().max().item()) for p in model.parameters()],
    "comparisons": lambda model: [torch.tensor([torch.equal(p, p.data), bool(p.isnan().any())])
                                  for p in model.parameters()],
    "deep copy": lambda model: list(copy.deepcopy(model).parameters()),
}  # fmt: skip


def _saved(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


# Functions that return a view of a parameter, or an object that has such a view. A view of an offloaded parameter is a
# view of a copy, which would still have the old values after a step changes the parameter.
KEPT = {
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "slice": lambda p: p.detach().view(-1)[:1],
    "view": torch.no_grad()(lambda p: p.view(-1)),
    "view in a graph": lambda p: p.view(-1),
    "a graph that saved a view": lambda p: (p.view(-1) * torch.ones(p.numel(), requires_grad=True)).sum(),
    "numpy": lambda p: p.detach().view(-1).view(torch.uint8).numpy(),
    "memoryview": lambda p: memoryview(p.data.view(-1).view(torch.uint8).numpy()),
    "dlpack": lambda p: torch.from_dlpack(p.detach()),
    "storage": lambda p: p.data.untyped_storage(),
}


def _storage(p):
    p.data.untyped_storage()[0] ^= 1


# Forbidden writes to a parameter. torch dispatches these writes to the parameter's class, which raises at once.
AT_ONCE = {
    "in place": lambda p: p.add_(1),
    "operator": lambda p: p.__iadd__(1),
    "data is set": lambda p: setattr(p, "data", torch.full(p.shape, 7, dtype=p.dtype)),
    "setitem": lambda p: p.__setitem__(..., 7),
    "copy_": lambda p: p.copy_(torch.full_like(p, 7)),
    "foreach of parameters": lambda p: torch._foreach_add_([p], 1),
    "foreach copy": lambda p: torch._foreach_copy_([p], [torch.full(p.shape, 7, dtype=p.dtype)]),
    "out": lambda p: torch.add(p.detach().clone(), 1, out=p),
    "init": lambda p: torch.nn.init.constant_(p, 7),
    "vector": lambda p: torch.nn.utils.vector_to_parameters(torch.nn.utils.parameters_to_vector([p]) + 1, [p]),
    # The names of the next two functions, "relu" and "add_.Tensor", do not end with an underscore.
    "relu": lambda p: torch.nn.functional.relu(p, inplace=True),
    "aten": lambda p: torch.ops.aten.add_.Tensor(p, torch.tensor(1.0)),
}
# Forbidden writes to a copy of the parameter. The library detects such a write later, when it compares the copy with
# the copy's checksum.
COPIES = {
    "data": lambda p: p.data.add_(1),
    "detach": lambda p: p.detach().detach().view(-1)[:1].fill_(7),
    "numpy": lambda p: p.detach().view(-1).view(torch.uint8).numpy().fill(1),
    "dlpack": lambda p: torch.from_dlpack(p.detach()).fill_(7),
    "storage": _storage,
    "foreach": lambda p: torch._foreach_add_([p.data], 1),
    "view": lambda p: p.view(-1)[:1].fill_(7),
    "data of a view": lambda p: p.view(-1).data[:5].fill_(7),
    "iteration": lambda p: next(iter(p.view(-1))).fill_(7),
    "split": lambda p: p.view(-1).split(1)[0].fill_(7),
    "strided": lambda p: p.as_strided((1,), (1,)).fill_(7),
    "expand_as": lambda p: p.expand_as(p).fill_(7),
    "view as another dtype": lambda p: p.view(torch.int16 if p.element_size() == 2 else torch.int32).fill_(1),
    "graph's view": torch.enable_grad()(lambda p: p.view(-1).data.add_(1)),
    "graph's view in place": torch.enable_grad()(lambda p: torch.no_grad()(p.view(-1).add_)(1)),
}
WRITES = {name: torch.no_grad()(write) for name, write in (AT_ONCE | COPIES).items()}


def _edit_materialized(model, _optimizer, values):
    with memascend.materialized(model, modify=True), torch.no_grad():
        for name, value in values.items():
            model.get_parameter(name).copy_(value)


def _edit_replaced(model, _optimizer, values):
    with memascend.materialized(model, modify=True):
        others = {model.get_parameter(name): torch.nn.Parameter(value) for name, value in values.items()}
        for module in model.modules():
            for name, own in list(module.named_parameters(recurse=False)):
                setattr(module, name, others.get(own, own))


def _edit_by_optimizer(model, optimizer, values):
    with optimizer.edit([model.get_parameter(name) for name in values]) as given:
        for own, value in zip(given, values.values(), strict=True):
            own.copy_(value)


# Functions that set weights between steps in a permitted way. `values` maps names of parameters to new values.
EDITS = {
    "materialized": _edit_materialized,
    "replaced": _edit_replaced,
    "edit": _edit_by_optimizer,
    "load_state_dict": lambda model, _optimizer, values: model.load_state_dict(values, strict=False),
}
