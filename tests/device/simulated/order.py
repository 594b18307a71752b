"""Trains models on the simulated CUDA; checks that streams read only data that has arrived; counts waits of a step."""

from __future__ import annotations

import contextlib
import gc
import math
import tempfile
import threading
import time
from fractions import Fraction

import torch
from device.simulated import runtime
from torch.utils.checkpoint import checkpoint

import memascend
from memascend.device.arena import DeviceArena
from memascend.device.device import Device
from memascend.plan.decision import ACTIVATION_CHUNKS, GRADIENT_WINDOWS, UNIT_CHUNKS

# Makes the library's chunks and windows smaller, so that small models need several chunks and several windows.
for sizes, nbytes in ((UNIT_CHUNKS, 1 << 20), (GRADIENT_WINDOWS, 1 << 20), (ACTIVATION_CHUNKS, 1 << 18)):
    (count,) = sizes.values()
    sizes.clear()
    sizes[nbytes] = count
# Numbers of fp32 elements. The largest gradient needs three windows. A block needs three chunks, and so does an
# activation.
LARGE, SMALL, ACTIVATION = 5 << 17, 3 << 13, 5 << 15
# The shape of a matrix of SMALL elements.
ROWS, COLUMNS = 3 << 6, 1 << 7
LR, MOMENTUM = 0.01, 0.9


class Block(torch.nn.Module):
    def __init__(self, name, check):
        super().__init__()
        # Stores only the method `use`, not `check`. `check` keeps values, and micro-batches by layer reject a module
        # that keeps values.
        self.name, self.use = name, check.use
        shapes = [(LARGE,), (ROWS, COLUMNS)]
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(shape)) for shape in shapes)

    def uses(self):
        """Returns the names of the weights that the forward uses, in order."""
        return [f"{self.name}.{name}" for name, _ in self.named_parameters(remove_duplicate=False)]

    def forward(self, x, before):
        for name, (_, weight) in zip(self.uses(), self.named_parameters(remove_duplicate=False), strict=True):
            x, before = self.use(x, weight, name, before)
        return x


class Net(torch.nn.Module):
    """A model of blocks; `kind` says how the model uses its blocks.

    "plain" calls each block once. "recomputed" checkpoints each block. "tied" shares one weight between the first and
    the last block. "streams" calls each block on two streams. "aside" calls the blocks 1, 3, ... on the stream `side`.
    """

    def __init__(self, check, kind="plain", blocks=4):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(f"blocks.{index}", check) for index in range(blocks))
        if kind == "tied":
            self.blocks[-1].weights[0] = self.blocks[0].weights[0]
        self.kind = kind
        # If the kind has "streams" in its name, gradients come from two streams on purpose, so torch must not warn.
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch("streams" not in kind)
        self.side = torch.cuda.Stream()

    def uses(self, but=None):
        """Returns the names of the weights that a forward without block `but` uses, in order.

        If the kind has "streams" in its name, each block runs on two streams, so the list has these names twice.
        """
        found = [use for index, block in enumerate(self.blocks) if index != but for use in block.uses()]
        return found * 2 if "streams" in self.kind else found

    def _call(self, block, x, before):
        return checkpoint(block, x, before, use_reentrant=False) if "recomputed" in self.kind else block(x, before)

    def forward(self, x, but=None):
        before = "input"
        found = []
        own = torch.cuda.current_stream()
        for index, block in enumerate(self.blocks):
            if index == but:
                continue
            self.side.wait_stream(own)
            with torch.cuda.stream(self.side if self.kind == "aside" and index % 2 else own):
                y = self._call(block, x, before)
            if "streams" in self.kind:
                # Calls the block again on the stream `side`, at the same time as the call above.
                with torch.cuda.stream(self.side):
                    found.append(self._call(block, x, before))
            x, before = y, f"output of {block.uses()[-1]}"
            if self.kind == "aside":
                own.wait_stream(self.side)
        own.wait_stream(self.side)
        return [x, *found]


