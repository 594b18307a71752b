"""Ends and accidents of training on the simulated CUDA: errors, Ctrl-C, several models, forks, exits."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys

import torch
from device.simulated import runtime
from device.simulated.order import Training

# Late enough that copies are under way whenever something ends.
LATE = {"in": 3000, "out": 3000, "own": 1000}


def fails(where, gradients):
    """A step that fails is dropped, and the same step is done again."""
    with contextlib.ExitStack() as stack:
        training = Training(stack, gradients=gradients, delays=LATE)
        training.step(0)
        training.check.step = 1
        block = training.model.blocks[2]
        if where == "a backward":
            training.check.fails = f"{block.name}.weights.0"
        else:
            inner = block.forward
            block.forward = lambda *_: signal.raise_signal(signal.SIGINT) if "Ctrl-C" in where else 1 / 0
        expected = KeyboardInterrupt if "Ctrl-C" in where else ZeroDivisionError
        try:
            torch.autograd.backward((y := training.forward()), [torch.empty_like(part) for part in y])
            raise AssertionError("nothing failed")
        except expected:
            pass
        training.optimizer.zero_grad()
        training.check.fails = None
        if where != "a backward":
            block.forward = inner
        training.step(1)
        return training.compare()


def several():
    """Two models in turn, each after copies of the other were begun."""
    with contextlib.ExitStack() as stack:
        both = [Training(stack, gradients=mode, delays=LATE) for mode in ("fused", "ssd")]
        for step in range(2):
            for training in both:
                training.step(step)
        first, second = (training.compare() for training in both)
        return {key: first[key] + second[key] for key in first}


def closed_in_flight():
    """What was begun before close() comes to its end, with what was there."""
    with contextlib.ExitStack() as stack:
        training = Training(stack, gradients="fused", delays=LATE)
        training.step(0)
        training.check.step = 1
        with torch.no_grad():
            training.forward()
        training.optimizer.close()
        training.check.compare()
        return {"checked": training.check.checked, "wrong": training.check.wrong, "faults": runtime.faults()}


def closed_in_an_update(gradients):
    """What is on its way to the host when updates are dropped ends before the memory that it goes to does."""
    with contextlib.ExitStack() as stack:
        training = Training(stack, gradients=gradients)
        training.step(0)
        training.check.step = 1
        found = training.forward()
        runtime.delay(training.streams["out"], 300_000)
        torch.autograd.backward(found, [torch.empty_like(y) for y in found])
        training.optimizer.close()
        stack.pop_all()
        del training.model, training.optimizer, found
        gc.collect()
        training.check.compare()
        return {"checked": training.check.checked, "wrong": training.check.wrong, "faults": runtime.faults()}


def forked():
    """A child that ends has no part in the parent's device."""
    with contextlib.ExitStack() as stack:
        training = Training(stack, gradients="fused", delays=LATE)
        training.step(0)
        training.check.step = 1
        found = training.forward()
        child = os.fork()
        if child == 0:
            # As a data loader's worker ends: nothing is closed by hand, and nothing may hang.
            del training, found
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        torch.autograd.backward(found, [torch.empty_like(y) for y in found])
        training.commit(1)
        return training.compare()


def accumulated(batches=(None, None, None), steps=3, *, delays=None, **options):
    """Micro-batches by layer: each by a thread of its own from the second step on, without the block that it names."""
    with contextlib.ExitStack() as stack:
        training = Training(stack, delays={"in": 1000} if delays is None else delays, **options)

        def loss_of(but):
            # Its backward begins with ones of its shape.
            return sum(y[:1].view(()) for y in training.forward(but))

        for step in range(steps):
            training.check.step = step
            training.optimizer.accumulate(loss_of, batches)
            training.commit(step, batches)
        course = training.optimizer._session.accumulation
        return {**training.compare(), "by_layer": course.never or course._course is not None}


def clipped(**options):
    """Updates begin before step() has the norm; some are discarded, and made anew from what was written."""
    runtime.LOUD.update((2, 5))
    with contextlib.ExitStack() as stack:
        training = Training(stack, gradients="auto", max_grad_norm=10_000.0, **options)
        for step in range(7):
            training.step(step)
        return {**training.compare(), "early": training.optimizer.report().to_dict().get("early")}


def left():
    """Ends while copies are under way, and nothing was closed."""
    training = Training(contextlib.ExitStack(), gradients="fused", delays=LATE)
    training.step(0)
    training.check.step = 1
    globals()["kept"] = training, training.forward()
    return "fine"
