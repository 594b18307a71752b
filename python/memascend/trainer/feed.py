"""Feeds a Trainer its batches, and knows how to go on in the midst of an epoch with the same ones."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset

from memascend.errors import ConfigError
from memascend.trainer.digest import digest_of
from memascend.trainer.generators import generators_in, restore, states_of, undisturbed
from memascend.trainer.position import RandomNumbers

if TYPE_CHECKING:
    from collections.abc import Iterator


class Feed:
    """Stands for the DataLoader that a Trainer's loader reads from, which fetches one batch ahead.

    It knows the random numbers at the epoch's `iter()`, on which order and workers depend, and those before the newest
    fetch, on which a random collator depends: those of the process, and those of generators that data set, collator
    and sampler hold.
    """

    def __init__(self, loader: Any) -> None:
        """Feed from this loader."""
        self._loader = loader
        self._begun: RandomNumbers | None = None
        self._begun_own: dict[str, Any] = {}
        self._before: RandomNumbers | None = None
        self._before_own: dict[str, Any] = {}
        self._now_own: dict[str, Any] = {}
        self._fetched = 0
        self._digest = ""
        # Where to go on: what `taken()` gave, and the batches that the Trainer had.
        self._resumed: tuple[dict[str, Any], int] | None = None
        # What the next `iter()` returns, where that goes on.
        self._ready: Iterator[Any] | None = None
        self._is_tried = False
        # Generators of the program, by path.
        self._found: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The loader's own, for what asks whether this is a DataLoader."""
        return type(self._loader)

    def __iter__(self) -> Iterator[Any]:
        self.go_on()
        ready, self._ready = self._ready, None
        if ready is not None:
            return ready
        self._try(compares=True)
        self._begun, self._before, self._fetched = RandomNumbers.now(), None, 0
        self._found = self._generators()
        self._begun_own, self._before_own = states_of(self._found), {}
        return self._fetches(iter(self._loader))

    def taken(self) -> dict[str, Any]:
        """The place in the data, as JSON."""
        assert self._begun is not None
        return {
            "begun": self._begun.said(),
            "begun_own": self._begun_own,
            # A rank that is sent its batches by the first one fetches none.
            "before": (self._before or self._begun).said(),
            "before_own": _changed(self._begun_own, self._before_own),
            "now_own": _changed(self._before_own, states_of(self._found)),
            "fetched": self._fetched,
            "digest": self._digest,
        }

    def resume(self, taken: dict[str, Any], passed: int) -> None:
        """Let `go_on()` and the next `iter()` go on after `passed` batches, as `taken()` describes them."""
        self._resumed = (taken, passed)

    def go_on(self) -> None:
        """Go on there now, also where no `iter()` follows in this epoch: generators get the states of the commit."""
        if self._resumed is not None:
            taken, passed = self._resumed
            self._resumed = None
            self._try(compares=False)
            self._ready = self._continued(taken, passed)

    def restore_generators(self) -> None:
        """Set the generators of the program to the states of the commit, after `go_on()`."""
        restore(self._found, self._now_own)

    def begin_anew(self) -> None:
        """Let the next `iter()` be that of an epoch."""
        self._resumed = self._ready = None

    def _roots(self) -> dict[str, Any]:
        """Where generators of the program may be."""
        names = ("generator", "sampler", "batch_sampler", "collate_fn", "dataset")
        return {name: getattr(self._loader, name) for name in names if hasattr(self._loader, name)}

    def _generators(self) -> dict[str, Any]:
        return generators_in(self._roots())

    def _fetches(self, iterator: Iterator[Any]) -> Iterator[Any]:
        while True:
            if self._fetched == 1:
                # Some are made at the first use.
                self._found = self._generators()
            before, before_own = RandomNumbers.now(), states_of(self._found)
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self._before, self._before_own = before, before_own
            self._fetched += 1
            self._digest = digest_of(batch)
            yield batch

    # --- before the first batch ----------------------------------------------------------------------

    def _try(self, *, compares: bool) -> None:
        """Reject, once, examples whose random numbers cannot be kept, as far as the first batch shows it."""
        if self._is_tried:
            return
        self._is_tried = True
        workers: Any = getattr(self._loader, "num_workers", 0)
        if not isinstance(self._loader, DataLoader) or self._streams:
            return
        if workers and self._loader.persistent_workers and self._draws():
            raise ConfigError(
                "dataloader_persistent_workers=True keeps random numbers in its workers from epoch to epoch, and these "
                "examples are drawn by them, so a resume could not go on: leave it out"
            )
        if workers or not compares:
            return
        digests = []
        for _ in range(2):
            with undisturbed(*self._roots().values()):
                digests.append(digest_of(self._collated(self._indices())))
        if digests[0] != digests[1]:
            raise ConfigError(
                "the first batch, made twice with the same random numbers, differs: the data set or the collator draws "
                "from something that no commit can hold, so a resume would not be exact: let it draw from torch's, "
                "numpy's or Python's generators"
            )

    @property
    def _streams(self) -> bool:
        return isinstance(self._loader.dataset, IterableDataset) if hasattr(self._loader, "dataset") else True

    def _indices(self) -> Any:
        """The first indices that the sampler gives; None where there are none."""
        loader = self._loader
        return next(iter(loader.batch_sampler if loader.batch_sampler is not None else loader.sampler), None)

    def _collated(self, indices: Any) -> Any:
        """The batch of these indices."""
        if indices is None:
            return None
        loader, data = self._loader, self._loader.dataset
        if loader.batch_sampler is None:
            return loader.collate_fn(data[indices])
        # As torch fetches.
        at_once = getattr(data, "__getitems__", None)
        return loader.collate_fn([data[index] for index in indices] if at_once is None else at_once(indices))

    def _draws(self) -> bool:
        """Whether reading and collating examples draws random numbers."""
        roots = self._roots().values()
        with undisturbed(*roots):
            # The sampler may draw.
            indices = self._indices()
            with undisturbed(*roots) as draws:
                self._collated(indices)
                return draws()

    # --- a resume ------------------------------------------------------------------------------------

    def _continued(self, taken: dict[str, Any], passed: int) -> Iterator[Any]:
        """Go on after the newest batch of the commit, which is made again and compared, unless it was fetched ahead."""
        own = RandomNumbers.now()
        # Earlier versions kept a list: the states of loader and samplers alone, which begin each epoch anew.
        self._begun_own = taken["begun_own"] if isinstance(taken["begun_own"], dict) else {}
        self._begun = RandomNumbers.of(taken["begun"])
        self._begun.bring_back()
        self._restore(self._begun_own, are_all=False)
        iterator = iter(self._loader)
        fetched = taken["fetched"]
        self._pass(iterator, fetched - 1, fetched)
        # The newest batch was fetched with the random numbers of then.
        self._before = RandomNumbers.of(taken["before"])
        self._before_own = {**self._begun_own, **taken.get("before_own", {})}
        self._restore(self._before_own, are_all=True)
        self._before.bring_back()
        newest = self._next(iterator, fetched, fetched) if fetched else None
        own.bring_back()
        self._fetched, self._digest, self._found = fetched, digest_of(newest), self._generators()
        # The program may draw after a fetch, too.
        self._now_own = {**self._before_own, **taken.get("now_own", {})}
        if fetched and taken["digest"] not in (None, self._digest):
            raise ConfigError(
                f"batch {fetched} of the epoch is another one than before, so a resume would not be exact: give the "
                "data of this run; a data set or a collator that draws from a generator that cannot be found cannot be "
                'resumed: let it draw from torch\'s, or start anew with existing="replace"'
            )
        return itertools.chain([newest] if fetched > passed else [], self._fetches(iterator))

    def _restore(self, states: dict[str, Any], *, are_all: bool) -> None:
        """Set the states of the program's generators; where not all are there yet, a batch is made that makes them."""
        found = self._generators()
        if are_all and not states.keys() <= found.keys() and not self._streams:
            self._collated(self._indices())
            found = self._generators()
        restore(found, states if are_all else {path: states[path] for path in states.keys() & found.keys()})

    def _pass(self, iterator: Any, count: int, of: int) -> None:
        """Pass batches that the run has fetched."""
        indices = getattr(iterator, "_sampler_iter", None)
        works: Any = getattr(self._loader, "num_workers", 0)
        if self._streams or works or indices is None:
            # Workers have random numbers of their own, and a stream can only be read.
            for number in range(count):
                self._next(iterator, number + 1, of)
            return
        for _ in range(count):
            next(indices, None)

    @staticmethod
    def _next(iterator: Any, number: int, of: int) -> Any:
        try:
            return next(iterator)
        except StopIteration:
            raise ConfigError(
                f"the data ends after {number - 1} batches of this epoch, and the run had fetched {of} of them: give "
                'the data of this run, or start anew with existing="replace"'
            ) from None


def _changed(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """The states that differ from earlier ones: most generators of a program draw seldom."""
    return {path: state for path, state in now.items() if state != before.get(path)}