class Twin:
    """Computes the expected weights of `model` after each step: trains copies of its weights on the CPU."""

    def __init__(self, model, optimizer, max_grad_norm=None):
        # Lists each name of a parameter, because a tied parameter has several names.
        named = list(model.named_parameters(remove_duplicate=False))
        twins = {id(p): torch.nn.Parameter(p.detach().clone()) for _, p in named}
        self.by_name = {name: twins[id(p)] for name, p in named}
        self._uses_of = model.uses
        self.optimizers = OPTIMIZERS[optimizer](twins.values())
        self._max_norm = max_grad_norm
        # The norm of the last step's gradients.
        self.norm = None

    def hashes(self):
        return {name: runtime.hashed(twin) for name, twin in self.by_name.items()}

    def step(self, step, batches=(None,)):
        """Makes a step. The gradients are the patterns that `Use` writes.

        Each item of `batches` stands for a micro-batch. The item is the number of the block that the micro-batch skips,
        or None.
        """
        twins = list({id(twin): twin for twin in self.by_name.values()}.values())
        for twin in twins:
            twin.grad = None
        for but in batches:
            # Adds gradients in autograd's order: first the gradients of one backward, then the sums of all backwards.
            sums = {}
            for name in reversed(self._uses_of(but)):
                twin = self.by_name[name]
                gradient = runtime.filled(twin.shape, runtime.pattern(name, step))
                sums[twin] = sums[twin] + gradient if twin in sums else gradient
            for twin, gradient in sums.items():
                twin.grad = gradient if twin.grad is None else twin.grad + gradient
        # All elements of a gradient are equal, so one element is enough to compute the exact sum of squares.
        self.norm = math.sqrt(sum(twin.numel() * Fraction(twin.grad.view(-1)[0].item()) ** 2 for twin in twins))
        if self._max_norm is not None:
            factor = torch.tensor(min(self._max_norm / (self.norm + 1e-6), 1.0))
            for twin in twins:
                twin.grad *= factor
        for optimizer in self.optimizers:
            optimizer.step()


def made(parameters):
    return torch.optim.SGD(parameters, lr=LR, momentum=MOMENTUM, foreach=False)


def several(parameters):
    """Returns two optimizers: Muon, whose own code runs on whole matrices, and AdamW, which the engine computes."""
    parameters = list(parameters)
    matrices = [parameter for parameter in parameters if parameter.dim() == 2]
    others = [parameter for parameter in parameters if parameter.dim() != 2]
    return [torch.optim.Muon(matrices, lr=LR), torch.optim.AdamW(others, lr=LR, fused=True)]


OPTIMIZERS = {
    "sgd": lambda parameters: [made(parameters)],
    # RMSprop's own code runs chunk by chunk.
    "rmsprop": lambda parameters: [torch.optim.RMSprop(parameters, lr=LR, foreach=False)],
    "several": several,
}


