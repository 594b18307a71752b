"""Tests units in use: failed reads, several threads, interrupted forwards."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.chains import batch, chain, loss_of, require_same, twins


def test_a_unit_whose_read_failed_is_read_again(tmp_path, monkeypatch):
    # At a budget that holds nothing.
    plain, _, model, optimizer = twins(tmp_path, host_memory=None)
    residency = optimizer._session.run.residency

    class Interrupted:
        def __init__(self, fetch):
            self.fetch = fetch

        def wait(self):
            raise KeyboardInterrupt

    def blank(_, into, **__):
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


def turns():
    """Two modules in one unit, which different threads are in at one time."""
    model = chain(bias=True)
    model[1].weight, model[1].bias = model[0].weight, model[0].bias
    return model


def test_a_unit_stays_until_the_last_thread_has_left_it(tmp_path):
    plain, _, model, optimizer = twins(tmp_path, make=turns)
    known, inside, left = threading.Event(), threading.Event(), threading.Event()
    found = []

    def second():
        with torch.no_grad():
            # Each thread is known from its first forward of the whole model.
            model(batch())
            known.set()
            found.append(model[1](batch()))

    other = threading.Thread(target=second)

    def is_there(*_):
        if known.is_set() and threading.current_thread() is other:
            inside.set()
            assert left.wait(20)
            found.append(torch.equal(model[1].weight.data, plain[1].weight))

    def leaves_later(*_):
        if known.is_set() and threading.current_thread() is not other:
            assert inside.wait(20)

    model[1].register_forward_pre_hook(is_there)
    model[0].register_forward_pre_hook(leaves_later)
    with optimizer, torch.no_grad():
        model(batch())
        other.start()
        assert known.wait(20)
        model[0](batch())
        left.set()
        other.join(20)
        assert found[0] is True, "the unit was taken away while another thread computed with it"
        assert torch.equal(found[1], plain[1](batch()))


def test_forwards_in_another_thread_do_not_fail_a_backward(tmp_path):
    plain, theirs, model, optimizer = twins(tmp_path)

    @torch.no_grad()
    def evaluate():
        model(batch())

    def evaluates(gradient):
        ThreadPoolExecutor(1).submit(evaluate).result(20)
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
