"""Fills a rank's lost store from the store of another replica; removes the stores of dropped replicas."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from memascend.distributed.collectives import Collectives
from memascend.distributed.opening import is_at, seen_at
from memascend.distributed.reshard import remove_store
from memascend.errors import ConfigError, CorruptionError
from memascend.storage import Checksum
from memascend.storage.records import room_for
from memascend.tensors import bytes_of

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence
    from pathlib import Path

    from memascend.distributed.opening import Opening
    from memascend.distributed.reshard import First
    from memascend.storage import Store


_log = logging.getLogger("memascend")


class Refill:
    """Fills new stores of the ranks in `Opening.lost` while `offload()` opens the run. All ranks take part.

    The ranks in `Opening.lost` have lost their stores: a store is missing, was not filled completely, or lacks the
    commit to open. On such a rank, the `Refill` is the source of the first values. A filled store belongs to the run
    only after `_end` has found that all filled stores have the bytes that were sent. Until then the store's commit has
    number 0, and another opening fills the store again.
    """

    # `_begin` sets these two attributes.
    _store: Store
    _collectives: Collectives

    def __init__(self, opening: Opening) -> None:
        """`opening.lost` has the ranks that have lost their stores."""
        self._opening = opening
        self._exchange = exchange = opening.exchange
        # The rank that sends its records to this rank. None if this rank has not lost its store.
        self.source = opening.lost.get(exchange.rank)
        # The ranks to which this rank sends its records.
        self._targets = [rank for rank, source in opening.lost.items() if source == exchange.rank]
        self._facts: Mapping[str, Any] = {}
        # The step and user_state of the commit that this rank receives.
        self.step = 0
        self.user_state: Any = None
        # A checksum of the bytes that this rank sent, or has read back from its filled store.
        self._sum = Checksum()
        # `_records`: the largest number of records that a rank sends. `_reached`: the number of calls of `_reach` since
        # the last `_reach_end`.
        self._records = self._reached = 0

    @contextlib.contextmanager
    def between(self, store: Store) -> Iterator[None]:
        """Wraps the code that reads or fills this rank's store. Then sends it to `_targets`; verifies filled stores.

        Inside the block, a rank that has lost its store reads its first values from `self`.
        """
        began = time.monotonic()
        self._begin(store)
        try:
            yield
            self._send()
        finally:
            # Close the group even if this rank failed, so that no other rank waits for this rank.
            self._collectives.close()
        self._end(began)

    def _begin(self, store: Store) -> None:
        """Exchanges descriptions of the commits to send, and makes the group over which ranks send commits."""
        self._store, exchange = store, self._exchange
        sent = {
            "described": _described(store),
            "step": store.step,
            "user_state": store.user_state,
            "hyperparameters": store.hyperparameters,
            "records": len(_names(store)),
        }
        sources = exchange.all_gather("the stores that fill others", sent if self._targets else None)
        self._records = max(each["records"] for each in sources if each is not None)
        if self.source is not None:
            self._facts = sources[self.source]
            self.step, self.user_state = self._facts["step"], self._facts["user_state"]
            # The commit has number 0 until `_end` has verified the store.
            store.shared.alone(0, bytes(16))
        self._collectives = Collectives(exchange)

    # --- on a rank that has lost its store -------------------------------------------------

    def check(self) -> None:
        """Checks nothing, because the commit is not known before `between`."""

    def hyperparameters(self) -> dict[str, Any]:
        """Returns the hyperparameters of the commit that is sent."""
        return dict(self._facts.get("hyperparameters") or {})

    def parameters(self, units: Sequence[Any]) -> Generator[First, None, None]:
        """Yields each parameter once, as it arrives."""
        del units
        if self._facts["described"] != _described(self._store):
            raise ConfigError(
                f"the store of rank {self._exchange.rank} cannot be filled from the store of rank {self.source}, "
                "because their records or formats of state differ: give all ranks the same model and options"
            )
        for name in _names(self._store, buffers=(False,)):
            values, state, step = self._received(name)
            yield name, values, state, step

    def buffer(self, name: str, tensor: torch.Tensor) -> None:
        """Receives a persistent buffer of the commit into `tensor`."""
        tensor.copy_(self._received(name)[0])

    def _received(self, name: str) -> tuple[torch.Tensor, dict[str, torch.Tensor], int]:
        values, state = room_for(self._store.record(name))
        step = torch.zeros(1, dtype=torch.int64)
        for tensor in (step, values, *state.values()):
            if tensor.numel():
                self._meet(lambda group, tensor=tensor: distributed.recv(bytes_of(tensor), self.source, group))
        self._reach()
        return values, state, int(step)

    # --- on a rank that sends ----------------------------------------------------------------

    def _send(self) -> None:
        """Sends the commit in this rank's store to the ranks in `_targets`."""
        store = self._store
        for name in _names(store) if self._targets else ():
            values, state = store.read(name)
            step = _updates(store.record(name))
            for tensor in (step, values, *state.values()):
                if not tensor.numel():
                    continue
                for target in self._targets:
                    self._meet(lambda group, tensor=tensor, to=target: distributed.send(bytes_of(tensor), to, group))
            self._note(step, values, state)
            self._reach()
        self._reach_end()

    def _reach(self) -> None:
        """Waits until all ranks have handled one more record.

        So a rank with nothing to fill waits for one record at a time, not for a whole store.
        """
        self._exchange.all_values(None)
        self._reached += 1

    def _reach_end(self) -> None:
        """Waits for the ranks that have more records than this rank."""
        while self._reached < self._records:
            self._reach()
        self._reached = 0

    def _note(self, step: torch.Tensor, values: torch.Tensor, state: Mapping[str, torch.Tensor]) -> None:
        for tensor in (step, values, *state.values()):
            if tensor.numel():
                self._sum.update(bytes_of(tensor))

    def _meet(self, do: Any) -> None:
        self._collectives.meet("filling the store of a rank that lost it", None, do)

    # --- at the end --------------------------------------------------------------------------

    def _end(self, began: float) -> None:
        """Reads this rank's filled store back. If all filled stores are right, commits the store as a store of the run.

        On a rank that has not lost its store, only compares the checksums of all ranks. `began` is the time at which
        the filling began, for the log.

        Raises:
            CorruptionError: the bytes of a rank's filled store differ from the bytes that were sent.
        """
        store, exchange = self._store, self._exchange
        nbytes = 0
        for name in () if self.source is None else _names(store):
            values, state = store.read(name)
            self._note(_updates(store.record(name)), values, state)
            nbytes += values.nbytes + sum(tensor.nbytes for tensor in state.values())
            self._reach()
        self._reach_end()
        sums = exchange.all_values(str(self._sum))
        apart = [rank for rank, source in self._opening.lost.items() if sums[rank] != sums[source]]
        if apart:
            raise CorruptionError(
                f"the store of rank {apart[0]} was filled from the store of rank {self._opening.lost[apart[0]]}, but "
                "the bytes that were read back differ from the bytes that were sent: start all ranks again to fill the "
                "store again"
            )
        if self.source is None:
            return
        store.shared.alone(self._opening.number, self._opening.identity)
        store.commit(store.step)
        store.shared.together()
        _log.warning(
            "the new store of rank %d was filled from the store of rank %d, including the user_state: %d bytes were "
            "written and read again in %.1f s",
            exchange.rank, self.source, nbytes, time.monotonic() - began,
        )  # fmt: skip


