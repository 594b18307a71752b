"""Reads the values and the optimizer state of a store's records, in the form that a checkpoint has.

`StoreContents` and `ShareContents` read the store of one process. `GatheredContents` reads the rows of all ranks.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from memascend.distributed.rows import blocks_of, is_in_blocks
from memascend.errors import ConfigError
from memascend.storage import decode_state

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from memascend.checkpoint.init import Buffers
    from memascend.distributed.groups import Line
    from memascend.distributed.rows import Layout, Rows
    from memascend.storage import Part, Store

    # put(name, of, start, elements): receives consecutive elements of the record `name`. `of`: the name of a state
    # tensor, or "" for the record's values. `start`: the index of the first of these elements.
    Put = Callable[[str, str, int, torch.Tensor], object]
    # The name of a tensor -> its dtype and shape.
    Kinds = dict[str, tuple[torch.dtype, torch.Size]]


# The state tensors that encode a compact fp32 master. A checkpoint has the decoded master instead.
_MASTER_PARTS = frozenset({"rest", "rounded_up"})
_KINDS = (frozenset({"exp_avg", "exp_avg_sq"}), frozenset({"momentum_buffer"}))
_DTYPES = {"": torch.float32, "bf16": torch.bfloat16, "8bit": torch.uint8}
_WIDTHS = {dtype: width for width, dtype in _DTYPES.items()}
_WORDS = {"": "32 bits", "bf16": "bfloat16", "8bit": "8 bits"}


@dataclass(frozen=True)
class StateForm:
    """The format of one parameter's state in a checkpoint."""

    moments: frozenset[str]  # names of the moments
    width: str  # "" for float32, "bf16" for bfloat16, or "8bit"
    master: bool  # True if the state has an fp32 master

    def kinds(self, shape: torch.Size) -> Kinds:
        """Returns the dtype and the shape of each state tensor of a parameter that has this shape."""
        kinds = dict.fromkeys(self.moments, (_DTYPES[self.width], shape))
        if self.width == "8bit":
            kinds |= {f"{of}_absmax": (torch.float32, blocks_of(shape)) for of in self.moments}
        if self.master:
            kinds["master"] = torch.float32, shape
        return kinds

    def decoded(self, values: torch.Tensor, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the state in float32. The result has a master only if `state` has a master."""
        if not self.width:
            return dict(state)
        given = self.width if self.master or values.dtype == torch.float32 else f"stochastic {self.width}"
        whole = decode_state(values, state, given)
        return {of: tensor for of, tensor in whole.items() if of != "master" or self.master}

    def lost_in(self, other: StateForm) -> list[str]:
        """Returns a text for each loss of precision or state in a conversion to the form `other`."""
        lost = []
        if other.width and other.width != self.width:
            lost.append(f"moments are rounded from {_WORDS[self.width]} to {_WORDS[other.width]}")
        if self.master and not other.master:
            lost.append("fp32 master weights are dropped, and their 16-bit roundings stay")
        return lost


def form_of(tensors: Mapping[str, torch.Tensor], shape: torch.Size) -> StateForm | None:
    """Returns the form of state tensors; None if their form cannot be converted. The tensors may be on meta."""
    names = {of for of in tensors if of != "master" and not is_in_blocks(of)}
    widths = {_WIDTHS.get(tensors[of].dtype) for of in names}
    if names not in _KINDS or len(widths) != 1 or None in widths:
        return None
    form = StateForm(frozenset(names), str(widths.pop()), "master" in tensors)
    return form if kinds_of(tensors) == form.kinds(shape) else None


def kinds_of(tensors: Mapping[str, torch.Tensor]) -> Kinds:
    """Returns the dtype and the shape of each tensor."""
    return {of: (tensor.dtype, tensor.shape) for of, tensor in tensors.items()}


def plain_tensors(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns a record's state tensors in the form of a checkpoint, on meta.

    The result has a master instead of the tensors that encode a compact master.
    """
    found = {}
    for of, tensor in state.items():
        if of == "rest":
            found["master"] = torch.empty(tensor.shape, dtype=torch.float32, device="meta")
        elif of not in _MASTER_PARTS:
            found[of] = tensor
    return found


def plain_parts(values: torch.Tensor, state: Mapping[str, torch.Tensor], given: str) -> dict[str, torch.Tensor]:
    """Converts the state of a record, or of a part of a record, to the form of a checkpoint.

    Decodes a compact master, but keeps the format of the moments. `given`: the record's format.
    """
    plain = {of: tensor for of, tensor in state.items() if of not in _MASTER_PARTS}
    if "rest" in state:
        plain["master"] = decode_state(values, state, given)["master"]
        if "exp_avg_sq" in plain and plain["exp_avg_sq"].is_floating_point():
            # A compact record stores a bit of the master in the sign of exp_avg_sq, so clear the sign.
            plain["exp_avg_sq"] = plain["exp_avg_sq"].abs()
    return plain


def conversion_warning(where: object, pairs: Iterable[tuple[StateForm, StateForm]]) -> str | None:
    """Returns the warning that a checkpoint's state is converted; None if the state of no parameter is converted.

    Each pair in `pairs` has the form of a parameter's state in the checkpoint, and the form of the same state in the
    run.
    """
    changed = [(one, other) for one, other in pairs if one != other]
    if not changed:
        return None
    lost = list(dict.fromkeys(words for one, other in changed for words in one.lost_in(other)))
    end = "; ".join(lost) if lost else "nothing is lost"
    return (
        f"the optimizer state in the checkpoint {where} has another format than this run uses, so it is converted for "
        f"{len(changed)} parameters: {end}"
    )


# The name of a state tensor in checkpoints. This tensor has one number: how often the parameter was updated.
UPDATES = "updates"


@dataclass(frozen=True)
class Content:
    """The tensors of one record in a checkpoint."""

    name: str
    values: torch.Tensor  # on meta
    state: dict[str, torch.Tensor]  # on meta, by name
    # The order of the dimensions in memory, the dimension with the largest stride first. None if the record is
    # row-major, or if no tensor of its state is divided into blocks.
    order: list[int] | None = None


class StoreContents:
    """Reads the last commit of one store in the form of a checkpoint.

    `records` has the tensors of the records, in the store's order.
    """

    def __init__(
        self, store: Store, trained: Collection[str], buffers: Buffers | None = None, *, values_alone: bool = False
    ) -> None:
        """`trained`: the names of the parameters that the optimizer updates.

        `values_alone`: True to read the values but no state.

        `buffers`: the buffers that are read from the model instead of the store; None to read all buffers from the
        store.
        """
        self._store = store
        self._buffers = buffers
        self._of_model = frozenset(() if buffers is None else buffers.names)
        self._stored = store.records()
        self._by_name = {record["name"]: record for record in self._stored}
        self._trained: Collection[str] = () if values_alone else trained
        self._values_alone = values_alone
        self.records = [self._content(record) for record in self._stored]
        self.nbytes = _bytes_in(self.records)

    def _content(self, record: Mapping[str, Any]) -> Content:
        name = record["name"]
        if self._values_alone:
            return Content(name, _meta(record["dtype"], record["shape"]), {})
        stored = {of: _meta(dtype, shape) for of, dtype, shape in record["state"]}
        # `plain_tensors()` replaces the "rest" of a compact record by "master".
        state = plain_tensors(stored)
        if name in self._trained:
            if UPDATES in state:
                raise ConfigError(
                    f"the optimizer has a state tensor called 'updates' for {name!r}. This tensor cannot be saved, "
                    "because a checkpoint uses the name for the number of updates. Rename the state tensor in the "
                    "optimizer"
                )
            state[UPDATES] = _meta("int64", [])
        # Each block of state covers consecutive elements in memory order. But the tensors of a checkpoint are
        # row-major, so the checkpoint also stores the memory order.
        in_blocks = record["order"] is not None and any(map(is_in_blocks, stored))
        return Content(
            name, _meta(record["dtype"], record["shape"]), state, list(record["order"]) if in_blocks else None
        )

    def read(self, put: Put, wanted: Callable[[str], bool] = lambda _: True) -> None:
        """Reads each record if `wanted(name)` returns True, and passes the record's elements to `put`."""
        stored = [record for record in self._stored if wanted(record["name"])]
        # Scan consecutive row-major records together.
        for row_major, run in itertools.groupby(stored, lambda record: record["order"] is None):
            names = [record["name"] for record in run]
            for some in [names] if row_major else [[name] for name in names]:
                self.read_records(some, put)

    def read_records(self, names: list[str], put: Put) -> None:
        """Reads the records `names`: either one record, or several records that are all row-major."""

        def give(name: str, tensors: dict[str, torch.Tensor], starts: Mapping[str, int]) -> None:
            form = self._by_name[name]["format"]
            if self._values_alone:
                tensors = {of: tensor for of, tensor in tensors.items() if not of}
            elif form:
                values = tensors.pop("")
                tensors = {"": values, **plain_parts(values, tensors, form)}
            for of, tensor in tensors.items():
                # A tensor without a start in `starts`, such as a decoded master, begins where the values begin.
                put(name, of, starts[of] if of in starts else starts[""], tensor.contiguous())

        def visit(name: str, parts: list[Part]) -> None:
            give(name, {part.of: part.values for part in parts}, {part.of: part.start for part in parts})

        names = self._read_buffers(names, put)
        if names and self._by_name[names[0]]["order"] is None:
            self._store.scan(names, visit)
        elif names:
            values, state = self._store.read(names[0])
            give(names[0], {"": values, **state}, {"": 0})
        for name in names:
            if name in self._trained:
                put(name, UPDATES, 0, torch.tensor(self._by_name[name]["step"], device="cpu"))

    def _read_buffers(self, names: list[str], put: Put) -> list[str]:
        """Passes the model's buffers among `names` to `put`. Returns the other names, which the store has to read."""
        if self._buffers is not None:
            for name in filter(self._of_model.__contains__, names):
                put(name, "", 0, self._buffers.tensor(name))
        return [name for name in names if name not in self._of_model]


def _meta(dtype: str, shape: list[int]) -> torch.Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")


class ShareContents:
    """Reads a rank's part of a checkpoint: the rank's rows, at their positions in the whole parameters."""

    def __init__(self, own: StoreContents, rows: Mapping[str, Rows], layout: Layout, names: Collection[str]) -> None:
        """`rows`: the rows that this rank's store has. `names`: the parameters whose rows this rank contributes."""
        self.own = own
        self.rows = rows
        self._layout = layout
        self._names = names
        # The name of a record -> its values (named "") and its state tensors, all on meta.
        self.tensors = {record.name: {"": record.values, **record.state} for record in own.records}
        self.nbytes = _bytes_in([record for record in own.records if self._is_own(record.name)])

    def read(self, put: Put) -> None:
        """Reads all records that this rank contributes."""
        self.own.read(partial(self._placed, put), self._is_own)

    def read_one(self, name: str, put: Put) -> None:
        """Reads one record, if this rank contributes the record."""
        if name in self.tensors and self._is_own(name):
            self.own.read_records([name], partial(self._placed, put))

    def _placed(self, put: Put, name: str, of: str, start: int, values: torch.Tensor) -> None:
        rows = self.rows.get(name)
        first = None if rows is None or of == UPDATES else rows.first_of(of, self.tensors[name][of])
        if first is not None:
            put(name, of, first + start, values)
        elif not self._layout.shard:
            # A tensor that is not sharded is equal on all ranks, so only the first shard contributes the tensor.
            put(name, of, start, values)

    def _is_own(self, name: str) -> bool:
        # Rank 0 contributes the buffers.
        return name in self._names if name in self.rows else not self._layout.rank


class GatheredContents:
    """Reads whole parameters on rank 0, which receives the rows of other ranks. Reads buffers from rank 0 only.

    Rows of other ranks arrive in pieces, and rank 0 holds one piece at a time.
    """

    def __init__(self, share: ShareContents, line: Line, ranks: int) -> None:
        """`share`: the contents that rank 0 itself has. Rank 0 has rows of all parameters."""
        self._share = share
        self._line = line
        self._others = range(1, ranks)
        self.nbytes = _bytes_in(whole_records(share.own, share.rows))

    def read(self, put: Put) -> None:
        """Reads all records. For each parameter, reads the rows of one rank after the other.

        Raises:
            StoppedError: rows of another rank did not arrive.
            StorageError, CorruptionError: the store of rank 0 cannot be read.
        """
        for name, tensors in self._share.tensors.items():
            self._share.read_one(name, put)
            for rank in self._others if name in self._share.rows else ():
                for number, start, values in self._line.pieces(rank, [one.dtype for one in tensors.values()]):
                    put(name, [*tensors][number], start, values)


def send_contents(share: ShareContents, order: Sequence[str], line: Line) -> None:
    """Sends this rank's rows to rank 0. Rank 0 receives the rows through `GatheredContents`.

    `order`: the names of the parameters, in the order in which rank 0 receives the parameters.

    Raises:
        StoppedError: the rows did not reach rank 0.
        StorageError, CorruptionError: this rank's store cannot be read.
    """
    for name in order:
        numbers = {of: number for number, of in enumerate(share.tensors.get(name, ()))}
        share.read_one(name, partial(_send, line, numbers))
        line.end()


def _send(line: Line, numbers: Mapping[str, int], _: str, of: str, start: int, values: torch.Tensor) -> None:
    line.send(numbers[of], start, values)


def _bytes_in(records: Iterable[Content]) -> int:
    return sum(tensor.nbytes for record in records for tensor in (record.values, *record.state.values()))


def whole_records(own: StoreContents, rows: Mapping[str, Rows]) -> list[Content]:
    """Returns the records of a checkpoint, with the shapes of the whole parameters.

    `own`: the records of rank 0, which has rows of all parameters.
    """
    return [_whole(record, rows[record.name]) if record.name in rows else record for record in own.records]


def _whole(record: Content, rows: Rows) -> Content:
    values = torch.empty(rows.whole, dtype=record.values.dtype, device="meta")
    state = {
        of: torch.empty(rows.whole_of(of, tensor), dtype=tensor.dtype, device="meta")
        for of, tensor in record.state.items()
    }
    return Content(record.name, values, state, record.order)


# The sources from which `write_into()` can write files.
Contents = StoreContents | GatheredContents | ShareContents
