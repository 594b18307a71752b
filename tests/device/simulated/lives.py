"""Trains on the simulated CUDA in runs with errors, Ctrl-C, several models, forks, and exits of the process."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import os
import signal
import sys
import threading

import torch
from device.simulated import runtime
from device.simulated.order import ACTIVATION, Training, begun

import memascend
from memascend.activations.chunks import Chunks

# The delay of each stream in microseconds. The delays are so long that copies are still in flight when a run or a
# process ends.
LATE = {"in": 3000, "out": 3000, "own": 1000}
# Calls that make a step fail, and the errors that they raise.
WAYS = {
    "Ctrl-C": (lambda: signal.raise_signal(signal.SIGINT), KeyboardInterrupt),
    "memory": (lambda: torch.empty(1 << 46, device="cuda"), torch.OutOfMemoryError),
}


def fails(where, gradients="fused", delays=None, **options):
    """Makes a step fail at `where`, drops the gradients of the step, and repeats the step."""
    with begun(gradients=gradients, delays=delays or LATE, **options) as training:
        training.step(0)
        training.check.step = 1
        block = training.model.blocks[2]
        stops, expected = next(
            (how for word, how in WAYS.items() if word in where), ((lambda: 1 / 0), ZeroDivisionError)
        )
        if "backward" in where:
            training.check.fails = f"{block.name}.weights.0", stops
        elif "checkpoint" in where:
            inward = training.streams["in"]
            training.ends.enter_context(_third_piece(functools.partial(_late, inward)))
        else:
            inner = block.forward
            block.forward = lambda *_: stops()
        try:
            torch.autograd.backward((y := training.forward()), [torch.empty_like(part) for part in y])
            raise AssertionError("the step did not fail")
        except expected:
            pass
        y = None
        training.optimizer.zero_grad()
        if "checkpoint" in where:
            _memory_is_anothers(training)
        training.check.fails = None
        if "forward" in where:
            block.forward = inner
        training.step(1)
        return training.compare()


def _memory_is_anothers(training):
    """Reuses released memory, waits for copies in flight, and checks that no copy wrote to the reused memory."""
    gc.collect()
    training.optimizer._session.run.resources.activations._reap()
    check = training.check
    found = [check.fill(torch.empty(ACTIVATION, device="cuda"), "another's") for _ in range(64)]
    training.streams["in"].synchronize()
    for tensor in found:
        check.read_pattern(tensor, "another's memory", "another's")


def _late(inward):
    """Holds the stream of copies to the device, and raises an error at once.

    A timer releases the stream after one second.
    """
    torch.cuda.current_stream().synchronize()
    runtime.hold(inward)
    threading.Timer(1, runtime.hold, (inward,), {"held": False}).start()
    return 1 / 0


@contextlib.contextmanager
def _third_piece(stops):
    """Calls `stops` instead of the third `Chunks.give`, so that the first restored checkpoint stays incomplete."""
    give, calls = Chunks.give, itertools.count(1)

    def failing(self, *arguments):
        return give(self, *arguments) if next(calls) != 3 else stops()

    Chunks.give = failing
    yield
    Chunks.give = give


def several():
    """Trains two models alternately. While one model trains, copies of the other model are in flight."""
    with contextlib.ExitStack() as stack:
        both = [Training(stack, gradients=mode, delays=LATE) for mode in ("fused", "ssd")]
        for step in range(2):
            for training in both:
                training.step(step)
        first, second = (training.compare() for training in both)
        return {key: first[key] + second[key] for key in first}


def again():
    """Runs two backwards of one retained graph. Both backwards read the graph's saved tensors."""
    with begun("recomputed", gradients="ssd", activations="host") as training:
        check = training.check
        check.weights = training.twin.hashes()
        x = check.fill(torch.empty(ACTIVATION, device="cuda"), "input").requires_grad_()
        found = training.model(x)
        for _ in range(2):
            torch.autograd.grad(found, x, [torch.empty_like(y) for y in found], retain_graph=True)
        return training.compare()


def narrow(**options):
    """Trains with all state in RAM, and with the smallest possible device_memory.

    The error for device_memory=1 names the smallest possible device_memory.
    """
    options = {"host_memory": "1GiB", **options}
    try:
        with begun(device_memory=1, **options):
            raise AssertionError("offload() accepted device_memory=1")
    except memascend.BudgetError as error:
        smallest = error.smallest
    with begun(device_memory=smallest, **options) as training:
        for step in range(2):
            training.step(step)
        report = training.optimizer.report().to_dict()["device"]
        assert report["peak"] <= report["budget"] == smallest, report
        return {**training.compare(), "held": len(training.optimizer.plan.ram_tier)}