def retire(files: Sequence[Path], opening: Opening) -> None:
    """Removes the stores of replicas that the run has dropped.

    Removes a store only if the store has the commit at which the run is opened. Keeps any other store, because that
    store may have steps that no rank has. A later run that has the replica of a kept store may reject this store.
    """
    for file in files:
        seen = seen_at(file)
        if any(is_at(commit, opening.number, opening.identity) for commit in seen["commits"]):
            remove_store(file)
            _log.info("%s was removed, because the run continues with fewer replicas", file)
        else:
            _log.warning(
                "%s was not removed, because the step at which the run continues was not found in this store: move "
                "this store away",
                file,
            )


def _names(store: Store, *, buffers: Sequence[bool] = (False, True)) -> list[str]:
    """Returns the names of a store's parameters and buffers, sorted, so that all replicas get the same order.

    `buffers` selects them: False stands for parameters, and True for buffers.
    """
    each = sorted((record["buffer"], record["name"]) for record in store.each_record())
    return [name for is_buffer, name in each if is_buffer in buffers]


def _updates(record: Mapping[str, Any]) -> torch.Tensor:
    """Returns the number of updates of a record; 0 for a buffer.

    The record of a buffer also has a number, but this number may differ between the store that is sent and the store
    that is filled.
    """
    return torch.tensor([0 if record["buffer"] else record["step"]])


def _described(store: Store) -> str:
    """Returns a digest that is equal for two stores if they have the same records with the same byte layout."""
    kept = ("name", "buffer", "dtype", "shape", "state", "order", "format")
    records: Iterator[Any] = ([record[of] for of in kept] for record in store.each_record())
    text = json.dumps(sorted(records, key=lambda record: record[0]))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