class Training:
    """The offloaded run of a model, and a `Twin` that trains the same model on the CPU."""

    def __init__(
        self,
        stack,
        kind="plain",
        *,
        delays=None,
        blocks=4,
        placed="cpu",
        optimizer="sgd",
        activation=ACTIVATION,
        **options,
    ):
        torch.manual_seed(1)
        self._activation = activation
        self.device = options.setdefault("device", "cuda")
        self.check = runtime.Check()
        with torch.device("cpu"):
            model = Net(self.check, kind, blocks)
        self.twin = Twin(model, optimizer, options.get("max_grad_norm"))
        # The folder is in the test's folder (TMPDIR), which outlives this process.
        folder = tempfile.mkdtemp()
        model = model.to(placed)
        optimizers = OPTIMIZERS[optimizer](model.parameters())
        given = optimizers if len(optimizers) > 1 else optimizers[0]
        self.model, self.optimizer = memascend.offload(model, given, storage=folder + "/run.store", **options)
        stack.callback(self.optimizer.close)
        self.ends = stack
        device = self.optimizer._session.run.resources.units.device
        self.streams = {"in": device._inward, "out": device._outward, "own": torch.cuda.current_stream()}
        self.streams["side"] = self.model.side
        for name, microseconds in (delays or {}).items():
            runtime.delay(self.streams[name], microseconds)

    def forward(self, but=None):
        self.check.weights = self.twin.hashes()
        x = self.check.fill(torch.empty(self._activation, device=self.device), "input").requires_grad_()
        return self.model(x, but)

    def passes(self, step):
        """Runs the forward and the backward of a step."""
        self.check.step = step
        found = self.forward()
        torch.autograd.backward(found, [torch.empty_like(y) for y in found])

    def step(self, step):
        self.passes(step)
        self.commit(step)

    def commit(self, step, batches=(None,)):
        """Steps the run and its twin, and compares their gradient norms."""
        self.optimizer.step()
        self.twin.step(step, batches)
        self.check.number(self.optimizer.grad_norm, self.twin.norm, "the norm of the gradients")
        self.optimizer.zero_grad()

    def compare(self):
        for name, value in self.model.state_dict().items():
            self.check.equal(value, self.twin.by_name[name].detach(), f"{name} on storage")
        return self.check.compare()


@contextlib.contextmanager
def begun(*arguments, **options):
    """Yields a `Training`, whose run is closed at the end of the block."""
    with contextlib.ExitStack() as stack:
        yield Training(stack, *arguments, **options)


def train(steps=2, side=False, fresh=False, **options):
    """Trains, and returns the result of `Check.compare`.

    Args:
        steps: number of steps.
        side: whether each step runs on a new stream.
        fresh: whether the arena gets memory to which a held stream still has to write.
        options: see `Training`.
    """
    with contextlib.ExitStack() as stack:
        if fresh:
            stack.callback(busy().join)
        training = stack.enter_context(begun(**options))
        now = torch.cuda.current_stream()
        for step in range(steps):
            last, now = now, torch.cuda.Stream() if side else now
            now.wait_stream(last)
            with torch.cuda.stream(now):
                training.step(step)
        return training.compare()


def busy():
    """Frees memory to which a held stream still has to write.

    Returns a thread that releases the stream once copies to the device have begun.
    """
    block = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    own = torch.cuda.current_stream()
    runtime.hold(own)
    runtime.on(block, runtime.library.simulated_fill, 0xFFFF)
    runtime.reset()

    def release():
        until(lambda: runtime.total("copy host to device"))
        # A faulty copy, which does not wait for the held stream, ends within this time.
        time.sleep(0.3)
        runtime.hold(own, held=False)

    thread = threading.Thread(target=release)
    thread.start()
    return thread


def close_with_pending_reads():
    """Closes a run while a stream of the user is held, then reuses the run's memory.

    The held stream still has to compute with the run's weights.
    """
    with contextlib.ExitStack() as stack:
        training = Training(stack, gradients="fused", device_memory="64MiB")
        arena, side = training.optimizer._session.run.resources.units.arena, training.streams["side"]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), torch.no_grad():
            training.forward()
            torch.cuda.synchronize()
            runtime.hold(side)
            stack.callback(runtime.hold, side, held=False)
            training.forward()
        pieces = [piece.nbytes for piece in arena._pieces]
        training.optimizer.close()
        assert not side.query(), "close() waited for the held stream, so this test would show nothing"
        check, inward = training.check, training.streams["in"]
        del training, arena
        stack.pop_all()
        return _reused(check, pieces, side, inward)