def closed(slow="in", *, backward=False, dropped=False, **options):
    """Closes a run while copies are in flight, then frees the memory that the copies use.

    If `dropped` is true, drops the model instead of calling close().
    """
    with contextlib.ExitStack() as stack:
        training = Training(stack, delays={slow: 3000}, **options)
        training.step(0)
        training.check.step = 1
        runtime.delay(training.streams[slow], 100_000)
        found = training.forward()
        if backward:
            torch.autograd.backward(found, [torch.empty_like(y) for y in found])
        stream = training.streams[slow]
        if not dropped:
            training.optimizer.close()
            # If close() did not wait for a copy, the held stream runs this copy only after the memory is freed.
            runtime.hold(stream)
        gone = threading.Event()
        thread = threading.Thread(target=_go_on_after, args=(stream, gone))
        thread.start()
        check = training.check
        # Drops every reference to the memory.
        stack.pop_all()
        del training, found
        gc.collect()
        gone.set()
        thread.join()
        return check.compare()


def _go_on_after(stream, gone):
    while not gone.wait(0.01) and not runtime.faults():
        pass
    runtime.hold(stream, held=False)


def forked():
    """Forks a child process. The end of the child must not affect the parent's device."""
    with begun(gradients="fused", delays=LATE) as training:
        training.step(0)
        training.check.step = 1
        found = training.forward()
        child = os.fork()
        if child == 0:
            # The child ends as a worker of a data loader does, without close(). The child must not hang.
            del training, found
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        torch.autograd.backward(found, [torch.empty_like(y) for y in found])
        training.commit(1)
        return training.compare()


def accumulated(batches=(None, None, None), steps=3, *, delays=None, **options):
    """Trains on micro-batches by layer. Each item of `batches` is the number of a block to skip, or None.

    From the second step on, each micro-batch has its own thread.
    """
    with begun(delays={"in": 1000} if delays is None else delays, **options) as training:

        def loss_of(but):
            # The loss must be a scalar, so that its backward begins with a gradient of 1.
            return sum(y[:1].view(()) for y in training.forward(but))

        for step in range(steps):
            training.check.step = step
            training.optimizer.accumulate(loss_of, batches, by_layer=True)
            training.commit(step, batches)
        course = training.optimizer._session.accumulation
        return {**training.compare(), "by_layer": course.never or course._course is not None}


def _draws(*_):
    torch.rand(4, device="cuda:1")


def random_numbers():
    """Compares the random numbers of micro-batches by layer with those of a plain loop.

    The micro-batches draw these numbers on a device that is not the current device.
    """
    with begun(gradients="fused", device="cuda:1") as training:
        for block in training.model.blocks:
            block.register_forward_pre_hook(_draws)
        drawn = []

        def loss_of(_):
            loss = sum(y[:1].view(()) for y in training.forward())
            drawn.append(torch.cuda.get_rng_state("cuda:1").tolist())
            return loss

        def seeded_loss_of(seed):
            torch.manual_seed(seed)
            return loss_of(None)

        found = []
        # The first step records the order of units. The second step runs by layer. The third step is a plain loop, and
        # must draw the same random numbers as the second step.
        for step, by_layer in enumerate((True, True, False)):
            training.check.step = step
            drawn.clear()
            torch.manual_seed(7)
            if by_layer:
                training.optimizer.accumulate(loss_of, range(3), by_layer=True)
            else:
                seeds = [int(torch.empty((), dtype=torch.int64, device="cpu").random_().item()) for _ in range(3)]
                training.optimizer.accumulate(seeded_loss_of, seeds)
            training.commit(step, [None] * 3)
            found.append([*sorted(drawn), torch.cuda.get_rng_state("cuda:1").tolist()])
        course = training.optimizer._session.accumulation
        return {
            **training.compare(),
            "by_layer": course.never or course._course is not None,
            "same": found[1] == found[2],
        }


def clipped(**options):
    """Trains with updates that begin before step() knows the norm.

    The steps in `LOUD` discard these updates and repeat them.
    """
    runtime.LOUD.update((2, 5))
    with begun(gradients="auto", max_grad_norm=10_000.0, **options) as training:
        for step in range(7):
            training.step(step)
        return {**training.compare(), "early": training.optimizer.report().to_dict().get("early")}


def left(backward):
    """Returns without close() while copies are in flight, so that the interpreter exits during these copies."""
    training = Training(contextlib.ExitStack(), gradients="fused", delays=LATE)
    training.step(0)
    training.check.step = 1
    globals()["kept"] = training, (found := training.forward())
    if backward:
        torch.autograd.backward(found, [torch.empty_like(y) for y in found])
    return "fine"
