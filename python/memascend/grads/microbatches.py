"""Computes the micro-batches of an `accumulate()` call: layer by layer if possible, otherwise one after the other.

Both ways give bit-identical results.

`baton` defines the stages and runs the threads of the micro-batches; see [Note: Stages] there.

[Note: Order of sums] The gradient of a parameter is the sum of one part per micro-batch, added in the order of the
micro-batches, as in a loop. If the part of a later micro-batch arrives before the part of an earlier micro-batch, the
later part waits in memory (`_Sum.early`). It waits until the earlier part arrives, or until the earlier micro-batch has
passed the stage at which the earlier part would arrive.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_map_only

from memascend.errors import ConfigError, UsageError
from memascend.grads.baton import (
    Baton,
    CallerModes,
    CallerStream,
    Generators,
    Path,
    Recorder,
    StageOrder,
    same_states,
)
from memascend.grads.gradient import shares_memory
from memascend.memory import free_scratch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from memascend.grads.baton import MicroBatch
    from memascend.grads.gradient import Gradient
    from memascend.grads.gradients import Gradients
    from memascend.params.residency import Residency
    from memascend.storage import Engine


@dataclass(eq=False, slots=True)
class _Sum:
    """The sum of one parameter's gradient over micro-batches; see [Note: Order of sums]."""

    gradient: Gradient
    stage: int  # the last stage at which parts arrive: a micro-batch that has passed it delivers none
    came: set[int] = field(default_factory=set)  # the indices of micro-batches whose parts have arrived
    early: dict[int, torch.Tensor] = field(default_factory=dict)  # parts that wait for an earlier part, by index
    values: torch.Tensor | None = None  # the sum so far, if it is in memory
    stored: bool = False  # the sum so far is on storage, because it did not fit into the limit

    def begin(self, values: torch.Tensor) -> None:
        assert not self.stored
        assert self.values is None
        self.values = values

    def be_stored(self) -> None:
        """Marks the sum so far as stored; `PartialSums` adds further parts on storage."""
        assert self.values is None
        self.stored = True

    def take(self) -> torch.Tensor:
        values, self.values = self.values, None
        assert values is not None
        return values


