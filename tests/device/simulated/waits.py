"""Counts what a step waits for on the simulated CUDA, and shows that copies go on beside what computes."""

from __future__ import annotations

import time

import torch
from device.simulated import runtime
from device.simulated.order import LARGE, SMALL, begun

ENDS_WITHIN = 30
BLOCK_BYTES = 4 * (LARGE + SMALL)


def counted(gradients, kind, **options):
    """What threads did in the forward and backward of a step, and in its `step()`, when all has been used once."""
    with begun(kind, gradients=gradients, **options) as training:
        for step in range(2):
            training.step(step)
        training.check.step = 2
        torch.cuda.synchronize()
        runtime.reset()
        found = training.forward()
        torch.autograd.backward(found, [torch.empty_like(y) for y in found])
        del found
        passes = runtime.counts()
        runtime.reset()
        training.optimizer.step()
        counts = passes, runtime.counts()
        training.twin.step(2)
        assert not training.compare()["wrong"]
    return [[[*key, number] for key, number in sorted(found.items())] for found in counts]


def uploads_go_on():
    """A forward is queued behind a stream that stands still; all units arrive meanwhile."""
    with begun(gradients="fused", device_memory="64MiB") as training:
        own, inward = training.streams["own"], training.streams["in"]
        runtime.hold(own)
        training.ends.callback(runtime.hold, own, held=False)
        with torch.no_grad():
            training.forward()
        # All that it ever brought.
        until(lambda: runtime.total("bytes of copy host to device") >= 4 * BLOCK_BYTES and inward.query())
        arrived = runtime.total("bytes of copy host to device")
        assert not own.query()
        runtime.hold(own, held=False)
        return {"arrived": arrived, "needed": 4 * BLOCK_BYTES, **training.compare()}


def downloads_go_on():
    """Before the last block's backward its stream stands still until the gradients of the others have been copied."""
    with begun(gradients="fused") as training:
        training.step(0)
        training.check.step = 1
        arrived = []

        def stopped(_gradient):
            own, outward = torch.cuda.current_stream(), training.streams["out"]
            own.synchronize()
            runtime.hold(own)
            # Something that cannot end before it is let go.
            training.check.fill(torch.empty(1024, device="cuda"), "nothing")
            until(lambda: runtime.total("bytes of copy device to host") >= BLOCK_BYTES and outward.query())
            arrived.append(runtime.total("bytes of copy device to host"))
            assert not own.query()
            runtime.hold(own, held=False)

        inner = training.model.blocks[0].forward

        def forward(*arguments):
            out = inner(*arguments)
            out.register_hook(stopped)
            return out

        training.model.blocks[0].forward = forward
        torch.cuda.synchronize()
        runtime.reset()
        training.step(1)
        return {"arrived": arrived[0], "needed": BLOCK_BYTES, **training.compare()}


def until(happened):
    """Wait for what another thread does."""
    deadline = time.monotonic() + ENDS_WITHIN
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)
