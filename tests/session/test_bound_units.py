"""Tests units in use: failed reads, several threads, interrupted forwards."""

import threading

import pytest
import torch
from support.chains import WIDTH, batch, chain, loss_of, require_same, twins
from torch import nn

import memascend


def test_a_unit_whose_read_failed_is_read_again(tmp_path, monkeypatch):
    # At a budget that holds nothing.
    plain, _, model, optimizer = twins(tmp_path, host_memory=None)
    residency = optimizer._session.run.residency

    class Interrupted:
        def __init__(self, fetch):
            self.fetch = fetch

        def wait(self):
            raise KeyboardInterrupt

    def blank(_, into):
        into.zero_()
        return Interrupted(None)

    with optimizer, torch.no_grad():
        wanted = plain(batch())
        with monkeypatch.context() as patch:
            patch.setattr(residency._memory, "begin", blank)
            try:
                model(batch())
            except KeyboardInterrupt:
                patch.undo()
                # The traceback holds what was being read into.
                assert torch.equal(model(batch()), wanted)
            else:
                pytest.fail("nothing was read")


def test_two_threads_may_compute_at_once(tmp_path):
    class Turns(nn.Module):
        """Two modules in one unit, which different threads are in at one time."""

        def __init__(self):
            super().__init__()
            self.one = nn.Linear(WIDTH, WIDTH)
            self.two = nn.Linear(WIDTH, WIDTH)
            self.two.weight, self.two.bias = self.one.weight, self.one.bias

        def forward(self, x):
            return self.two(self.one(x))

    def make():
        torch.manual_seed(0)
        return Turns()

    plain, _, model, optimizer = twins(tmp_path, make=make)
    inside, left = threading.Event(), threading.Event()
    found = []

    def second():
        inside.wait(10)
        with torch.no_grad():
            found.append(model.two(batch()))

    def hold(*_):
        # The first thread leaves while the second is inside.
        left.wait(10)

    def enter_second(*_):
        inside.set()
        left.wait(0.2)

    model.one.register_forward_pre_hook(enter_second)
    seen = []

    def probe(module, _):
        left.set()
        if threading.current_thread() is not first and first.ident is not None:
            first.join(10)
        try:
            seen.append(torch.equal(module.weight.data, plain.two.weight))
        except memascend.UsageError as error:
            seen.append(error)

    model.two.register_forward_pre_hook(probe)
    with optimizer, torch.no_grad():
        seen.append(True)
        # Each thread is known from its first forward of the whole model.
        warm = threading.Thread(target=lambda: model(batch()))
        first = warm
        inside.set(), left.set()
        model(batch())
        warm.start()
        warm.join(20)
        inside.clear(), left.clear(), seen.clear()
        first = threading.Thread(target=lambda: model.one(batch()))
        other = threading.Thread(target=second)
        other.start()
        first.start()
        first.join(20)
        other.join(20)
        assert seen == [True], "the unit was taken away while another thread computed with it"
        assert torch.equal(found[0], plain.two(batch()))


def test_forwards_in_another_thread_do_not_fail_a_backward(tmp_path):
    plain, theirs, model, optimizer = twins(tmp_path)
    other = chain(1)

    def evaluates(gradient):
        def run():
            with torch.no_grad():
                model(batch())

        thread = threading.Thread(target=run)
        thread.start()
        thread.join(20)
        return gradient

    del other
    with optimizer:
        out = model[0](batch())
        out.register_hook(evaluates)
        loss = model[1](out)
        loss.register_hook(evaluates)
        loss.square().mean().backward()
        optimizer.step()
        loss_of(plain).backward()
        theirs.step()
        require_same(plain, model)