@dataclass(eq=False)
class PartialSums:
    """Sums the gradients of one `accumulate()` call. Delivers each sum once no micro-batch can add to this sum."""

    gradients: Gradients  # takes complete sums
    course: StageOrder  # has the stage at which each gradient arrives
    baton: Baton  # knows which micro-batch computes, and the stage of each
    # The maximum number of bytes in memory for sums, and for parts that wait for an earlier micro-batch. The engine
    # keeps all other sums on storage, and adds further parts to these sums on storage. With gradients="ram", all sums
    # stay in memory.
    limit: int
    room: Callable[[int], None]  # if `Accumulation.strict`, waits until the engine's queue has room for this many bytes
    stream: CallerStream  # the stream on which gradients are summed
    whole: bool  # True if no more gradients of the step are expected after this call

    def __post_init__(self) -> None:
        self._keeps_all = self.gradients.loop.mode == "ram"
        self._open: dict[str, _Sum] = {}
        self._done: set[str] = set()
        # By stage: the names of gradients that have begun to arrive. Their sums are complete once all micro-batches
        # have passed the stage.
        self._due: dict[int, list[str]] = {}
        # `nbytes`: bytes of all sums and parts in memory. `_waiting`: bytes of the parts alone, each of which waits for
        # the part of an earlier micro-batch.
        self.nbytes = 0
        self._waiting = 0
        self.arrive = self.baton.arrive
        self.baton.follow(self._reached, self._may_run)

    def take(self, gradient: Gradient) -> bool:
        """Takes the part of a gradient that a micro-batch has just accumulated, and empties `p.grad`.

        Takes nothing and returns False if the current thread computes no micro-batch.
        """
        own = self.baton.here
        if own is None:
            return False
        values = gradient.values
        assert values is not None, "it was accumulated"
        gradient.put(None)
        if values.requires_grad or values.is_sparse:
            kind = "the sparse" if values.is_sparse else "because of backward(create_graph=True), the"
            raise UsageError(
                f"{kind} gradient of {gradient.name!r} cannot be summed by layer, where gradients must be dense and "
                "without a graph: pass by_layer=False to accumulate()"
            )
        if shares_memory(values):
            # Other code has this memory, too, and may write to it: copy the part.
            values = values.clone()
        self.stream.take(values)
        with torch.no_grad(), self.stream.entered():
            self._add_part(gradient, own, values)
        return True

    def require_open(self, gradient: Gradient) -> None:
        """Raises UsageError for a part of a gradient whose sum is complete already."""
        if self.baton.here is not None and gradient.name in self._done:
            raise self._other_order(gradient.name)

    def _other_order(self, name: str) -> UsageError:
        """Returns the error for a part that came out of order. In later calls, the sum waits for all micro-batches."""
        self.course.expect_late(name)
        return UsageError(
            f"a gradient of {name!r} arrived later or more often than in earlier calls of accumulate(), so its sum "
            "would have other bits: nothing of the step is kept. Compute the step again; its sum then waits for all "
            "micro-batches. If the error comes again, pass by_layer=False to accumulate()"
        )

    def _add_part(self, gradient: Gradient, own: MicroBatch, values: torch.Tensor) -> None:
        name = gradient.name
        found = self._sum_of(gradient, own)
        # A part of a later micro-batch, once it is added, cannot be taken out of the sum again.
        added = found.came - found.early.keys()
        if name in self._done or own.index in found.came or any(index > own.index for index in added):
            raise self._other_order(name)
        if name not in self._open:
            self._open[name] = found
            self._due.setdefault(found.stage, []).append(name)
        found.came.add(own.index)
        own.path.arrivals[name] = len(own.path.units) - 1
        found.early[own.index] = values
        self.nbytes += values.nbytes
        self._waiting += values.nbytes
        self._add_in_order(found)
        if found.early:
            self._make_room()
        if len(found.came) == len(self.baton.micro_batches) and not found.early:
            self._complete(found)

    def _add_in_order(self, found: _Sum, *, all_of_it: bool = False) -> None:
        """Adds parts from `early` in order, up to the first part that must wait. If `all_of_it`, adds all parts."""
        for index in sorted(found.early):
            if not all_of_it and any(self._may_come(found, before) for before in range(index)):
                return
            values = found.early.pop(index)
            self.nbytes -= values.nbytes
            self._waiting -= values.nbytes
            self._add(found, values)

    def _sum_of(self, gradient: Gradient, own: MicroBatch) -> _Sum:
        """Returns the open sum to which micro-batch `own` adds its part; a new sum if none is open."""
        found = self._open.get(gradient.name)
        return found or _Sum(gradient, max(self.course.last_stage(gradient.name), int(own.stage)))

    def _make_room(self) -> None:
        """Moves sums, but no waiting parts, to storage until both together are within the limit.

        With gradients="ram", moves nothing.
        """
        for found in self._open.values():
            if found.values is not None and self.nbytes > self.limit and not self._keeps_all:
                values = found.take()
                self.nbytes -= values.nbytes
                self._store(found, values)
        self.room(self.nbytes)

    def _may_run(self, own: MicroBatch) -> bool:
        """True if the limit allows the waiting parts that micro-batch `own` would deliver in its next stage."""
        use = own.path.units[-1] if own.path.units else None
        waiting = self._waiting
        for name in self.course.brought.get(use, ()):
            gradient = self.gradients.by_name[name]
            found = self._sum_of(gradient, own)
            if any(self._may_come(found, before) for before in range(own.index)):
                waiting += gradient.place.nothing.nbytes
        # With gradients="ram", the sums alone may use up the limit, so no part may wait.
        return waiting <= (0 if self._keeps_all else self.limit)

    def _may_come(self, found: _Sum, index: int) -> bool:
        """True if micro-batch `index` may still deliver its part: it has not passed the stage at which parts arrive."""
        if index in found.came:
            return False
        return self.baton.micro_batches[index].stage <= found.stage

    def _add(self, found: _Sum, values: torch.Tensor) -> None:
        gradient = found.gradient
        if found.stored:
            gradient.change(gradient.laid_out(values), add=True)
        elif found.values is not None:
            found.values.add_(values)
        elif self._keeps_all or self.nbytes + values.nbytes <= self.limit:
            self.room(self.nbytes + values.nbytes)
            self.nbytes += values.nbytes
            found.begin(values)
        else:
            self._store(found, values)

    def _store(self, found: _Sum, values: torch.Tensor) -> None:
        self.gradients.store_sum(found.gradient, values)
        found.gradient.put(None)
        found.be_stored()

    def _complete(self, found: _Sum) -> None:
        gradient = found.gradient
        del self._open[gradient.name]
        self._done.add(gradient.name)
        if found.stored:
            gradient.put(gradient.handle)
            if self.whole and not gradient.in_pieces:
                gradient.use_stored()
        elif found.values is not None:
            values = found.take()
            self.nbytes -= values.nbytes
            self.gradients.deliver(gradient, values, whole=self.whole)

    def _reached(self, low: float) -> None:
        """Completes the sums of the stages before `low`, because all micro-batches have reached stage `low`."""
        last = max(self._due, default=-1)
        end = int(min(low, last + 1))
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass(), self.stream.entered():  # noqa: SLF001
            for stage in sorted(stage for stage in self._due if stage < end):
                for name in self._due.pop(stage):
                    found = self._open.get(name)
                    if found is not None:
                        self._add_in_order(found, all_of_it=True)
                        self._complete(found)

    def drop(self) -> None:
        """Drops all sums that are not complete."""
        for found in self._open.values():
            if found.stored:
                found.gradient.put(found.gradient.handle)
        self._open.clear()
        self.nbytes = self._waiting = 0


