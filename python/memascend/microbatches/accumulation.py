"""Implements `OffloadedOptimizer.accumulate()`: the backwards of all micro-batches of a step, layer by layer."""

from __future__ import annotations

import contextlib
import logging
import random
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_map_only

from memascend.errors import ConfigError, UsageError
from memascend.microbatches.baton import Baton, CallerModes, Generators, Threads
from memascend.microbatches.course import Course, KeptValues, Path, Recorder
from memascend.microbatches.sums import PartialSums

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from memascend.engine import Engine
    from memascend.gradients.arrivals import Arrivals
    from memascend.residency.residency import Residency

_log = logging.getLogger("memascend")

# The key of our own hook on accumulated gradients.
_OWN_HOOK = "memascend"


@dataclass(kw_only=True, eq=False)
class Accumulation:
    """The micro-batches of a run, and what earlier calls have shown of them."""

    model: torch.nn.Module
    arrivals: Arrivals  # of its gradients
    residency: Residency  # of its units
    engine: Engine  # whose queue of gradients has the same bound as their sums
    device: torch.device  # the one that computes
    limit: int  # bytes of gradients that may be summed in memory
    strict: bool  # the user gave a budget: sums and queue together stay within `limit`
    never: str | None  # why micro-batches cannot be computed by layer; None where they can
    peak: int = 0  # bytes of gradients that were summed in memory at once, at most

    def __post_init__(self) -> None:
        self._generators = Generators(self.device)
        self._threads = Threads()
        # What the calls so far have shown; None before the first.
        self._course: Course | None = None
        self._sums: PartialSums | None = None
        self._told: set[str] = set()

    @property
    def nbytes(self) -> int:
        """Bytes of gradients that are summed in memory now."""
        return 0 if self._sums is None else self._sums.nbytes

    def run(
        self,
        loss_of: Callable[[Any], Any],
        batches: Iterable[Any],
        begin: Callable[[torch.Tensor], None],
        *,
        by_layer: bool,
    ) -> list[Any]:
        """Compute the losses and gradients of micro-batches; `begin` begins the backward of one's loss."""
        listed = list(batches)
        seeds = [int(torch.empty((), dtype=torch.int64, device="cpu").random_().item()) for _ in listed]
        if not listed:
            return []

        def computed(batch: Any) -> Any:
            result = loss_of(batch)
            begin(_loss_in(result))
            return tree_map_only(torch.Tensor, torch.Tensor.detach, result)

        if by_layer and self._is_fit(len(listed)):
            return self._by_layer(computed, listed, seeds)
        watched = by_layer and self.never is None and self._course is None and len(listed) > 1
        with self._watched() if watched else contextlib.nullcontext() as recorder:
            return self._in_turn(computed, listed, seeds, recorder)

    def close(self) -> None:
        """Let the threads end."""
        self._threads.close()

    # --- one after the other -----------------------------------------------------------

    def _in_turn(
        self, computed: Callable[[Any], Any], batches: list[Any], seeds: list[int], recorder: Recorder | None
    ) -> list[Any]:
        results = []
        with self.arrivals.backwards.expecting(len(batches)):
            for batch, seed in zip(batches, seeds, strict=True):
                if recorder is not None:
                    recorder.begin()
                torch.manual_seed(seed)
                results.append(computed(batch))
        return results

    @contextlib.contextmanager
    def _watched(self) -> Iterator[Recorder]:
        """Learn the order in which units are used, and whether a module keeps something for the next micro-batch."""
        kept, numbers = KeptValues(self.model), _random_states()
        recorder = Recorder()
        self.residency.stages = recorder
        self.arrivals.parts = recorder
        try:
            yield recorder
        finally:
            self.residency.stages = None
            self.arrivals.parts = None
        changed = kept.changed()
        self.never = changed or (None if numbers == _random_states() else _OTHER_NUMBERS)
        if recorder.unfit:
            name, reason = next(iter(recorder.unfit.items()))
            self.never = f"the gradient of {name!r} {reason}"
        self._learn(recorder.paths)
        if self.never is not None:
            self._tell(self.never)

    def _learn(self, paths: list[Path]) -> None:
        self._course = Course(paths)
        if len(self._course.units) < 2:
            self.never = self.never or "no more than one unit is streamed"

    def _tell(self, why: str) -> None:
        if why not in self._told:
            self._told.add(why)
            _log.info("accumulate(): micro-batches are computed one after the other, since %s", why)

    # --- by layer -----------------------------------------------------------------------

    def _is_fit(self, count: int) -> bool:
        """Whether this call is computed by layer; the log says why not."""
        if count == 1:
            return False
        why = self.never or self._unfit_now()
        if why is not None:
            self._tell(why)
            return False
        return self._course is not None

    def _unfit_now(self) -> str | None:
        if _get_current_dispatch_mode_stack():
            return "a dispatch mode is active, which other threads do not have"
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            for gradient in self.arrivals.by_name.values():
                parameter = gradient.place.parameter
                if parameter.grad is not None:
                    return f"{gradient.name!r} has a gradient already"
                hooks = parameter._post_accumulate_grad_hooks  # noqa: SLF001
                if hooks is not None and set(hooks) != {_OWN_HOOK}:
                    return f"a hook of yours hears of each accumulated gradient of {gradient.name!r}"
        return None

    def _by_layer(self, computed: Callable[[Any], Any], batches: list[Any], seeds: list[int]) -> list[Any]:
        states = []
        for seed in seeds:
            torch.manual_seed(seed)
            states.append(self._generators.states())
        assert self._course is not None
        baton = Baton(self._course, self._generators, states)
        backwards = self.arrivals.backwards
        whole = backwards.declared == 1 or backwards.is_last(len(batches))
        self._sums = PartialSums(self.arrivals, self._course, baton, self.limit, self._make_room, whole=whole)
        kept, numbers = KeptValues(self.model), _random_states()
        self.residency.stages, self.arrivals.parts = baton, self._sums
        try:
            self.arrivals.begin_backward()
            baton.run(lambda own: computed(batches[own.index]), CallerModes(self.device), self._threads)
            self._require_nothing_kept(kept.changed() or (None if numbers == _random_states() else _OTHER_NUMBERS))
        except BaseException:
            self._abandon()
            raise
        finally:
            self.residency.stages = self.arrivals.parts = None
            self.peak = max(self.peak, self._sums.peak)
            self._sums = None
        backwards.count += len(batches)
        if baton.strayed:
            before = Path(self._course.units, self._course.arrivals)
            self._course = Course([before, *(one.path for one in baton.micro_batches)])
        self._generators.load(baton.micro_batches[-1].states)
        return [one.result for one in baton.micro_batches]

    def _require_nothing_kept(self, changed: str | None) -> None:
        if changed is not None:
            self.never = changed
            raise UsageError(
                f"{changed} while micro-batches are computed by layer, and did not in earlier calls: nothing of the "
                "step is kept; call accumulate() again, which takes one after the other from now on"
            )

    def _abandon(self) -> None:
        """Forget all that the call has brought; before it there was nothing."""
        assert self._sums is not None
        self._sums.drop()
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            self.arrivals.drop_all()
            for gradient in self.arrivals.by_name.values():
                gradient.place.parameter.grad = None

    def _make_room(self, nbytes: int) -> None:
        if self.strict and self.engine.queued_bytes + nbytes > self.limit:
            self.engine.drain()


def _loss_in(result: Any) -> torch.Tensor:
    loss = result[0] if isinstance(result, tuple) and result else result
    if not isinstance(loss, torch.Tensor):
        raise ConfigError(
            f"loss_of returned {type(result).__name__}: it returns the loss, or a tuple whose first item is the loss"
        )
    return loss


_OTHER_NUMBERS = "random numbers of Python or numpy are drawn"


def _random_states() -> tuple[Any, ...]:
    """The states of generators that are not torch's, so that two of them can be compared."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return (random.getstate(),)
    name, keys, *rest = numpy.random.get_state(legacy=True)
    return (random.getstate(), name, keys.tobytes(), *rest)
