"""Runs the micro-batches of one `accumulate()` call in threads; one thread computes at a time.

[Note: Stages] A stage is one use of a streamed unit, in a forward or in a backward. `Recorder` records the path of
each micro-batch through the units while micro-batches are computed one after the other. `StageOrder` merges these paths
into one order of stages. `Baton` then lets a micro-batch at the lowest stage compute, unless too many gradients would
wait in memory for earlier micro-batches. So, in general, all micro-batches use a unit while the unit is in memory.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import functools
import math
import threading
import time
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import _get_current_function_mode_stack

from memascend.params import module_hooks
from memascend.params.threads import working_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from memascend.grads.gradient import Gradient
    from memascend.params.unit import CachedUnit


@dataclass
class Path:
    """The order in which one micro-batch used the streamed units, and when each gradient arrived.

    A use in a forward is `unit.index`, a use in a backward is `~unit.index`, so the two are never equal.
    """

    units: list[int] = field(default_factory=list)
    # By parameter name: the index in `units` of the use during which its gradient arrived; -1 if the
    # gradient arrived before the first use.
    arrivals: dict[str, int] = field(default_factory=dict)

    def reach(self, units: Iterable[CachedUnit]) -> list[int]:
        """Records that `units` are about to be used; returns the uses that begin a stage."""
        begun = []
        backward = torch._C._current_graph_task_id() != -1  # noqa: SLF001
        for unit in units:
            # A unit that is always in memory begins no stage, and neither does another use of the unit used last.
            if unit.pinned or unit.in_ram or (self.units and self.units[-1] in (unit.index, ~unit.index)):
                continue
            use = ~unit.index if backward else unit.index
            self.units.append(use)
            begun.append(use)
        return begun


class Recorder:
    """Records the paths of micro-batches that are computed one after the other."""

    def __init__(self, look: Callable[[], Callable[[], str | None]]) -> None:
        """`begin` calls `look` after the first micro-batch. `look` takes a snapshot and returns a function.

        That function describes the first change since the snapshot, or returns None.
        """
        self.paths: list[Path] = []
        # The first reason seen why gradients cannot be summed by layer; None if there is no reason yet.
        self._unfit: str | None = None
        self._look = look
        self._changed: Callable[[], str | None] = lambda: None

    def begin(self) -> None:
        """Begins the path of the next micro-batch."""
        if len(self.paths) == 1:
            # Take the snapshot after the first micro-batch, because libraries change the model during the first
            # micro-batch: they install hooks and fill caches.
            self._changed = self._look()
        self.paths.append(Path())

    def arrive(self, units: Iterable[CachedUnit]) -> None:
        """Records that a module or a backward is about to use `units`."""
        self.paths[-1].reach(units)

    def take(self, gradient: Gradient) -> bool:
        """Records the arrival of `gradient`; returns False, because a recorder takes no gradient out of `p.grad`."""
        path, name = self.paths[-1], gradient.name
        values = gradient.values
        if name in path.arrivals:
            self._unfit = self._unfit or f"the gradient of {name!r} arrives in pieces"
        elif values is not None and values.is_sparse:
            self._unfit = self._unfit or f"the gradient of {name!r} is sparse"
        path.arrivals[name] = len(path.units) - 1
        return False

    def require_open(self, gradient: Gradient) -> None:
        """Accepts any gradient: a recorder sums no gradients, so no sum is ever complete."""

    def against_layers(self) -> str | None:
        """Returns why these micro-batches cannot be computed by layer, or None if no reason was seen."""
        return self._unfit or self._changed()


class StageOrder:
    """The order of stages, merged from the paths of earlier micro-batches; a stage is one use of a unit."""

    def __init__(self, paths: Sequence[Path], late: Iterable[str] = ()) -> None:
        """Merges the paths of micro-batches. Units that a micro-batch skips, such as experts, are not in its path.

        `late`: names for the attribute `late`.
        """
        self.units: list[int] = []
        distinct = Counter(tuple(path.units) for path in paths)
        for units in distinct:
            self.units = _merged(self.units, list(units))
        self._stages: dict[int, list[int]] = {}
        for stage, unit in enumerate(self.units):
            self._stages.setdefault(unit, []).append(stage)
        in_all = Counter(self.units)
        varied = {use for units in distinct for use in in_all - Counter(units)}
        # The names of parameters whose gradients may arrive at any stage, because the micro-batches used the unit at
        # different places, or not all of them used it.
        self.late = set(late)
        # By parameter name: the last stage at which its gradient arrived.
        self.arrivals: dict[str, int] = {}
        # By use of a unit: the names of parameters whose gradients arrived during this use. By None: the names of
        # parameters whose gradients arrived before the first use.
        self.brought: dict[int | None, set[str]] = {}
        for path in paths:
            stages = self._followed(path)
            for name, at in path.arrivals.items():
                stage, use = (stages[at], path.units[at]) if at >= 0 else (-1, None)
                self.brought.setdefault(use, set()).add(name)
                self.arrivals[name] = max(stage, self.arrivals.get(name, -1))
                if use in varied:
                    self.late.add(name)

    def expect_late(self, name: str) -> None:
        """Expects the gradient of `name`, and gradients that arrived during the same use of a unit, at any stage."""
        self.late.add(name)
        self.late.update(*(names for names in self.brought.values() if name in names))

    def last_stage(self, name: str) -> int:
        """Returns the stage after which no part of a gradient arrives; one after the last if parts arrive at any."""
        return len(self.units) if name in self.late else self.arrivals.get(name, len(self.units))

    def next_stage(self, unit: int, stage: int) -> int | None:
        """Returns the next stage after `stage` that uses `unit`, or None if no recorded path has such a stage."""
        stages = self._stages.get(unit, [])
        at = bisect_right(stages, stage)
        return stages[at] if at < len(stages) else None

    def _followed(self, path: Path) -> list[int]:
        stage, found = -1, []
        for unit in path.units:
            following = self.next_stage(unit, stage)
            stage = stage if following is None else following
            found.append(stage)
        return found


def _merged(first: list[int], second: list[int]) -> list[int]:
    """Merges two orders of units into one. A sequence that matches in both appears only once in the result."""
    if not first:
        return second
    merged: list[int] = []
    for tag, i, j, k, m in SequenceMatcher(None, first, second, autojunk=False).get_opcodes():
        merged += first[i:j]
        if tag in ("insert", "replace"):
            merged += second[k:m]
    return merged


# The maximum number of seconds that an exiting process waits for the threads of interrupted micro-batches.
_END_SECONDS = 120.0
# Seconds between the caller's checks for an interrupt: `_thread.interrupt_main()` does not wake a waiting thread.
_POLL_SECONDS = 0.1


class _Abandoned(Exception):
    """Unwinds a micro-batch after another micro-batch has failed or the call was interrupted."""


def _module_with(name: str, device: torch.device) -> Any:
    """Returns torch's module for `device` if that module has the function `name`; None otherwise, and for the CPU."""
    module: Any = None if device.type == "cpu" else torch.get_device_module(device)
    return module if hasattr(module, name) else None


