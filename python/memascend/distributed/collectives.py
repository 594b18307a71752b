"""Runs collectives among the ranks; if one fails, raises an error that names the rank at fault, if it is known."""

from __future__ import annotations

import contextlib
import hashlib
import traceback
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from memascend.distributed.groups import leave_group
from memascend.distributed.rows import Layout
from memascend.errors import UsageError
from memascend.storage import Checksum, checksum_of
from memascend.tensors import flat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from memascend.distributed.control_plane import Exchange

    _Done = TypeVar("_Done")


# The maximum number of names of gathers and reductions that a rank keeps for the error of `require_same`.
_NAMES_MAX = 4096
# On the CPU, a collective may take this share of the timeout. In the rest of the timeout, ranks exchange their errors.
_PART = 0.9
_SECONDS_MIN = 0.5


class Collectives:
    """Runs the collectives of forwards and backwards, and the transfers of rows into new stores.

    On the CPU, `Collectives` makes a gloo group of the ranks of this rank's replica. With several replicas, it also
    makes a gloo group of the ranks with this rank's rows. A rank that fails leaves the groups, so that all other ranks
    stop waiting and raise an error. On other devices, `Collectives` uses the groups of the mesh.
    """

    def __init__(self, exchange: Exchange, layout: Layout | None = None, device: torch.device | None = None) -> None:
        """Makes the groups; a collective call.

        If `layout` is None, one group has all ranks. `device` is the model's device; None stands for the CPU.
        """
        self._exchange = exchange
        self.layout = layout = layout or Layout(exchange.rank, 1, exchange.size)
        # `_done`: the names of the first `_NAMES_MAX` gathers and reductions since the last comparison between ranks.
        # `_sum`: a checksum of the names of all gathers and reductions since then. `_last`: the names in the last
        # comparison.
        self._done: list[str] = []
        self._last: list[str] = []
        self._sum = Checksum()
        # By parameter name: the digest of the rows that this rank gave to the parameter's first gather since the last
        # `take_row_digest()`.
        self._rows: dict[str, int] = {}
        self._group: Any = None
        self._group_of_peers: Any = None
        if device is not None and device.type != "cpu":
            return
        seconds = max(_SECONDS_MIN, exchange.timeout * _PART)
        replicas = [range(first, first + layout.shards) for first in range(0, layout.size, layout.shards)]
        self._group = exchange.meeting.make_group(seconds, replicas)
        if layout.replicas > 1:
            peers = [range(shard, layout.size, layout.shards) for shard in range(layout.shards)]
            self._group_of_peers = exchange.meeting.make_group(seconds, peers)

    def note(self, done: str) -> None:
        """Records a gather or a reduction of this rank."""
        if len(self._done) < _NAMES_MAX:
            self._done.append(done)
        self._sum.update(torch.frombuffer(bytearray(done.encode() + b"\0"), dtype=torch.uint8))

    def take_checksum(self) -> str:
        """Returns a checksum of the gathers and reductions since the last call. All ranks must get equal checksums."""
        found, self._sum = str(self._sum), Checksum()
        self._last, self._done = self._done, []
        return found

    def note_rows(self, name: str, rows: torch.Tensor) -> None:
        """Records a digest of the rows that this rank gives to the first gather of `name` since `take_row_digest()`.

        Ranks with the same rows compare their digests.
        """
        if name not in self._rows:
            text = f"{name} {checksum_of(flat(rows).cpu())}".encode()
            self._rows[name] = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")

    def take_row_digest(self) -> int:
        """Returns a digest of the rows noted since the last call. Ranks with the same rows must get the same digest."""
        found, self._rows = sum(self._rows.values()), {}
        return found

    def require_same(self, checksums: Sequence[str]) -> None:
        """Rejects a step in which the ranks made different gathers or reductions.

        FSDP2 does not compare these: if the shapes are equal, FSDP2 mixes rows or gradients of different modules
        without an error. `checksums` has the `take_checksum()` of each rank.
        """
        if len(set(checksums)) == 1:
            return
        names = self._exchange.all_gather("what was gathered and reduced", self._last)
        other = next((rank for rank, one in enumerate(names) if one != names[0]), 1)
        lengths = range(min(len(names[0]), len(names[other])))
        at = next((index for index in lengths if names[0][index] != names[other][index]), len(lengths))
        of = [one[at] if at < len(one) else "nothing more" for one in (names[0], names[other])]
        apart = f"where rank 0 has {of[0]}, rank {other} has {of[1]}"
        if of[0] == of[1]:
            apart = f"their gathers and reductions differ after the first {_NAMES_MAX:,}"
        raise UsageError(
            f"the ranks reached different parts of the model: {apart}. If the shapes are equal, FSDP2 mixes the two up "
            "without an error, so the losses and gradients of this step are wrong. In-memory training has the same "
            "problem. Call zero_grad(), and let every rank compute every module (if no token reaches an expert, call "
            "the expert with an empty input). Or shard experts together with the modules around them, and call "
            "model.set_reduce_scatter_unused_params(True) if your version of torch has it"
        )

    def meet(self, what: str, given: Any, do: Callable[[Any], _Done], *, peers: bool = False) -> _Done:
        """Calls `do` with the group of this rank's replica; returns the result of `do`.

        If `peers` is set, `do` gets the group of the ranks with the same rows. If this object has no groups, `do` gets
        `given`, which is the mesh's group. `what` names the collective in errors.

        Raises:
            RankError: a rank failed, is gone, or came too late; the run has ended.
        """
        if self._exchange.broken is not None:
            raise self._exchange.broken
        try:
            return do(self._chosen(given, peers=peers))
        except RuntimeError as error:
            # Other ranks wait until this rank's connections close. A frame of the traceback that refers to the group
            # would keep the connections open.
            traceback.clear_frames(error.__traceback__)
            self.close()
            within = max(_SECONDS_MIN, self._exchange.timeout * (1 - _PART))
            raise self._exchange.lost(f"{what} ({str(error).splitlines()[0][:200]})", within) from error

    def _chosen(self, given: Any, *, peers: bool) -> Any:
        # This is a separate function, so that no local variable of meet() refers to the group. Such a variable would
        # keep the connections open while the ranks exchange their errors.
        own = self._group_of_peers if peers else self._group
        return given if own is None else own

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Wraps this rank's work in a forward or a backward.

        If the work fails, this rank leaves the groups, reports the error to the other ranks, and ends the exchange. If
        the exchange has ended already, for example in a collective of the work, only raises the error.
        """
        try:
            yield
        except BaseException as error:
            if self._exchange.broken is None:
                self.close()
                self._exchange.fail(error)
                self._exchange.end("a rank failed in a forward or a backward")
            raise

    def close(self) -> None:
        """Leaves the groups, so that other ranks stop waiting for this rank."""
        groups = self._group, self._group_of_peers
        self._group = self._group_of_peers = None
        for group in groups:
            leave_group(group)
