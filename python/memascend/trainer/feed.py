"""Feeds batches to a Trainer; a resume in the middle of an epoch continues with the same batches."""

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
    """Wraps the DataLoader of a Trainer. Records random states and the position in the data, for `taken()`.

    accelerate's loader fetches from this object one batch ahead of the Trainer. `Feed` records random states at two
    moments: at the epoch's `iter()`, because the states at this moment determine the order and the workers' seeds, and
    before the newest fetch, because a collator may draw random numbers during the fetch.

    `Feed` records the states of the process's generators. In attributes that end in `_own`, `Feed` also records the
    states of the program's generators, which the data set, the collator and the sampler hold; `taken()` adds their
    current states.
    """

    def __init__(self, loader: Any) -> None:
        """Feeds batches from `loader`."""
        self._loader = loader
        # The states at the epoch's iter().
        self._begun: RandomNumbers | None = None
        self._begun_own: dict[str, Any] = {}
        # The states before the newest fetch; None before the first fetch.
        self._before: RandomNumbers | None = None
        self._before_own: dict[str, Any] = {}
        # The states of the program's generators in the commit; `go_on()` sets this.
        self._now_own: dict[str, Any] = {}
        # The number of batches fetched in this epoch, and the digest of the newest batch.
        self._fetched = 0
        self._digest = ""
        # The position to resume at: a result of `taken()`, and the number of batches that the Trainer had already used.
        self._resumed: tuple[dict[str, Any], int] | None = None
        # The iterator that continues the epoch at a resume. None after `iter()` has returned this iterator.
        self._ready: Iterator[Any] | None = None
        self._is_tried = False
        # The path of each generator of the program -> the generator.
        self._found: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The loader's class, so that `isinstance(feed, DataLoader)` is true."""
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
        """Returns the position in the data, as JSON."""
        assert self._begun is not None
        return {
            "begun": self._begun.to_json(),
            "begun_own": self._begun_own,
            # A rank that receives its batches from rank 0 never fetches: use the states at iter().
            "before": (self._before or self._begun).to_json(),
            "before_own": _changed(self._begun_own, self._before_own),
            "now_own": _changed(self._before_own, states_of(self._found)),
            "fetched": self._fetched,
            "digest": self._digest,
        }

    def resume(self, taken: dict[str, Any], passed: int) -> None:
        """Makes the next `go_on()` or `iter()` continue the epoch of the position `taken`, after `passed` batches."""
        self._resumed = (taken, passed)

    def go_on(self) -> None:
        """Moves to the position that `resume()` set; does nothing if no position is set.

        `iter()` calls this method. `Resume` calls it directly because the Trainer may end the epoch without another
        `iter()`.
        """
        if self._resumed is not None:
            taken, passed = self._resumed
            self._resumed = None
            self._try(compares=False)
            self._ready = self._continued(taken, passed)

    def restore_generators(self) -> None:
        """Sets the program's generators to their states in the commit. Call `go_on()` before this method."""
        restore(self._found, self._now_own)

    def forget_position(self) -> None:
        """Forgets the position to resume at, so that the next `iter()` starts a new epoch."""
        self._resumed = self._ready = None

    def _roots(self) -> dict[str, Any]:
        """Returns the loader's attributes that may hold generators of the program."""
        names = ("generator", "sampler", "batch_sampler", "collate_fn", "dataset")
        return {name: getattr(self._loader, name) for name in names if hasattr(self._loader, name)}

    def _generators(self) -> dict[str, Any]:
        return generators_in(self._roots())

    def _fetches(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """Yields batches, and records the random states before each fetch."""
        while True:
            if self._fetched == 1:
                # The first fetch may have made new generators.
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
        """Rejects data whose random numbers a commit cannot store. Checks the first batch only, and only once.

        With persistent workers, checks whether the batch draws random numbers. Without workers and with `compares`,
        makes the batch twice and compares the two batches. Does not check streams.
        """
        if self._is_tried:
            return
        self._is_tried = True
        workers: Any = getattr(self._loader, "num_workers", 0)
        if not isinstance(self._loader, DataLoader) or self._streams:
            return
        if workers and self._loader.persistent_workers and self._draws():
            raise ConfigError(
                "with dataloader_persistent_workers=True, workers keep random states from epoch to epoch, and this "
                "data set or collator draws random numbers in the workers. A resume cannot restore these states. "
                "Remove dataloader_persistent_workers"
            )
        if workers or not compares:
            return
        digests = []
        for _ in range(2):
            with undisturbed(*self._roots().values()):
                digests.append(digest_of(self._collated(self._indices())))
        if digests[0] != digests[1]:
            raise ConfigError(
                "the first batch was made twice with the same random states, and the two batches differ. The data set, "
                "the collator or the sampler depends on a source of randomness, or on other values, that a commit "
                "cannot store, so a resume would not be exact. Draw random numbers only from generators of torch, "
                "numpy or Python's random module, and make each batch depend only on them and on the data"
            )

    @property
    def _streams(self) -> bool:
        """True if examples cannot be read by index: for an IterableDataset, and for a loader without a data set."""
        return isinstance(self._loader.dataset, IterableDataset) if hasattr(self._loader, "dataset") else True

    def _indices(self) -> Any:
        """Returns the first indices that the sampler yields; None if the sampler yields nothing."""
        loader = self._loader
        return next(iter(loader.batch_sampler if loader.batch_sampler is not None else loader.sampler), None)

    def _collated(self, indices: Any) -> Any:
        """Returns the batch of the examples with these indices; None if `indices` is None."""
        if indices is None:
            return None
        loader, data = self._loader, self._loader.dataset
        if loader.batch_sampler is None:
            return loader.collate_fn(data[indices])
        # Prefer __getitems__(), as torch's own fetcher does.
        at_once = getattr(data, "__getitems__", None)
        return loader.collate_fn([data[index] for index in indices] if at_once is None else at_once(indices))

    def _draws(self) -> bool:
        """True if reading and collating the first batch draws random numbers."""
        roots = self._roots().values()
        with undisturbed(*roots):
            # The sampler may draw random numbers, too, so get the indices before the inner block compares states.
            indices = self._indices()
            with undisturbed(*roots) as draws:
                self._collated(indices)
                return draws()

    # --- a resume ------------------------------------------------------------------------------------

    def _continued(self, taken: dict[str, Any], passed: int) -> Iterator[Any]:
        """Returns an iterator that continues the epoch after its first `passed` batches.

        Fetches the newest batch of the commit again, with the random states of its first fetch, and compares its digest
        with the stored digest. If the run had fetched this batch ahead, the iterator yields this batch first.

        Raises:
            ConfigError: the newest batch differs, the data ends before this batch, or a generator is missing.
        """
        own = RandomNumbers.now()
        # Earlier versions stored a list of the states of loader and samplers. Ignore this list, because each epoch sets
        # these states again.
        self._begun_own = taken["begun_own"] if isinstance(taken["begun_own"], dict) else {}
        self._begun = RandomNumbers.of(taken["begun"])
        self._begun.restore()
        self._restore(self._begun_own, are_all=False)
        iterator = iter(self._loader)
        fetched = taken["fetched"]
        self._pass(iterator, fetched - 1, fetched)
        # Fetch the newest batch with the random states of its first fetch.
        self._before = RandomNumbers.of(taken["before"])
        self._before_own = {**self._begun_own, **taken.get("before_own", {})}
        self._restore(self._before_own, are_all=True)
        self._before.restore()
        newest = self._next(iterator, fetched, fetched) if fetched else None
        own.restore()
        self._fetched, self._digest, self._found = fetched, digest_of(newest), self._generators()
        # The program may have drawn random numbers between the newest fetch and the commit, so the commit's own states
        # take precedence.
        self._now_own = {**self._before_own, **taken.get("now_own", {})}
        if fetched and taken["digest"] not in (None, self._digest):
            raise ConfigError(
                f"batch {fetched} of the epoch differs from the same batch before the resume, so the resume would not "
                "be exact. Pass the same data set, collator and sampler as before. If one of them draws random "
                "numbers, let it draw from torch's generator, or start a new training with existing='replace'"
            )
        return itertools.chain([newest] if fetched > passed else [], self._fetches(iterator))

    def _restore(self, states: dict[str, Any], *, are_all: bool) -> None:
        """Sets states of the program's generators.

        With `are_all`, every generator in `states` must exist. If a generator is missing, and the data is not a stream,
        this method first collates a batch, because the program may make its generators at their first use. Without
        `are_all`, skips missing generators.
        """
        found = self._generators()
        if are_all and not states.keys() <= found.keys() and not self._streams:
            self._collated(self._indices())
            found = self._generators()
        restore(found, states if are_all else {path: states[path] for path in states.keys() & found.keys()})

    def _pass(self, iterator: Any, count: int, of: int) -> None:
        """Skips the first `count` batches. `of`: the number of batches that the run has fetched, for an error message.

        If possible, draws only the indices of these batches.
        """
        indices = getattr(iterator, "_sampler_iter", None)
        works: Any = getattr(self._loader, "num_workers", 0)
        if self._streams or works or indices is None:
            # Read each batch, because a worker's random state advances only if the worker makes its batches, and a
            # stream has no indices.
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
                f"the data ends after at most {number - 1} batches of this epoch, but the stored training had already "
                f"fetched {of} batches. Pass the same data set as before, or start a new training with "
                'existing="replace"'
            ) from None


def _changed(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Returns the states in `now` that differ from `before`.

    Most generators draw seldom, so a position that has only these states stays small.
    """
    return {path: state for path, state in now.items() if state != before.get(path)}