def _is_compiled(module: torch.nn.Module) -> bool:
    # torch.compile(module) wraps the module in another one; module.compile() does not.
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")  # noqa: SLF001


def _is_same(one: Any, other: Any) -> bool:
    """True if `one` and `other` are the same object, or equal numbers or strings.

    Code often replaces a number or a string by an equal new object.
    """
    return one is other or (isinstance(one, int | float | str) and type(one) is type(other) and bool(one == other))


class ModuleValues:
    """A snapshot of the attributes and buffers of a model's modules.

    The snapshot has the identity of each value, and also the version of each tensor.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        """Takes the snapshot. It keeps the values alive, so that no new object gets the identity of a value."""
        self._noted = [
            (f"module {name!r}" if name else "the model", values, dict(values), _versions(values))
            for name, module in model.named_modules()
            for values in (vars(module), module._buffers)  # noqa: SLF001
        ]

    def changed(self) -> str | None:
        """Returns a text that names one value that was added, removed, replaced or written to; None if none was."""
        for title, values, before, versions in self._noted:
            names = [
                name
                for name in {**before, **values}
                if not (name in before and name in values and _is_same(before[name], values[name]))
            ]
            names += [name for name, version in _versions(values).items() if versions.get(name) != version]
            if names:
                return f"{title} changes {names[0]!r} from one micro-batch to the next"
        return None


def _versions(values: Mapping[str, Any]) -> dict[str, int]:
    """Returns the version of each tensor, except parameters and inference tensors.

    Materializing a weight raises its version. Inference tensors have no version.
    """
    return {
        name: value._version  # noqa: SLF001
        for name, value in values.items()
        if isinstance(value, torch.Tensor) and not (isinstance(value, torch.nn.Parameter) or value.is_inference())
    }


_log = logging.getLogger("memascend")


# After `_tidy` has called `free_scratch`, `_tidy` frees nothing for this many times the duration of that call, because
# it takes longer to fill the memory again than to free it.
_PAUSES = 200
# If a compiled block waits for other micro-batches, torch before this version compiles it in parts. These parts round
# like eager code, so the bits would change.
_FUSES_ALIKE = "2.15"


@dataclass(kw_only=True, eq=False)
class Accumulation:
    """Computes a run's micro-batches, and keeps the order of units that earlier calls have shown."""

    model: torch.nn.Module
    gradients: Gradients  # the model's gradients
    residency: Residency  # the model's units in memory
    engine: Engine  # if `strict`, the engine's queue of gradients counts against `limit`, too
    device: torch.device  # the device that computes the model
    limit: int  # bytes in memory for partial sums, and for parts that wait to be added to them
    strict: bool  # True if the user gave a budget: sums and the engine's queue together stay within `limit`
    never: str | None  # the reason why no call may compute by layer; None if there is no reason

    def __post_init__(self) -> None:
        self._generators = Generators(self.device)
        # The time from which `_tidy` may free MKL's memory again.
        self._gives_back_at = 0.0
        # The stages that earlier calls have shown; None until `_watched` has recorded a call.
        self._course: StageOrder | None = None
        self._logged: set[str] = set()

    def run(
        self,
        loss_of: Callable[[Any], Any],
        batches: Iterable[Any],
        begin: Callable[[torch.Tensor], None],
        *,
        by_layer: bool,
        seeded: bool = True,
    ) -> list[Any]:
        """Computes losses and gradients of micro-batches, and returns the results; `begin` begins a loss's backward.

        If `by_layer` and `seeded` are set, each micro-batch has a separate seed for random numbers. All seeds are drawn
        before the first micro-batch. If `seeded` is False, there are no seeds. If `_watched` or `_require_none_drawn`
        then finds that a call drew random numbers, all later calls compute one micro-batch after the other.
        """

        def computed(batch: Any) -> Any:
            result = loss_of(batch)
            begin(_loss_in(result))
            return tree_map_only(torch.Tensor, torch.Tensor.detach, result)

        if not by_layer:
            return self._in_turn(computed, batches)
        listed = list(batches)
        seeds = [_drawn_seed() for _ in listed] if seeded else None
        if self.never is None and torch.__version__ < _FUSES_ALIKE and any(map(_is_compiled, self.model.modules())):
            self.never = f"torch before {_FUSES_ALIKE} compiles other kernels for blocks that wait for micro-batches"
        if self._is_fit(len(listed)):
            return self._by_layer(computed, listed, seeds)
        if self.never is not None or self._course is not None or len(listed) < 2:
            return self._in_turn(computed, listed, seeds)
        with self._watched(seeded=seeded) as recorder:
            return self._in_turn(computed, listed, seeds, recorder)

    # --- one after the other -----------------------------------------------------------

    def _in_turn(
        self,
        computed: Callable[[Any], Any],
        batches: Iterable[Any],
        seeds: list[int] | None = None,
        recorder: Recorder | None = None,
    ) -> list[Any]:
        results = []
        # Read `batches` one at a time: a generator's side effects then fall between two micro-batches, as in a loop.
        # The length of a DataLoader may be an estimate, so only the length of a sequence counts.
        count = len(batches) if isinstance(batches, Sequence) else math.inf
        with self.gradients.backwards.expecting(count):
            for index, batch in enumerate(batches):
                if recorder is not None:
                    recorder.begin()
                if seeds is not None:
                    torch.manual_seed(seeds[index])
                results.append(computed(batch))
        return results

    @contextlib.contextmanager
    def _watched(self, *, seeded: bool) -> Iterator[Recorder]:
        """Records the order in which units are used, and any reason against computing by layer."""

        def look() -> Callable[[], str | None]:
            values, foreign, states = ModuleValues(self.model), _foreign_generators(), self._generators.states()

            def changed() -> str | None:
                drawn = not (seeded or same_states(states, self._generators.states()))
                return _DRAWN if drawn or foreign != _foreign_generators() else values.changed()

            return changed

        recorder = Recorder(look)
        with self.residency.followed_by(recorder):
            yield recorder
        self.never = recorder.against_layers()
        self._course = StageOrder(recorder.paths)
        if len(self._course.units) < 2:
            self.never = self.never or "at most one unit is streamed"
        if self.never is not None:
            self.explain(self.never)

    def explain(self, why: str) -> None:
        """Logs, once for each reason, why micro-batches are computed one after the other."""
        if why not in self._logged:
            self._logged.add(why)
            _log.info("accumulate(): micro-batches are computed one after the other, because %s", why)

    # --- by layer -----------------------------------------------------------------------

    def _is_fit(self, count: int) -> bool:
        """True if this call is computed by layer. Logs any reason against it from `never` or `_unfit_now()`."""
        if count < 2:
            return False
        why = self.never or self._unfit_now()
        if why is not None:
            self.explain(why)
            return False
        return self._course is not None

    def _unfit_now(self) -> str | None:
        if _get_current_dispatch_mode_stack():
            return "a torch dispatch mode is active in this thread, but not in the threads that would compute by layer"
        for gradient in self.gradients.by_name.values():
            if gradient.values is not None:
                return f"{gradient.name!r} already has a gradient"
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
                hooks = gradient.place.parameter._post_accumulate_grad_hooks  # noqa: SLF001
            # `Gradients` has registered one hook on each parameter.
            if hooks is not None and len(hooks) > 1:
                return f"a hook of yours is called for each accumulated gradient of {gradient.name!r}"
        return None

    def _by_layer(self, computed: Callable[[Any], Any], batches: list[Any], seeds: list[int] | None) -> list[Any]:
        states = []
        for index in range(len(batches)):
            if seeds is not None:
                torch.manual_seed(seeds[index])
            states.append(self._generators.states())
        assert self._course is not None
        baton = Baton(self._course, self._generators, states, self._tidy)
        backwards = self.gradients.backwards
        whole = backwards.declared == 1 or backwards.is_last(len(batches))
        stream = CallerStream(self.device)
        sums = PartialSums(self.gradients, self._course, baton, self.limit, self._make_room, stream=stream, whole=whole)
        try:
            with self.residency.followed_by(sums):
                self.gradients.begin_backward()
                baton.run(lambda own: computed(batches[own.index]), CallerModes(self.device))
                if seeds is None:
                    self._require_none_drawn(states[0], baton)
        except BaseException:
            self._abandon(sums)
            raise
        finally:
            free_scratch()
        backwards.note_ended(len(batches))
        if baton.left_known_order:
            before = Path(self._course.units, self._course.arrivals)
            self._course = StageOrder([before, *(one.path for one in baton.micro_batches)], self._course.late)
        self._generators.load(baton.micro_batches[-1].states)
        return [one.result for one in baton.micro_batches]

    def _tidy(self) -> None:
        """Frees MKL's scratch memory from time to time, before another micro-batch computes."""
        began = time.monotonic()
        if began >= self._gives_back_at:
            free_scratch()
            ended = time.monotonic()
            self._gives_back_at = ended + _PAUSES * (ended - began)

    def _require_none_drawn(self, states: list[torch.Tensor], baton: Baton) -> None:
        if not all(same_states(states, one.states) for one in baton.micro_batches):
            self.never = _DRAWN
            raise UsageError(
                f"{self.never}, but earlier steps drew no random numbers. Nothing of this step is kept: call "
                "zero_grad(), and compute the step again. accumulate() now computes micro-batches one after the other"
            )

    def _abandon(self, sums: PartialSums) -> None:
        """Drops all gradients. All of them are from this call, because there were no gradients before the call."""
        sums.drop()
        self.gradients.drop_all()
        for gradient in self.gradients.by_name.values():
            gradient.put(None)

    def _make_room(self, nbytes: int) -> None:
        if self.strict and self.engine.queued_bytes + nbytes > self.limit:
            self.engine.drain()


def _loss_in(result: Any) -> torch.Tensor:
    loss = result[0] if isinstance(result, tuple) and result else result
    if not isinstance(loss, torch.Tensor):
        raise ConfigError(
            f"loss_of returned {type(result).__name__}: it must return the loss as a torch.Tensor, or a tuple whose "
            "first item is the loss"
        )
    return loss


_DRAWN = "random numbers are drawn, and computing by layer would change them"


def _drawn_seed() -> int:
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())


def _foreign_generators() -> tuple[Any, ...]:
    """Returns the states of Python's and numpy's random number generators, in a form that can be compared."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return (random.getstate(),)
    name, keys, *rest = numpy.random.get_state(legacy=True)
    return (random.getstate(), name, keys.tobytes(), *rest)