class Generators:
    """The states of torch's default random number generators, of the CPU and of the device that computes the model."""

    def __init__(self, device: torch.device) -> None:
        self._module = _module_with("get_rng_state", device)
        # This device may differ from torch's current device.
        self._device = device

    def states(self) -> list[torch.Tensor]:
        """Returns copies of the present states."""
        states = [torch.get_rng_state()]
        if self._module is not None:
            states.append(self._module.get_rng_state(self._device))
        return states

    def load(self, states: list[torch.Tensor]) -> None:
        """Makes the generators continue from `states`."""
        torch.set_rng_state(states[0])
        if self._module is not None:
            self._module.set_rng_state(states[1], self._device)


def same_states(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """True if the snapshots `one` and `other` are equal: no random number was drawn between them."""
    return all(map(torch.equal, one, other))


class CallerStream:
    """The current stream of the thread that constructs this object. Gradients are summed on this stream.

    Other streams may have computed the gradients. `take()` makes the caller's stream wait for these streams.
    """

    def __init__(self, device: torch.device) -> None:
        self._module = _module_with("current_stream", device)
        self._device = device
        self._stream: Any = None if self._module is None else self._module.current_stream(device)

    def take(self, values: torch.Tensor) -> None:
        """Makes later work on the caller's stream wait for the kernels that made `values` on the current stream."""
        if self._module is None or (made_on := self._module.current_stream(self._device)) == self._stream:
            return
        self._stream.wait_stream(made_on)
        # The memory belongs to the stream `made_on`. The allocator must not reuse the memory before the caller's stream
        # is done with `values`.
        values.record_stream(self._stream)

    def entered(self) -> contextlib.AbstractContextManager[Any]:
        """Makes the caller's stream the current one inside the `with` block."""
        return contextlib.nullcontext() if self._module is None else self._module.stream(self._stream)


class CallerModes:
    """The modes that torch keeps per thread, as set in the thread that constructs this object."""

    def __init__(self, device: torch.device) -> None:
        self._grad = torch.is_grad_enabled()
        self._functions = _get_current_function_mode_stack()
        self._hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)  # noqa: SLF001
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
            for kind in {"cpu", device.type}
            if torch.is_autocast_enabled(kind)
        ]
        self._device = module = _module_with("current_stream", device)
        # The second stream is the stream of torch's current device. That device may differ from `device`.
        self._streams = [] if module is None else [module.current_stream(device), module.current_stream()]
        # The bits of matrix products depend on the number of threads.
        self._threads = torch.get_num_threads()
        self.context = contextvars.copy_context()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Sets the modes in the current thread inside the `with` block."""
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        with contextlib.ExitStack() as undo:
            undo.enter_context(torch.set_grad_enabled(self._grad))
            # With this setting, the thread that begins a backward runs the whole backward. Otherwise autograd's thread
            # for the device would run the backwards of all micro-batches, and the first waiting micro-batch would block
            # that thread.
            undo.enter_context(torch.autograd.set_multithreading_enabled(False))
            for stream in self._streams:
                undo.enter_context(self._device.stream(stream))
            for kind, dtype, cached in self._autocast:
                undo.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=cached))
            if self._hooks is not None:
                undo.enter_context(torch.autograd.graph.saved_tensors_hooks(*self._hooks))
            for mode in self._functions:
                torch._C._push_on_torch_function_stack(mode)  # noqa: SLF001
                undo.callback(torch._C._pop_torch_function_stack)  # noqa: SLF001
            yield


class MicroBatch:
    """One micro-batch of a call: its stage, its random number states, and its thread's turn."""

    def __init__(self, index: int, states: list[torch.Tensor]) -> None:
        self.index = index
        self.states = states
        # The stage that the micro-batch computes or waits for; -1 before its first stage, infinity once the micro-batch
        # has ended.
        self.stage: float = -1
        self.path = Path()
        self.turn = threading.Semaphore(0)
        self.result: Any = None

    def reach(self, stage: float) -> None:
        """Sets the stage that the micro-batch computes next; infinity marks the micro-batch as ended."""
        self.stage = stage

    def pause(self, generators: Generators) -> None:
        """Saves the random number states, so that another micro-batch can compute next with its own states."""
        self.states = generators.states()

    def finish(self, result: Any) -> None:
        """Stores the result of the micro-batch after its backward."""
        self.result = result

    @property
    def ended(self) -> bool:
        """True once the micro-batch has ended, by a result or by an error."""
        return self.stage == math.inf


