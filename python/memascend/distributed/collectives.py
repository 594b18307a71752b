"""Runs collectives of all ranks; a failure on one rank ends them on all, with an error that names that rank."""

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


# At most this many names of gathers and reductions are kept for the error of `require_same`.
_NAMES_MAX = 4096
# The share of the timeout for a collective. In the rest, ranks exchange their errors.
_PART = 0.9
_SECONDS_MIN = 0.5


class Collectives:
    """Runs the collectives of a forward and a backward.

    On the CPU it makes two gloo groups with the run's timeout: the ranks of this rank's replica, and the ranks with the
    same rows. A rank that fails leaves both groups, so that the other ranks stop waiting and all ranks raise the same
    error. On other devices it uses the groups of the mesh.
    """

    def __init__(self, exchange: Exchange, layout: Layout | None = None, device: torch.device | None = None) -> None:
        """Makes the groups, by default one of all ranks; a collective call. `device`: the model's device; None: CPU."""
        self._exchange = exchange
        self.layout = layout = layout or Layout(exchange.rank, 1, exchange.size)
        # Gathers and reductions since the ranks last compared them: the names of the first ones (`_done`), and a
        # checksum of all (`_sum`). `_last` has the names up to the last comparison.
        self._done: list[str] = []
        self._last: list[str] = []
        self._sum = Checksum()
        # By parameter name: digests of the rows that this rank gave to gathers since the last comparison.
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
        """Returns a checksum of gathers and reductions since the last call; it must be equal on all ranks."""
        found, self._sum = str(self._sum), Checksum()
        self._last, self._done = self._done, []
        return found

    def note_rows(self, name: str, rows: torch.Tensor) -> None:
        """Records a digest of rows that this rank gives to a gather, for the comparison with its peers."""
        if name not in self._rows:
            text = f"{name} {checksum_of(flat(rows).cpu())}".encode()
            self._rows[name] = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")

    def take_row_digest(self) -> int:
        """Returns a digest of the rows noted since the last call; it must be equal on ranks with the same rows."""
        found, self._rows = sum(self._rows.values()), {}
        return found

    def require_same(self, checksums: Sequence[str]) -> None:
        """Rejects a step in which ranks mixed rows or gradients of different modules; `checksums` has one per rank.

        FSDP2 does not detect this, because it compares only shapes.
        """
        if len(set(checksums)) == 1:
            return
        names = self._exchange.all_gather("what was gathered and reduced", self._last)
        other = next((rank for rank, one in enumerate(names) if one != names[0]), 1)
        lengths = range(min(len(names[0]), len(names[other])))
        at = next((index for index in lengths if names[0][index] != names[other][index]), len(lengths))
        of = [one[at] if at < len(one) else "nothing more" for one in (names[0], names[other])]
        raise UsageError(
            f"the ranks reached different parts of the model: where rank 0 has {of[0]}, rank {other} has {of[1]}, and "
            "FSDP2 takes the one for the other where their shapes are equal, so that losses and gradients of this step "
            "are wrong, in memory too. Call zero_grad(); let every rank compute every module (an expert that no token "
            "reaches: with no rows), or shard experts together with the modules around them, and call "
            "model.set_reduce_scatter_unused_params(True), where torch has it"
        )

    def meet(self, what: str, given: Any, do: Callable[[Any], _Done], *, peers: bool = False) -> _Done:
        """Calls `do` with the group of this replica, or with `peers` the group of the ranks with the same rows.

        `given` is the mesh's group, which `do` gets if this object has no group. `what` names the collective in errors.

        Raises:
            RankError: a rank failed, is gone, or came too late; the run has ended.
        """
        if self._exchange.broken is not None:
            raise self._exchange.broken
        try:
            return do(self._chosen(given, peers=peers))
        except RuntimeError as error:
            # Other ranks wait until this rank's connections close; a frame of the traceback that refers to the group
            # would keep them open.
            traceback.clear_frames(error.__traceback__)
            self.close()
            within = max(_SECONDS_MIN, self._exchange.timeout * (1 - _PART))
            raise self._exchange.lost(f"{what} ({str(error).splitlines()[0][:200]})", within) from error

    def _chosen(self, given: Any, *, peers: bool) -> Any:
        # A function of its own: a local variable of meet() would refer to the group, and so keep the connections open
        # while the ranks exchange the reason.
        own = self._group_of_peers if peers else self._group
        return given if own is None else own

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Wraps work of this rank before or after a collective: if the work fails, the other ranks stop waiting."""
        try:
            yield
        except BaseException as error:
            if self._exchange.broken is None:
                self.close()
                self._exchange.fail(error)
                self._exchange.end("a rank failed in a forward or a backward")
            raise

    def close(self) -> None:
        """Leaves the groups, which ends the waits of other ranks for this one."""
        groups = self._group, self._group_of_peers
        self._group = self._group_of_peers = None
        for group in groups:
            leave_group(group)
