"""Tests units in use: failed reads, several threads, interrupted forwards."""

import threading

import pytest
import torch
from support.chains import WIDTH, batch, loss_of, require_same, twins
from torch import nn


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


class Turns(nn.Module):
    """Two modules in one unit, which different threads are in at one time."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.two.weight, self.two.bias = self.one.weight, self.one.bias

    def forward(self, x):
        return self.two(self.one(x))


def test_a_unit_stays_until_the_last_thread_has_left_it(tmp_path):
    plain, _, model, optimizer = twins(tmp_path, make=Turns)
    known, inside, left = threading.Event(), threading.Event(), threading.Event()
    found = []

    def second():
        with torch.no_grad():
            # Each thread is known from its first forward of the whole model.
            model(batch())
            known.set()
            found.append(model.two(batch()))

    other = threading.Thread(target=second)

    def is_there(*_):
        if known.is_set() and threading.current_thread() is other:
            inside.set()
            assert left.wait(20)
            found.append(torch.equal(model.two.weight.data, plain.two.weight))

    def leaves_later(*_):
        if known.is_set() and threading.current_thread() is not other:
            assert inside.wait(20)

    model.two.register_forward_pre_hook(is_there)
    model.one.register_forward_pre_hook(leaves_later)
    with optimizer, torch.no_grad():
        model(batch())
        other.start()
        assert known.wait(20)
        model.one(batch())
        left.set()
        other.join(20)
        assert found[0] is True, "the unit was taken away while another thread computed with it"
        assert torch.equal(found[1], plain.two(batch()))


def test_forwards_in_another_thread_do_not_fail_a_backward(tmp_path):
    plain, theirs, model, optimizer = twins(tmp_path)

    def evaluates(gradient):
        def run():
            with torch.no_grad():
                model(batch())

        thread = threading.Thread(target=run)
        thread.start()
        thread.join(20)
        return gradient

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
