"""Provides fixtures: a small offloaded model that is closed after the test, and a check that a call changed nothing."""

import contextlib

import pytest
import torch
from parity.harness import adamw
from parity.zoo_plain import Stack, next_token, tokens
from support.bits import same_states
from support.chains import smallest, step
from support.disks import faulty

import memascend

__all__ = ["faulty"]


class Training:
    """An offloaded model, the model's optimizer, and batches to train with."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.batches = tokens(torch.Generator().manual_seed(5))

    def loss(self, index=0):
        return next_token(self.model, self.batches[index])

    def step(self, index=0):
        step(self.model, self.optimizer, self.batches[index], next_token)

    def weights(self):
        """Returns copies of the committed weights."""
        with memascend.materialized(self.model):
            return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    @contextlib.contextmanager
    def keeps_weights(self):
        """Requires that the block changes no committed weight."""
        before = self.weights()
        yield
        assert same_states(before, self.weights())


@pytest.fixture
def offloaded(tmp_path):
    """Returns a function that offloads a model, by default a small stack with AdamW, to the file run.store.

    With host_memory="smallest", the function uses the smallest budget that works. A BudgetError of `offload()` names
    this budget.
    """
    made = []

    def make(model=None, optimizer=None, *, steps=0, **options):
        torch.manual_seed(4)
        model = Stack() if model is None else model
        optimizer = adamw(model) if optimizer is None else optimizer
        given = {"storage": tmp_path / "run.store", "host_memory": "64MiB", **options}
        if given["host_memory"] == "smallest":
            del given["host_memory"]
            other = {**given, "storage": tmp_path / "none.store", "existing": "refuse"}
            given["host_memory"] = smallest(memascend.offload, model, optimizer, **other)
        training = Training(*memascend.offload(model, optimizer, **given))
        made.append(training)
        for index in range(steps):
            training.step(index)
        return training

    yield make
    for training in made:
        training.optimizer.close()


@pytest.fixture
def unchanged():
    """Returns `remember`, which records a model, an optimizer and a file.

    `remember` returns a function `check`, which requires that the model, the optimizer and the file have not changed.
    """

    def remember(model, optimizer, storage=None):
        def picture():
            return (
                {name: (type(p), p.detach().clone()) for name, p in model.named_parameters()},
                [{**group, "params": [id(p) for p in group["params"]]} for group in optimizer.param_groups],
                [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()],
                storage.read_bytes() if storage and storage.exists() else None,
            )

        before = picture()

        def check():
            weights, *rest = picture()
            assert weights.keys() == before[0].keys()
            for name, (kind, values) in weights.items():
                assert kind is before[0][name][0]
                assert torch.equal(values, before[0][name][1]), name
            assert rest == list(before[1:])

        return check

    return remember