class Baton:
    """Runs the micro-batches of one call, one at a time; see [Note: Stages]."""

    def __init__(
        self, course: StageOrder, generators: Generators, states: list[list[torch.Tensor]], tidy: Callable[[], None]
    ) -> None:
        """Creates the micro-batches; `run()` starts them.

        `course` has the stages, and `states` the random number states with which each micro-batch begins. The thread of
        a micro-batch calls `tidy` before the micro-batch pauses for another micro-batch.
        """
        self.micro_batches = [MicroBatch(index, own) for index, own in enumerate(states)]
        # The lowest stage of the running micro-batches. All running micro-batches have reached this stage.
        self.low: float = -1
        # True once a micro-batch has used units in an order that no earlier call has shown.
        self.left_known_order = False
        self._course = course
        self._generators = generators
        self._tidy = tidy
        # The micro-batch that each thread computes, by thread number.
        self._of: dict[int, MicroBatch] = {}
        self._failure: BaseException | None = None
        self._unbegun = threading.Lock()
        self._all_ended = threading.Event()
        self._on_low: Callable[[float], None] = lambda _: None
        self._may_run: Callable[[MicroBatch], bool] = lambda _: True

    def follow(self, on_low: Callable[[float], None], may_run: Callable[[MicroBatch], bool]) -> None:
        """Registers callbacks.

        `on_low` receives the lowest stage of the running micro-batches whenever this stage has risen; infinity once all
        micro-batches have ended. `may_run` receives the micro-batch that would compute next, unless this is the first
        running micro-batch. If `may_run` returns False, the first running micro-batch computes instead, because its
        gradients never wait for gradients of another micro-batch.
        """
        self._on_low, self._may_run = on_low, may_run

    @property
    def here(self) -> MicroBatch | None:
        """The micro-batch that the current thread computes, or None."""
        return self._of.get(threading.get_ident())

    def arrive(self, units: Iterable[CachedUnit]) -> None:
        """Records that `units` are about to be used. Before each stage, waits for the turn of this micro-batch."""
        own = self.here
        if own is None:
            return
        for unit in own.path.reach(units):
            stage = self._course.next_stage(unit, own.stage)  # type: ignore[arg-type]
            if stage is None:
                self.left_known_order = True
                continue
            own.reach(stage)
            self._pass(own)

    def _pass(self, own: MicroBatch) -> None:
        self._require_whole()
        chosen = self._choose()
        if chosen is own or chosen is None:
            return
        self._tidy()
        own.pause(self._generators)
        self._hand_to(chosen)
        own.turn.acquire()
        self._require_whole()

    def _choose(self) -> MicroBatch | None:
        running = [one for one in self.micro_batches if not one.ended]
        low = min((one.stage for one in running), default=math.inf)
        if low > self.low:
            self.low = low
            self._on_low(low)
        chosen = next((one for one in running if one.stage == low), None)
        return chosen if chosen is None or chosen is running[0] or self._may_run(chosen) else running[0]

    def _hand_to(self, chosen: MicroBatch) -> None:
        self._generators.load(chosen.states)
        chosen.turn.release()

    def _require_whole(self) -> None:
        if self._failure is not None:
            raise _Abandoned

    def run(self, compute: Callable[[MicroBatch], Any], modes: CallerModes) -> None:
        """Computes all micro-batches. Once all have ended, raises the error that occurred first, if any.

        A second interrupt is raised at once.
        """
        live = partial(self._live, compute=compute, modes=modes, thread=threading.get_ident())
        begun, interrupted = False, None
        while not self._all_ended.is_set():
            try:
                if not begun:
                    # A signal may interrupt `_start` after it has started the thread. The next round of this loop then
                    # starts a second thread, which returns at once, because the first thread holds `_unbegun`.
                    _start(0, partial(self._begin, live, modes))
                    begun = True
                self._all_ended.wait(_POLL_SECONDS)
            except BaseException as error:
                if interrupted is not None:
                    raise
                interrupted = error
                self._fail(error)
        if self._failure is not None:
            raise self._failure

    def _begin(self, live: Callable[[MicroBatch], None], modes: CallerModes) -> None:
        """Starts a thread for each micro-batch except the first; computes the first micro-batch in this thread.

        Runs in a separate thread, because Python delivers signals only to the main thread.
        """
        if not self._unbegun.acquire(blocking=False):
            return
        first, *others = self.micro_batches
        for one in others:
            try:
                _start(one.index, partial(modes.context.copy().run, live, one))
            except RuntimeError as error:
                # The system has no more threads: the micro-batches that have begun abandon their work.
                self._fail(error)
                one.reach(math.inf)
        self._hand_to(first)
        modes.context.copy().run(live, first)

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error

    def _live(self, own: MicroBatch, compute: Callable[[MicroBatch], Any], modes: CallerModes, thread: int) -> None:
        own.turn.acquire()
        self._of[threading.get_ident()] = own
        try:
            with working_for(thread), modes.entered():
                if self._failure is None:
                    own.finish(compute(own))
        except _Abandoned:
            module_hooks.drain_autograd_queue()
        except BaseException as error:  # noqa: BLE001 - `run` raises it
            self._fail(error)
            module_hooks.drain_autograd_queue()
        finally:
            del self._of[threading.get_ident()]
            self._end(own)

    def _end(self, own: MicroBatch) -> None:
        own.reach(math.inf)
        own.pause(self._generators)
        try:
            chosen = self._choose()
        except BaseException as error:  # noqa: BLE001 - `run` raises it
            self._fail(error)
            chosen = self._choose()
        if chosen is None:
            self._all_ended.set()
        else:
            self._hand_to(chosen)


# Micro-batch threads that may still run.
_threads: set[threading.Thread] = set()


def _start(index: int, work: Callable[[], None]) -> None:
    """Runs `work` in a new thread for micro-batch `index`."""
    _register()
    for one in list(_threads):
        if one.ident is not None and not one.is_alive():
            _threads.discard(one)
    thread = threading.Thread(target=_serve, args=(work,), name=f"memascend micro-batch {index}", daemon=True)
    _threads.add(thread)
    thread.start()


def _serve(work: Callable[[], None]) -> None:
    module_hooks.note_thread()
    work()


@functools.cache
def _register() -> None:
    """Registers `_wait_for_all` once, after the sessions' exit handlers, so that atexit runs `_wait_for_all` first."""
    atexit.register(_wait_for_all)


def _wait_for_all() -> None:
    """Waits, at exit, for the threads of interrupted calls.

    Python ends a thread that requests the GIL while the interpreter shuts down. The process aborts if that thread is
    in a backward, or in the call with which torch empties the queue of an ending thread.
    """
    # The wait is bounded: a stage that never ends must not keep the process alive.
    until = time.monotonic() + _END_SECONDS
    for thread in list(_threads):
        if thread.ident is not None:
            thread.join(max(0.0, until - time.monotonic()))
