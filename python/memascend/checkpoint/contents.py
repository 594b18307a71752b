"""Reads a store as a checkpoint has it: values, and state by torch's names, of one rank or of all together."""

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

    # Called with consecutive elements of a record's values ("") or of a state tensor, and the first one's number.
    Put = Callable[[str, str, int, torch.Tensor], object]
    # Dtype and shape of tensors, by name.
    Kinds = dict[str, tuple[torch.dtype, torch.Size]]


# The parts of a compact master. A checkpoint has the master instead.
_MASTER_PARTS = frozenset({"rest", "rounded_up"})
_KINDS = (frozenset({"exp_avg", "exp_avg_sq"}), frozenset({"momentum_buffer"}))
_DTYPES = {"": torch.float32, "bf16": torch.bfloat16, "8bit": torch.uint8}
_WIDTHS = {dtype: width for width, dtype in _DTYPES.items()}
_WORDS = {"": "32 bits", "bf16": "bfloat16", "8bit": "8 bits"}


@dataclass(frozen=True)
class StateForm:
    """How a checkpoint holds the state of one parameter."""

    moments: frozenset[str]  # the names of its moments
    width: str  # "" for float32, "bf16" or "8bit"
    master: bool  # whether a float32 master stands beside them

    def kinds(self, shape: torch.Size) -> Kinds:
        """Its tensors, for a parameter of this shape."""
        kinds = dict.fromkeys(self.moments, (_DTYPES[self.width], shape))
        if self.width == "8bit":
            kinds |= {f"{of}_absmax": (torch.float32, blocks_of(shape)) for of in self.moments}
        if self.master:
            kinds["master"] = torch.float32, shape
        return kinds

    def decoded(self, values: torch.Tensor, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The same state in float32; without a master where there is none."""
        if not self.width:
            return dict(state)
        given = self.width if self.master or values.dtype == torch.float32 else f"stochastic {self.width}"
        whole = decode_state(values, state, given)
        return {of: tensor for of, tensor in whole.items() if of != "master" or self.master}

    def lost_in(self, other: StateForm) -> list[str]:
        """Texts that say what a conversion into another form loses."""
        lost = []
        if other.width and other.width != self.width:
            lost.append(f"moments are rounded from {_WORDS[self.width]} to {_WORDS[other.width]}")
        if self.master and not other.master:
            lost.append("fp32 master weights are dropped, and their 16-bit roundings stay")
        return lost


def form_of(tensors: Mapping[str, torch.Tensor], shape: torch.Size) -> StateForm | None:
    """The form of state that can be converted, from its tensors, which may be on meta; None where it is another."""
    names = {of for of in tensors if of != "master" and not is_in_blocks(of)}
    widths = {_WIDTHS.get(tensors[of].dtype) for of in names}
    if names not in _KINDS or len(widths) != 1 or None in widths:
        return None
    form = StateForm(frozenset(names), str(widths.pop()), "master" in tensors)
    return form if kinds_of(tensors) == form.kinds(shape) else None


def kinds_of(tensors: Mapping[str, torch.Tensor]) -> Kinds:
    """Dtype and shape of each tensor."""
    return {of: (tensor.dtype, tensor.shape) for of, tensor in tensors.items()}


def plain_tensors(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state tensors of a record as a checkpoint has them, on meta: a master in place of compact parts."""
    found = {}
    for of, tensor in state.items():
        if of == "rest":
            found["master"] = torch.empty(tensor.shape, dtype=torch.float32, device="meta")
        elif of not in _MASTER_PARTS:
            found[of] = tensor
    return found


def plain_parts(values: torch.Tensor, state: Mapping[str, torch.Tensor], given: str) -> dict[str, torch.Tensor]:
    """The state of a record of that format, or of a part of it, as a checkpoint has it: moments as they are."""
    plain = {of: tensor for of, tensor in state.items() if of not in _MASTER_PARTS}
    if "rest" in state:
        plain["master"] = decode_state(values, state, given)["master"]
        if "exp_avg_sq" in plain and plain["exp_avg_sq"].is_floating_point():
            # Its sign bit belongs to the master.
            plain["exp_avg_sq"] = plain["exp_avg_sq"].abs()
    return plain


def conversion_warning(where: object, pairs: Iterable[tuple[StateForm, StateForm]]) -> str | None:
    """The warning about a start from a checkpoint of other formats; None if nothing is converted."""
    changed = [(one, other) for one, other in pairs if one != other]
    if not changed:
        return None
    lost = list(dict.fromkeys(words for one, other in changed for words in one.lost_in(other)))
    end = "; ".join(lost) if lost else "nothing is lost"
    return (
        f"the state in the checkpoint {where} is in another format than this run's, and is converted for "
        f"{len(changed)} parameters: {end}"
    )


# The count of updates, which a checkpoint has in the state of each trained parameter.
UPDATES = "updates"


@dataclass(frozen=True)
class Content:
    """The tensors of one record in a checkpoint."""

    name: str
    values: torch.Tensor  # on meta
    state: dict[str, torch.Tensor]  # on meta, by name
    # Its dimensions from the largest stride to the smallest, where blocks of its state are not row by row.
    order: list[int] | None = None


class StoreContents:
    """The last commit of a store, as a checkpoint has it; `records` are in the store's order."""

    def __init__(
        self, store: Store, trained: Collection[str], buffers: Buffers | None = None, *, values_alone: bool = False
    ) -> None:
        """`trained` are the names of the parameters that the optimizer updates; `values_alone` leaves state out.

        The values of `buffers` are those that the model has now.
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
        # Instead of the rest of a compact record, its master is written.
        state = plain_tensors(stored)
        if name in self._trained:
            if UPDATES in state:
                raise ConfigError(
                    f"the optimizer keeps state called 'updates' for {name!r}, which cannot be saved: a checkpoint has "
                    "the number of updates under that name. Give that state another name in the optimizer"
                )
            state[UPDATES] = _meta("int64", [])
        # Blocks follow the order of elements in memory, which row-major tensors do not show.
        in_blocks = record["order"] is not None and any(map(is_in_blocks, stored))
        return Content(
            name, _meta(record["dtype"], record["shape"]), state, list(record["order"]) if in_blocks else None
        )

    def read(self, put: Put, wanted: Callable[[str], bool] = lambda _: True) -> None:
        """Read all records, or those whose names are `wanted`."""
        stored = [record for record in self._stored if wanted(record["name"])]
        # Row-major ones are scanned together.
        for row_major, run in itertools.groupby(stored, lambda record: record["order"] is None):
            names = [record["name"] for record in run]
            for some in [names] if row_major else [[name] for name in names]:
                self.read_records(some, put)

    def read_records(self, names: list[str], put: Put) -> None:
        """Read some records that are row-major, or a single one."""

        def give(name: str, tensors: dict[str, torch.Tensor], starts: Mapping[str, int]) -> None:
            form = self._by_name[name]["format"]
            if self._values_alone:
                tensors = {of: tensor for of, tensor in tensors.items() if not of}
            elif form:
                values = tensors.pop("")
                tensors = {"": values, **plain_parts(values, tensors, form)}
            for of, tensor in tensors.items():
                # A master begins where the values do, which it is made of.
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
        """Give the buffers that are the model's; the names of the records that the store has to give."""
        if self._buffers is not None:
            for name in filter(self._of_model.__contains__, names):
                put(name, "", 0, self._buffers.tensor(name))
        return [name for name in names if name not in self._of_model]


def _meta(dtype: str, shape: list[int]) -> torch.Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")


class ShareContents:
    """A rank's part of a checkpoint: its rows, at their place in whole parameters."""

    def __init__(self, own: StoreContents, rows: Mapping[str, Rows], layout: Layout, names: Collection[str]) -> None:
        """`rows` says which rows of each parameter the store has; `names` are the parameters whose rows it gives."""
        self.own = own
        self.rows = rows
        self._layout = layout
        self._names = names
        # By record, on meta.
        self.tensors = {record.name: {"": record.values, **record.state} for record in own.records}
        self.nbytes = _bytes_in([record for record in own.records if self._is_own(record.name)])

    def read(self, put: Put) -> None:
        """Read all that this rank gives."""
        self.own.read(partial(self._placed, put), self._is_own)

    def read_one(self, name: str, put: Put) -> None:
        """Read what this rank gives of one record."""
        if name in self.tensors and self._is_own(name):
            self.own.read_records([name], partial(self._placed, put))

    def _placed(self, put: Put, name: str, of: str, start: int, values: torch.Tensor) -> None:
        rows = self.rows.get(name)
        first = None if rows is None or of == UPDATES else rows.first_of(of, self.tensors[name][of])
        if first is not None:
            put(name, of, first + start, values)
        elif not self._layout.shard:
            # A tensor that is not divided is the same on all ranks.
            put(name, of, start, values)

    def _is_own(self, name: str) -> bool:
        # Buffers are the first rank's.
        return name in self._names if name in self.rows else not self._layout.rank


class GatheredContents:
    """The contents of all ranks' stores, as the first one has them: whole parameters, and its own buffers.

    Rows pass through it piece by piece, so that no rank has a whole parameter in memory.
    """

    def __init__(self, share: ShareContents, line: Line, ranks: int) -> None:
        """`share` is the first rank's, which has rows of all parameters."""
        self._share = share
        self._line = line
        self._others = range(1, ranks)
        self.nbytes = _bytes_in(whole_records(share.own, share.rows))

    def read(self, put: Put) -> None:
        """Read all records: of each parameter the rows of one rank after the other.

        Raises:
            StoppedError: rows of another rank did not arrive.
        """
        for name, tensors in self._share.tensors.items():
            self._share.read_one(name, put)
            for rank in self._others if name in self._share.rows else ():
                for number, start, values in self._line.pieces(rank, [one.dtype for one in tensors.values()]):
                    put(name, [*tensors][number], start, values)


def send_contents(share: ShareContents, order: Sequence[str], line: Line) -> None:
    """Send what this rank gives to the first rank, which reads it as `GatheredContents`.

    `order` names the first rank's parameters, in its order.

    Raises:
        StoppedError: the first rank receives no more.
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
    """The records of a checkpoint, from those of the first rank, which has rows of all parameters."""
    return [_whole(record, rows[record.name]) if record.name in rows else record for record in own.records]


def _whole(record: Content, rows: Rows) -> Content:
    values = torch.empty(rows.whole, dtype=record.values.dtype, device="meta")
    state = {
        of: torch.empty(rows.whole_of(of, tensor), dtype=tensor.dtype, device="meta")
        for of, tensor in record.state.items()
    }
    return Content(record.name, values, state, record.order)


# What files are written from.
Contents = StoreContents | GatheredContents | ShareContents
