"""Describes which rows of whole parameters a rank has, and which parameters are gathered together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from memascend.errors import ConfigError
from memascend.memory import whole_pages
from memascend.plan.units import Unit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from memascend.distributed.replicas import Refill
    from memascend.optim.rules import Arithmetic


# The number of elements that share one scale in an 8-bit format.
BLOCK_ELEMENTS = 256


@dataclass(frozen=True)
class Rows:
    """A range of rows of one parameter."""

    whole: torch.Size  # the shape of the whole parameter
    first: int  # the first row
    count: int  # the number of rows

    @property
    def shape(self) -> torch.Size:
        """The shape of these rows."""
        return torch.Size((self.count, *self.whole[1:]))

    @property
    def first_element(self) -> int:
        """The index of the rows' first element in the whole parameter."""
        return self.first * self.whole[1:].numel()

    def of(self, state: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the part of a whole tensor that belongs to these rows.

        `state` is the name of a state tensor, or "" for the values. A tensor that is not sharded is returned unchanged.
        """
        if tensor.shape == self.whole:
            return tensor[self.first : self.first + self.count]
        block = _block_of(state)
        if block:
            start = self.first_element // block
            return tensor[start : start + -(-self.shape.numel() // block)]
        return tensor

    def first_of(self, state: str, part: torch.Tensor) -> int | None:
        """Returns the index in a whole tensor at which the part for these rows begins; None for an unsharded tensor."""
        if part.shape == self.shape:
            return self.first_element
        block = _block_of(state)
        return self.first_element // block if block else None

    def whole_of(self, state: str, part: torch.Tensor) -> torch.Size:
        """Returns the shape of the whole tensor, given the part for these rows."""
        if part.shape == self.shape:
            return self.whole
        return blocks_of(self.whole) if is_in_blocks(state) else part.shape


@dataclass(frozen=True)
class Layout:
    """The position of a rank among all ranks.

    Ranks are numbered replica by replica. Each replica has all rows of the model.
    """

    rank: int
    replicas: int
    shards: int  # the number of ranks that shard the rows of a replica

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.replicas * self.shards

    @property
    def replica(self) -> int:
        """The replica to which the rank belongs."""
        return self.rank // self.shards

    @property
    def shard(self) -> int:
        """The rank's number within its replica, which decides which rows the rank has."""
        return self.rank % self.shards

    @property
    def peers(self) -> range:
        """All ranks with the rows that this rank has, including this rank, in the order of replicas."""
        return range(self.shard, self.size, self.shards)


@dataclass(eq=False)
class Partition:
    """The share of a model's parameters that a process has."""

    rows: Mapping[str, Rows] = field(default_factory=dict)  # by name of a sharded parameter; empty for a single process
    layout: Layout = Layout(0, 1, 1)

    def whole(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """Returns, on meta, the whole parameter to which `part` belongs; `part` if the parameter is not sharded."""
        if name not in self.rows:
            return part
        return on_meta(part, self.rows[name].whole)

    def part(self, name: str, whole: torch.Tensor, state: str = "") -> torch.Tensor:
        """Returns this process's part of a parameter, or of the state tensor that `state` names."""
        return self.rows[name].of(state, whole) if name in self.rows else whole


def on_meta(parameter: torch.Tensor, shape: torch.Size) -> torch.nn.Parameter:
    """Returns a parameter on meta with the dtype and `requires_grad` of `parameter`, in the given shape."""
    made = torch.empty(shape, dtype=parameter.dtype, device="meta")
    return torch.nn.Parameter(made, requires_grad=parameter.requires_grad)


def is_in_blocks(state: str) -> bool:
    """True if a state tensor of this name has one number for each block of elements."""
    return state.endswith("_absmax")


def _block_of(state: str) -> int:
    """Returns how many elements share one number of a state tensor; 0 for tensors without blocks."""
    # Each byte of "rounded_up" has the bits of eight elements. A bit says whether the element of a compact record was
    # rounded up.
    return BLOCK_ELEMENTS if is_in_blocks(state) else 8 if state == "rounded_up" else 0


def blocks_of(shape: torch.Size) -> torch.Size:
    """Returns the shape of a state tensor with one number per block, for a parameter of `shape`."""
    return torch.Size([-(-shape.numel() // BLOCK_ELEMENTS)])


@dataclass(eq=False, kw_only=True)
class RowsOfRank(Partition):
    """The rows of a sharded model that one rank has."""

    named: Mapping[str, torch.nn.Parameter]  # the rows, by parameter name, in the model's order; no entry is empty
    gathers: Sequence[tuple[str, Sequence[str]]]  # each gather's name, and the names of the parameters in it
    local: Mapping[int, torch.nn.Parameter]  # the rows, by the id of the model's parameter
    refill: Refill | None = None  # fills the stores of ranks that have lost their stores

    def local_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Returns the rows of a model's parameter. Returns any other tensor unchanged."""
        return self.local.get(id(parameter), parameter)

    def units(self) -> tuple[Unit, ...]:
        """Returns one unit for each gather that includes rows of this rank: FSDP2 needs these rows at the same time."""
        units: list[Unit] = []
        taken: set[str] = set()
        for name, parameters in self.gathers:
            rows = {each: self.named[each] for each in parameters if each in self.named}
            if not rows:
                continue
            while name in taken:
                name += "'"  # noqa: PLW2901
            taken.add(name)
            units.append(
                Unit(
                    name=name,
                    parameters=tuple(rows),
                    nbytes=sum(whole_pages(one.nbytes) for one in rows.values()),
                    module=None,
                    pinned=False,
                    frozen_bytes=sum(whole_pages(one.nbytes) for one in rows.values() if not one.requires_grad),
                    elements=sum(one.numel() for one in rows.values()),
                )
            )
        return tuple(units)

    def require_by_rows(self, arithmetic: Arithmetic) -> None:
        """Rejects optimizers that need whole parameters, and rows that end within a block of state."""
        for rule in arithmetic.rules.values():
            if rule.whole is not None and rule.whole.whole:
                raise ConfigError(
                    f"an update of {type(rule.code.optimizer).__name__} needs whole parameters, and fully_shard() "
                    "shards their rows: use an optimizer that works element by element (AdamW, Lion, SGD), or train in "
                    "one process without fully_shard()"
                )
        for name, parameter in self.named.items():
            own = arithmetic.rules.get(id(parameter)) if parameter.requires_grad else None
            given = (own and own.format) or ""
            block = 1
            if "8bit" in given:
                block = BLOCK_ELEMENTS
            elif own and given == "compact bf16" and "rounded_up" in own.describe():
                # Each byte of `rounded_up` has the bits of eight elements.
                block = 8
            whole = self.rows[name].whole
            # The rows of the second rank begin at element `first`, the rows of the third rank at element 2 * `first`,
            # and so on.
            first = -(-whole[0] // self.layout.shards) * whole[1:].numel()
            if first < whole.numel() and first % block:
                kept = "8bit" if "8bit" in given else "bf16"
                raise ConfigError(
                    f"the rows of {name!r} on rank 1 begin at element {first}, within a block of {block} elements that "
                    f"state={kept!r} stores together: leave state= out, or use a number of ranks with which the rows "
                    "of each rank are whole blocks"
                )
