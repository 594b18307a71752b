"""Feeds a Trainer its batches, and knows how to go on in the midst of an epoch with the same ones."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset

from memascend.errors import ConfigError
from memascend.trainer.position import RandomNumbers, said_of, state_of

if TYPE_CHECKING:
    from collections.abc import Iterator

# Of each tensor of a batch so many bytes at both ends are compared at a resume.
_COMPARED_BYTES = 64 << 10
_HASH_BYTES = 8


class Feed:
    """Stands for the DataLoader that a Trainer's loader reads from, which fetches one batch ahead.

    It knows the random numbers at the epoch's `iter()`, on which order and workers depend, and those before the newest
    fetch, on which a random collator depends.
    """

    def __init__(self, loader: Any) -> None:
        """Feed from this loader."""
        self._loader = loader
        # Generators of the loader and its samplers: they draw at the beginning of an epoch.
        self._generators = list(_generators(loader))
        self._begun: RandomNumbers | None = None
        self._begun_own: list[torch.Tensor] = []
        self._before: RandomNumbers | None = None
        self._fetched = 0
        self._digest = ""
        # Where to go on: what `taken()` gave, and the batches that the Trainer had.
        self._resumed: tuple[dict[str, Any], int] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The loader's own, for what asks whether this is a DataLoader."""
        return type(self._loader)

    def __iter__(self) -> Iterator[Any]:
        resumed, self._resumed = self._resumed, None
        if resumed is not None:
            self._begun = RandomNumbers.of(resumed[0]["begun"])
            self._begun_own = list(map(state_of, resumed[0]["begun_own"]))
            return self._continued(*resumed)
        self._begun, self._before, self._fetched = RandomNumbers.now(), None, 0
        self._begun_own = [one.get_state() for one in self._generators]
        return self._fetches(iter(self._loader))

    def taken(self) -> dict[str, Any]:
        """The place in the data, as JSON."""
        assert self._begun is not None
        return {
            "begun": self._begun.said(),
            "begun_own": list(map(said_of, self._begun_own)),
            # A rank that is sent its batches by the first one fetches none.
            "before": (self._before or self._begun).said(),
            "fetched": self._fetched,
            "digest": self._digest,
        }

    def resume(self, taken: dict[str, Any], passed: int) -> None:
        """Let the next `iter()` go on after `passed` batches, as `taken()` describes them."""
        self._resumed = (taken, passed)

    def begin_anew(self) -> None:
        """Let the next `iter()` be that of an epoch."""
        self._resumed = None

    def _fetches(self, iterator: Iterator[Any]) -> Iterator[Any]:
        while True:
            self._before = RandomNumbers.now()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self._fetched += 1
            self._digest = digest_of(batch)
            yield batch

    def _continued(self, taken: dict[str, Any], passed: int) -> Iterator[Any]:
        own = RandomNumbers.now()
        assert self._begun is not None
        self._begun.bring_back()
        for one, state in zip(self._generators, self._begun_own, strict=False):
            one.set_state(state)
        iterator = iter(self._loader)
        last = self._passed(iterator, passed)
        self._fetched = passed
        ahead = taken["fetched"] > passed
        if ahead:
            # This batch was fetched before the commit, with the random numbers of then.
            self._before = RandomNumbers.of(taken["before"])
            self._before.bring_back()
            last = next(iterator, None)
            self._fetched, self._digest = passed + 1, digest_of(last)
        own.bring_back()
        if last is not None and taken["digest"] not in (None, digest_of(last)):
            raise ConfigError(
                f"batch {taken['fetched']} of the epoch is another one than before, so a resume would not be exact: "
                "give the data of this run; a data set or a collator that draws from a generator of its own cannot be "
                'resumed: let it draw from torch\'s, or start anew with existing="replace"'
            )
        if ahead:
            yield last
        yield from self._fetches(iterator)

    def _passed(self, iterator: Any, passed: int) -> Any:
        """Pass batches that the Trainer had; returns the last one, where it was made again."""
        streams = isinstance(self._loader.dataset, IterableDataset) if hasattr(self._loader, "dataset") else True
        indices = getattr(iterator, "_sampler_iter", None)
        works: Any = getattr(self._loader, "num_workers", 0)
        if streams or works or indices is None:
            # Workers have random numbers of their own, and a stream can only be read.
            last = None
            for _ in range(passed):
                last = next(iterator, None)
            return last
        for _ in range(passed):
            next(indices, None)
        return None


def _generators(loader: Any) -> Iterator[torch.Generator]:
    found: dict[int, torch.Generator] = {}
    samplers = [getattr(loader, name, None) for name in ("sampler", "batch_sampler")]
    inner = [getattr(one, name, None) for one in samplers for name in ("sampler", "batch_sampler")]
    for one in (loader, *samplers, *inner):
        generator = getattr(one, "generator", None)
        if isinstance(generator, torch.Generator):
            found[id(generator)] = generator
    return iter(found.values())


def digest_of(value: Any) -> str:
    """A digest of the ends of a batch's tensors, and of the numbers and texts in it."""
    digest = hashlib.blake2b(digest_size=_HASH_BYTES)
    _add(digest, value)
    return digest.hexdigest()


def _add(digest: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype} {tuple(value.shape)} ".encode())
        flat = value.detach().reshape(-1)
        count = _COMPARED_BYTES // max(1, flat.element_size())
        for part in (flat[:count], flat[count:][-count:]):
            # A copy: memory that numpy has had is taken for numpy's from then on, and a weight may not lie in such.
            own = part.contiguous().to("cpu", copy=True)
            digest.update(own.view(torch.uint8).numpy().tobytes() if own.numel() else b"")
    elif isinstance(value, Mapping):
        for name, part in value.items():
            digest.update(f"{name}:".encode())
            _add(digest, part)
    elif isinstance(value, list | tuple) and not all(isinstance(part, int | float) for part in value):
        for part in value:
            _add(digest, part)
    elif isinstance(value, str | bytes | int | float | list | tuple | type(None)):
        digest.update(repr(value).encode())
    elif hasattr(value, "__array__"):
        _add(digest, torch.as_tensor(value.__array__().copy()))
    else:
        # A picture has bytes; of what has none, the type has to do.
        digest.update(type(value).__qualname__.encode())
        if callable(getattr(value, "tobytes", None)):
            digest.update(value.tobytes())
