"""Lets one of several threads run at a time, each with a micro-batch, in an order that is recorded and predicted."""

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
    from memascend.params.unit import Home


@dataclass
class Path:
    """The streamed units that one micro-batch used, in order, and at which of them each gradient arrived.

    A use in a backward has another number than one in a forward, so that none is taken for the other.
    """

    units: list[int] = field(default_factory=list)
    # The stage at which each parameter's gradient arrived: the place in `units`, by the parameter's name.
    arrivals: dict[str, int] = field(default_factory=dict)

    def reach(self, homes: Iterable[Home]) -> list[int]:
        """Note that units are used; returns the uses that begin a stage."""
        begun = []
        backward = torch._C._current_graph_task_id() != -1  # noqa: SLF001
        for home in homes:
            # A unit that is always in memory is read once, whichever micro-batch uses it.
            if home.pinned or home.in_ram or (self.units and self.units[-1] in (home.index, ~home.index)):
                continue
            use = ~home.index if backward else home.index
            self.units.append(use)
            begun.append(use)
        return begun


class Recorder:
    """Follows micro-batches that are computed one after the other."""

    def __init__(self, look: Callable[[], Callable[[], str | None]]) -> None:
        """`look` is called after the first micro-batch; what it returns says after the last what changed since."""
        self.paths: list[Path] = []
        # Why a gradient cannot be summed by layer, of the first such one.
        self._unfit: str | None = None
        self._look = look
        self._changed: Callable[[], str | None] = lambda: None

    def begin(self) -> None:
        """The next micro-batch begins."""
        if len(self.paths) == 1:
            # The first one is none to compare with: libraries install hooks and fill caches in a model's first call.
            self._changed = self._look()
        self.paths.append(Path())

    def arrive(self, homes: Iterable[Home]) -> None:
        """A module or a backward is about to use units."""
        self.paths[-1].reach(homes)

    def take(self, gradient: Gradient) -> bool:
        """A gradient has arrived, which is left where it is."""
        path, name = self.paths[-1], gradient.name
        values = gradient.values
        if name in path.arrivals:
            self._unfit = self._unfit or f"the gradient of {name!r} arrives in pieces"
        elif values is not None and values.is_sparse:
            self._unfit = self._unfit or f"the gradient of {name!r} is sparse"
        path.arrivals[name] = len(path.units) - 1
        return False

    def require_open(self, gradient: Gradient) -> None:
        """Nothing is summed here."""

    def against_layers(self) -> str | None:
        """Why these micro-batches cannot be computed by layer; None where nothing of it was seen."""
        return self._unfit or self._changed()


class Course:
    """The stages of a micro-batch: the units in the order in which earlier micro-batches used them."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Merge the paths of micro-batches, which may skip units, as experts are skipped."""
        self.units: list[int] = []
        alike = Counter(tuple(path.units) for path in paths)
        for units in alike:
            self.units = _merged(self.units, list(units))
        self._stages: dict[int, list[int]] = {}
        for stage, unit in enumerate(self.units):
            self._stages.setdefault(unit, []).append(stage)
        # The last stage at which the gradient of a parameter arrived.
        self.arrivals: dict[str, int] = {}
        # By the use of a unit: the names of parameters whose gradients arrived during it.
        self.brought: dict[int | None, set[str]] = {}
        for path in paths:
            stages = self._followed(path)
            for name, at in path.arrivals.items():
                stage = stages[at] if at >= 0 else -1
                self.brought.setdefault(path.units[at] if at >= 0 else None, set()).add(name)
                self.arrivals[name] = max(stage, self.arrivals.get(name, -1))

    def next_stage(self, unit: int, stage: int) -> int | None:
        """The next stage after `stage` that uses a unit; None where no micro-batch has used it from there."""
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
    """The shortest order that has both, where they agree for the most part."""
    if not first:
        return second
    merged: list[int] = []
    for tag, i, j, k, m in SequenceMatcher(None, first, second, autojunk=False).get_opcodes():
        merged += first[i:j]
        if tag in ("insert", "replace"):
            merged += second[k:m]
    return merged


