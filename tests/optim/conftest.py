"""Simulates the engine: an optimizer updates one parameter in parts or as a whole. Values and state are in memory."""

from types import SimpleNamespace

import pytest
import torch

from memascend.optim import generic
from memascend.optim.comparison import PLAIN
from memascend.optim.state import StateTrials

CHUNK = 2048


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    """Limits torch to one thread, because torch's results in 16 bits depend on the number of threads."""


def layout_of(optimizer, parameter, master_dtype=torch.float32):
    """Returns the layout of the state that `optimizer` keeps for `parameter`."""
    group = next(at for at, one in enumerate(optimizer.param_groups) if any(parameter is p for p in one["params"]))
    return StateTrials(optimizer, master_dtype).layout(group, parameter)


def update_of(optimizer, group, layout, *, first, **given):
    """Returns the update function that the engine would call. The function runs the optimizer's own code.

    `group` is one of the optimizer's groups.
    """
    number = next(at for at, one in enumerate(optimizer.param_groups) if one is group)
    runs = generic.Runs(optimizer, {}, PLAIN, 0)
    return runs.update("w", number, layout, generic.Given(**given), layout.dtype, first=first)[0]


class Streamed:
    """A parameter whose values and state are in memory. Each step updates it in parts or whole, as the engine does."""

    def __init__(self, optimizer, parameter, master_dtype, chunk=CHUNK):
        self.layout = layout_of(optimizer, parameter, master_dtype)
        self.chunk = chunk
        self.values = self.flat(parameter.detach())
        given, self.updates = generic.import_state(optimizer, parameter, self.layout)
        # The number 77 stands for state that the optimizer has not written yet. If an update read this state, its
        # result would be wrong.
        self.state = {
            name: self.flat(given[name]) if name in given else torch.full(tensor.shape, 77).to(tensor.dtype)
            for name, tensor in self.layout.tensors.items()
        }
        self.state = {name: tensor if tensor.dim() == 0 else self.flat(tensor) for name, tensor in self.state.items()}
        if self.layout.master:
            self.state["master"] = self.values.to(self.layout.dtype)

    def flat(self, tensor):
        if tensor.shape == self.layout.shape:
            laid = torch.empty_strided(self.layout.shape, self.layout.stride, dtype=tensor.dtype).copy_(tensor)
            return laid.as_strided((tensor.numel(),), (1,))
        return tensor.detach().clone()

    def shaped(self, tensor):
        return tensor.as_strided(self.layout.shape, self.layout.stride)

    def apply(self, function, gradient, whole):
        parted = {name for name, tensor in self.layout.tensors.items() if tensor.shape == self.layout.shape}
        numel = self.values.numel()
        size = numel if whole else self.chunk
        for start in range(0, max(1, numel), max(1, size)):
            end = min(numel, start + size)

            def part(tensor, start=start, end=end):
                return tensor.reshape(-1)[start:end]

            gradients = None if gradient is None or gradient.is_sparse else part(self.flat(gradient))
            state = {name: part(tensor) if name in parted else tensor for name, tensor in self.state.items()}
            function(
                SimpleNamespace(
                    values=part(self.values),
                    gradient=gradients,
                    state=state,
                    start=start,
                    count=end - start,
                    last=end == numel,
                )
            )

    def step(self, optimizer, group, gradient, *, whole=None, **options):
        whole = self.layout.whole if whole is None else whole
        if gradient.is_sparse:
            options["sparse"], whole = gradient, True
        self.apply(update_of(optimizer, group, self.layout, first=self.updates == 0, **options), gradient, whole)
        self.updates += 1