def added(by):
    """Frees an arena while a held stream still has to read the arena's weights, then reuses the arena's memory.

    The stream `side` reads the weights. With `by="side"`, `arena.add` allocates the arena's last piece on the stream
    `side`. With `by="own"`, `arena.add` allocates this piece on the current stream.
    """
    nbytes = 4 << 20
    check, own, side = runtime.Check(), torch.cuda.current_stream(), torch.cuda.Stream()
    device = Device(torch.device("cuda", 0))
    arena = DeviceArena(device, {nbytes: 1})

    def leased(arena=arena):
        tensor = arena.lease(nbytes, 0)
        check.fill(tensor, "weights")
        own.synchronize()
        return tensor

    def used(tensor, arena=arena):
        with torch.cuda.stream(side):
            arena.used(tensor)
            check.read_pattern(tensor, "weights", "weights")

    tensors = []
    if by == "own":
        # Makes the stream `side` use the arena's first piece, and waits until `side` has finished.
        tensors.append(leased())
        used(tensors[0])
        side.synchronize()
    with torch.cuda.stream(own if by == "own" else side):
        arena.add(nbytes)
    while len(tensors) < 2:
        tensors.append(leased())
    runtime.hold(side)
    for tensor in tensors:
        used(tensor)
    pieces = [piece.nbytes for piece in arena._pieces]
    inward = device._inward
    del arena, tensors, tensor, leased, used, device
    return _reused(check, pieces, side, inward)


def _reused(check, pieces, side, inward):
    """Reuses released memory that the held stream `side` still has to read; returns the result of `Check.compare`."""
    gc.collect()
    # Waits until all copies into the released memory have ended.
    inward.synchronize()
    for nbytes in pieces:
        check.fill(torch.empty(nbytes, dtype=torch.uint8, device="cuda"), "another's")
    torch.cuda.current_stream().synchronize()
    runtime.hold(side, held=False)
    return check.compare()


# --- waits ----------------------------------------------------------------------------------------

ENDS_WITHIN = 30
BLOCK_BYTES = 4 * (LARGE + SMALL)


def counted(gradients, kind, **options):
    """Counts the actions of each thread in the third step.

    Returns the counts of the forward and backward, and the counts of `step()`.
    """
    with begun(kind, gradients=gradients, **options) as training:
        for step in range(2):
            training.step(step)
        torch.cuda.synchronize()
        runtime.reset()
        training.passes(2)
        passes = runtime.counts()
        runtime.reset()
        training.optimizer.step()
        counts = passes, runtime.counts()
        training.twin.step(2)
        assert not training.compare()["wrong"]
    return [[[*key, number] for key, number in sorted(found.items())] for found in counts]


def uploads_go_on():
    """Queues a forward on a held stream; requires that all units arrive on the device while the stream is held."""
    with begun(gradients="fused", device_memory="64MiB") as training:
        own, inward = training.streams["own"], training.streams["in"]
        runtime.hold(own)
        training.ends.callback(runtime.hold, own, held=False)
        with torch.no_grad():
            training.forward()
        # The count includes every copy since the process began.
        until(lambda: runtime.total("bytes of copy host to device") >= 4 * BLOCK_BYTES and inward.query())
        arrived = runtime.total("bytes of copy host to device")
        assert not own.query()
        runtime.hold(own, held=False)
        return {"arrived": arrived, "needed": 4 * BLOCK_BYTES, **training.compare()}


def downloads_go_on():
    """Holds the computing stream in a backward, before block 0, the last block of a backward.

    Requires that the gradients of another block arrive on the host while the stream is held.
    """
    with begun(gradients="fused") as training:
        training.step(0)
        training.check.step = 1
        arrived = []

        def stopped(_gradient):
            own, outward = torch.cuda.current_stream(), training.streams["out"]
            own.synchronize()
            runtime.hold(own)
            # This work cannot end before the stream is released.
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
    """Waits until the work of another thread or stream makes `happened()` true."""
    deadline = time.monotonic() + ENDS_WITHIN
    while not happened():
        assert time.monotonic() < deadline, "the awaited condition did not become true"
        time.sleep(0.005)