# How long the process waits at its end for micro-batches that were interrupted.
_END_SECONDS = 120.0
# How often the caller looks whether it is interrupted: `_thread.interrupt_main()` wakes no lock.
_POLL_SECONDS = 0.1


class _Abandoned(Exception):
    """Unwinds a micro-batch that waits while another one has failed."""


def _module_with(name: str, device: torch.device) -> Any:
    """The module of torch for a device, if there is one with this function."""
    module: Any = None if device.type == "cpu" else torch.get_device_module(device)
    return module if hasattr(module, name) else None


class Generators:
    """The states of torch's default random number generators, of the CPU and of the device that computes."""

    def __init__(self, device: torch.device) -> None:
        self._module = _module_with("get_rng_state", device)
        # Which need not be the current one.
        self._device = device

    def states(self) -> list[torch.Tensor]:
        """The states now."""
        states = [torch.get_rng_state()]
        if self._module is not None:
            states.append(self._module.get_rng_state(self._device))
        return states

    def load(self, states: list[torch.Tensor]) -> None:
        """Continue from other states."""
        torch.set_rng_state(states[0])
        if self._module is not None:
            self._module.set_rng_state(states[1], self._device)


def same_states(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Whether no random number was drawn between two looks at the generators."""
    return all(map(torch.equal, one, other))


class CallerStream:
    """The caller's stream on the device that computes: gradients of other streams are summed there."""

    def __init__(self, device: torch.device) -> None:
        self._module = _module_with("current_stream", device)
        self._device = device
        self._stream: Any = None if self._module is None else self._module.current_stream(device)

    def take(self, values: torch.Tensor) -> None:
        """Let later work on the caller's stream come after the kernels that made `values` on the current stream."""
        if self._module is None or (made_on := self._module.current_stream(self._device)) == self._stream:
            return
        self._stream.wait_stream(made_on)
        # Their memory is the other stream's.
        values.record_stream(self._stream)

    def entered(self) -> contextlib.AbstractContextManager[Any]:
        """Make the caller's stream the current one, inside."""
        return contextlib.nullcontext() if self._module is None else self._module.stream(self._stream)


class CallerModes:
    """The modes that torch keeps for each thread, as the calling thread has them."""

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
        # The second one's device is the current one.
        self._streams = [] if module is None else [module.current_stream(device), module.current_stream()]
        # Of products a processor's libraries have other sums with other numbers of threads.
        self._threads = torch.get_num_threads()
        self.context = contextvars.copy_context()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Set the modes in this thread, inside."""
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        with contextlib.ExitStack() as undo:
            undo.enter_context(torch.set_grad_enabled(self._grad))
            # The thread that begins a backward computes all of it: a device's own thread would wait at the first pass.
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
    """One micro-batch of a call: its stage, its random numbers and its thread's turn."""

    def __init__(self, index: int, states: list[torch.Tensor]) -> None:
        self.index = index
        self.states = states
        # The stage that it is in or waits for; -1 before the first one.
        self.stage: float = -1
        self.path = Path()
        self.turn = threading.Semaphore(0)
        self.result: Any = None

    def reach(self, stage: float) -> None:
        """Note the next stage, which begins once its turn comes; infinity: the micro-batch has ended."""
        self.stage = stage

    def pause(self, generators: Generators) -> None:
        """Others compute, with random numbers of their own."""
        self.states = generators.states()

    def finish(self, result: Any) -> None:
        """Note the result: all of the micro-batch was computed."""
        self.result = result

    @property
    def ended(self) -> bool:
        """Whether it has come to its end."""
        return self.stage == math.inf


class Baton:
    """The micro-batches of one call, of which one runs."""

    def __init__(
        self, course: Course, generators: Generators, states: list[list[torch.Tensor]], tidy: Callable[[], None]
    ) -> None:
        """Begin with none of them.

        `course` has the stages, and `states` the random numbers that each micro-batch begins with; `tidy` is called
        where another micro-batch is about to run.
        """
        self.micro_batches = [MicroBatch(index, own) for index, own in enumerate(states)]
        # The stage that all of them have reached.
        self.low: float = -1
        # One of them used units in an order that no earlier call has shown.
        self.strayed = False
        self._course = course
        self._generators = generators
        self._tidy = tidy
        # By the numbers of threads.
        self._of: dict[int, MicroBatch] = {}
        self._failure: BaseException | None = None
        self._unbegun = threading.Lock()
        self._all_ended = threading.Event()
        self._on_low: Callable[[float], None] = lambda _: None
        self._may_run: Callable[[MicroBatch], bool] = lambda _: True

    def follow(self, on_low: Callable[[float], None], may_run: Callable[[MicroBatch], bool]) -> None:
        """Call `on_low` with each stage that all micro-batches have reached.

        Where `may_run` is false of the micro-batch that has come least far, the first one runs instead: no gradient
        of the first one waits for another.
        """
        self._on_low, self._may_run = on_low, may_run

    @property
    def here(self) -> MicroBatch | None:
        """The micro-batch of this thread."""
        return self._of.get(threading.get_ident())

    def arrive(self, homes: Iterable[Home]) -> None:
        """Wait for this micro-batch's turn where it is about to use another unit."""
        own = self.here
        if own is None:
            return
        for unit in own.path.reach(homes):
            stage = self._course.next_stage(unit, own.stage)  # type: ignore[arg-type]
            if stage is None:
                self.strayed = True
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
        """Compute all micro-batches; raises what the first one that fails raises, after the others have ended."""
        live = partial(self._live, compute=compute, modes=modes, thread=threading.get_ident())
        begun, interrupted = False, None
        while not self._all_ended.is_set():
            try:
                if not begun:
                    # A signal may interrupt this at any place; a second thread finds that the first one has begun.
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
        """In the thread of the first micro-batch, as signals interrupt the caller's alone."""
        if not self._unbegun.acquire(blocking=False):
            return
        first, *others = self.micro_batches
        for one in others:
            try:
                _start(one.index, partial(modes.context.copy().run, live, one))
            except RuntimeError as error:
                # The system has no more threads: those that have begun end.
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
            module_hooks.let_go()
        except BaseException as error:  # noqa: BLE001 - it is raised by the call
            self._fail(error)
            module_hooks.let_go()
        finally:
            del self._of[threading.get_ident()]
            self._end(own)

    def _end(self, own: MicroBatch) -> None:
        own.reach(math.inf)
        own.pause(self._generators)
        try:
            chosen = self._choose()
        except BaseException as error:  # noqa: BLE001 - likewise
            self._fail(error)
            chosen = self._choose()
        if chosen is None:
            self._all_ended.set()
        else:
            self._hand_to(chosen)


# The threads of micro-batches that may not have ended.
_threads: set[threading.Thread] = set()


def _start(index: int, work: Callable[[], None]) -> None:
    """Begin the work of a micro-batch in a thread of its own, which ends with it."""
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
    """Once in a process, and after the runs' own ends: what is called last is called first."""
    atexit.register(_wait_for_all)


def _wait_for_all() -> None:
    """Wait for the threads of calls that were interrupted.

    Python ends a thread that asks for the GIL while the interpreter shuts down. In a call of torch, as in a backward,
    or in the one that empties the thread's queue when it ends, that aborts the process.
    """
    # A stage that never ends must not keep the process.
    until = time.monotonic() + _END_SECONDS
    for thread in list(_threads):
        if thread.ident is not None:
            thread.join(max(0.0, until - time.monotonic()))
