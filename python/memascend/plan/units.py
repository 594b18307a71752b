"""Groups a model's parameters into units that are read together, and orders the units as a step uses them."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.parameter import is_lazy

from memascend.errors import ConfigError
from memascend.memory import whole_pages

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


# Modules that hold others and are never called themselves.
_UNCALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass(eq=False)
class UnitDraft:
    """A unit in the making."""

    name: str
    parameters: list[str]
    module: str | None
    pinned: bool = False
    again: list[str] = field(default_factory=list)
    # As sets that keep their order.
    around: dict[str, None] = field(default_factory=dict)
    around_again: dict[str, None] = field(default_factory=dict)

    def pack(self, other: UnitDraft) -> None:
        """Take the parameters of another one, too: no module's call binds all of them."""
        self.parameters += other.parameters
        self.module = None

    def name_among(self, taken: set[str]) -> None:
        """Have a name that is not taken, and take it: a module may be called "root" or "rest"."""
        self.name = self.name or "root"
        while self.name in taken:
            self.name += "'"
        taken.add(self.name)


class ModuleTree:
    """The modules and parameters of a model by name, shared ones by the first of their names."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules = dict(model.named_modules())
        self.parameters = dict(model.named_parameters())
        if not self.parameters:
            raise ConfigError("the model has no parameters, so there is nothing to offload: pass a model that has some")
        lazy = [name for name, parameter in self.parameters.items() if is_lazy(parameter)]
        if lazy:
            raise ConfigError(f"the shape of {lazy[0]!r} is not known yet: run one forward before offload()")
        self.raw = {name: parameter.numel() * parameter.dtype.itemsize for name, parameter in self.parameters.items()}
        self.index = {name: index for index, name in enumerate(self.parameters)}
        owners = dict.fromkeys(map(self.owner, self.parameters), 0)
        for name, nbytes in self.raw.items():
            owners[self.owner(name)] += nbytes
        # The least that must be in memory at once: a module's call binds all that it owns.
        self.largest_owner = max(owners.values())
        self.claimed: set[str] = set()
        # Every module's parameters, without a walk over all names for each module.
        self._below: dict[str, list[str]] = {name: [] for name in self.modules}
        for name in self.parameters:
            owner = self.owner(name)
            self._below[""].append(name)
            while owner:
                if owner in self._below:
                    self._below[owner].append(name)
                owner = owner.rpartition(".")[0]

    @staticmethod
    def owner(parameter: str) -> str:
        """The module that owns a parameter directly."""
        return parameter.rpartition(".")[0]

    def below(self, module: str) -> list[str]:
        """The parameters in a module that no piece has claimed."""
        return [name for name in self._below[module] if name not in self.claimed]

    def under(self, module: str) -> list[str]:
        """The parameters in a module."""
        return self._below[module]

    def direct(self, module: str) -> list[str]:
        """What a module owns directly and no piece has claimed."""
        return [name for name in self.below(module) if self.owner(name) == module]

    def children(self, module: str) -> Iterator[str]:
        """Modules below a module, each at its first place in the tree."""
        prefix = f"{module}." if module else ""
        for name, _ in self.modules[module].named_children():
            # A child that was met before, elsewhere in the tree, has its place there.
            if prefix + name in self.modules:
                yield prefix + name

    def claim(self, pieces: Iterable[UnitDraft]) -> None:
        """Note that these pieces have their parameters."""
        for piece in pieces:
            self.claimed.update(piece.parameters)

    def bytes_of(self, parameters: Iterable[str]) -> int:
        """Bytes of parameters, without padding."""
        return sum(self.raw[name] for name in parameters)

    def paged(self, parameter: str) -> int:
        """Bytes of a parameter on storage and in a lease."""
        return whole_pages(self.raw[parameter])

    def is_whole(self, module: str) -> bool:
        """Whether no piece has claimed anything in it."""
        return self.claimed.isdisjoint(self._below[module])

    def called(self, module: str) -> str | None:
        """The module, if its own call binds its parameters."""
        return None if isinstance(self.modules[module], _UNCALLED) else module


def note_ties(tree: ModuleTree, pieces: Sequence[UnitDraft]) -> None:
    """Where tied parameters are used again, and what is bound around each use.

    A tied parameter is used after the unit whose parameters are registered before that place.
    """
    first = {id(parameter): name for name, parameter in tree.parameters.items()}
    unit_of = {name: piece for piece in pieces for name in piece.parameters}
    around = _Around(tree, pieces, {id(tree.parameters[name]): piece for name, piece in unit_of.items()})
    before: UnitDraft | None = None
    for name, parameter in tree.model.named_parameters(remove_duplicate=False):
        here = unit_of[first[id(parameter)]]
        again = here.around
        if name in unit_of:
            before = here if not here.pinned else before
        elif before is not None and before is not here and not here.pinned:
            again = here.around_again
            if before.name not in here.again:
                here.again.append(before.name)
        again.update((other.name, None) for other in around.of(name) if other is not here and not other.pinned)


class _Around:
    """Which units modules bind for as long as their call takes; see `wiring`, which makes the gates that do."""

    def __init__(self, tree: ModuleTree, pieces: Sequence[UnitDraft], unit_of: dict[int, UnitDraft]) -> None:
        # A module that has several names is one, by whichever it is called.
        self._modules = dict(tree.model.named_modules(remove_duplicate=False))
        self._bound: dict[int, list[UnitDraft]] = {}
        for piece in pieces:
            if piece.module is not None:
                self._bound.setdefault(id(tree.modules[piece.module]), []).append(piece)
        for name, parameter in tree.model.named_parameters(remove_duplicate=False):
            owner = tree.owner(name)
            # A list of parameters is never called: who holds it binds them.
            while owner and isinstance(self._modules[owner], (nn.ParameterList, nn.ParameterDict)):
                owner = tree.owner(owner)
            self._bound.setdefault(id(self._modules[owner]), []).append(unit_of[id(parameter)])
        # Of each module, with those around it.
        self._found: dict[str, tuple[UnitDraft, ...]] = {}

    def of(self, parameter: str) -> tuple[UnitDraft, ...]:
        """The units that are bound while the module that owns a parameter computes."""
        return self._within(ModuleTree.owner(parameter))

    def _within(self, module: str) -> tuple[UnitDraft, ...]:
        found = self._found.get(module)
        if found is None:
            outer = self._within(ModuleTree.owner(module)) if module else ()
            found = self._found[module] = tuple(
                dict.fromkeys((*outer, *self._bound.get(id(self._modules[module]), ())))
            )
        return found


# Blocks above this are divided, unless what a single module owns is larger anyway: that much an arena needs.
_BOUND_BYTES = 1 << 30
# What is left over and smaller than this part of the largest block is kept resident, up to a few of them together.
_SMALL_PART = 16
_REST_PART = 4


@dataclass(frozen=True)
class Unit:
    """The parameters that are read and evicted together."""

    name: str  # its name, which no other unit has; a module's where it is one
    parameters: tuple[str, ...]  # their names as `model.named_parameters()` gives them, each tied one once
    nbytes: int  # bytes of their values, each padded to whole pages
    module: str | None  # the module whose call binds all of it; None where its modules bind by themselves
    pinned: bool  # small, and bound while others are: kept resident
    # The units after which it is used once more, being tied to what follows there (an embedding that is the head, too,
    # is used after the last block).
    again: tuple[str, ...] = ()
    # The units that are bound around it, where it is used first: a module's call binds what it owns until it returns,
    # and others are called in it.
    around: tuple[str, ...] = ()
    around_again: tuple[str, ...] = ()  # those that are bound around it where it is used again
    frozen_bytes: int = 0  # how many of `nbytes` no step changes
    elements: int = 0  # of all its parameters


def find_units(
    model: nn.Module, *, units: Sequence[str] | None = None, bytes_max: int | None = None
) -> tuple[Unit, ...]:
    """Divide the parameters of `model`, each into one unit, in the order of its forward as the module tree tells it.

    Repeated blocks are units, and so are embeddings, heads and whatever else is large; small leftovers (a final norm, a
    class token) are one pinned unit, "rest". Blocks larger than a bound are divided by module.

    Args:
        model: its parameters may be on "meta".
        units: names of modules that are one unit each, whatever their size; what they leave is divided as ever.
        bytes_max: the bound; None: 1 GiB, or where that is larger what a single module owns directly. That is never
            divided, as one call binds it all.

    Raises:
        ConfigError: the model has no parameters, or uninitialized ones; `units` names what cannot be a unit.
    """
    tree = ModuleTree(model)
    bound = max(_BOUND_BYTES, tree.largest_owner) if bytes_max is None else bytes_max
    pieces = [UnitDraft(name, tree.below(name), tree.called(name)) for name in _checked(tree, units or ())]
    tree.claim(pieces)
    blocks = list(_blocks(tree, ""))
    tree.claim(blocks)
    # Of what is left, a module that is no larger than a block stays whole.
    limit = max([tree.bytes_of(piece.parameters) for piece in (*pieces, *blocks)], default=tree.largest_owner)
    leftovers = list(_leftovers(tree, "", min(limit, bound)))
    rest = _small(tree, leftovers, limit)
    leftovers = [piece for piece in leftovers if piece not in rest]
    for piece in (*blocks, *leftovers):
        pieces += _divided(tree, piece, bound)
    if rest:
        pieces.append(UnitDraft("rest", [name for piece in rest for name in piece.parameters], None, pinned=True))
    return _ordered(tree, pieces)


def _checked(tree: ModuleTree, names: Sequence[str]) -> Sequence[str]:
    """The names that a user gave, if they are modules with parameters of their own and none lies in another."""
    unknown = [name for name in names if name not in tree.modules]
    if unknown:
        raise ConfigError(
            "units names modules of the model, as model.named_modules() gives them, and the model has no "
            f"{', '.join(map(repr, unknown))}: correct it"
        )
    for name in names:
        if not tree.below(name):
            raise ConfigError(
                f"units names {name!r}, which has no parameters, or only such as are tied to earlier ones: leave it out"
            )
    for index, name in enumerate(names):
        for other in names[:index]:
            if (
                name == other
                or not other
                or not name
                or f"{name}.".startswith(f"{other}.")
                or f"{other}.".startswith(f"{name}.")
            ):
                raise ConfigError(
                    f"units names {other!r} and {name!r}, which share parameters, and each is read with one unit: name "
                    "one of the two"
                )
    return names


def _blocks(tree: ModuleTree, module: str) -> Iterator[UnitDraft]:
    """Children that look alike, of the outermost lists that have such."""
    children = [child for child in tree.children(module) if tree.below(child)]
    alike: set[str] = set()
    kind = tree.modules[module]
    if isinstance(kind, nn.ModuleList) and len(children) == 1:
        # A model of one layer, or one group of shared layers.
        alike = set(children)
    elif isinstance(kind, (nn.ModuleList, nn.Sequential)):
        alike = _alike(tree, children)
    for child in children:
        if child in alike and tree.is_whole(child):
            yield UnitDraft(child, tree.below(child), tree.called(child))
        else:
            yield from _blocks(tree, child)


def _alike(tree: ModuleTree, children: Sequence[str]) -> set[str]:
    """Those of a class of which two have parameters of the same shapes, or one all of the other's (T5's blocks)."""
    found: set[type] = set()
    seen: dict[type, set[frozenset[tuple[str, tuple[int, ...]]]]] = {}
    for child in children:
        kind = type(tree.modules[child])
        shapes = frozenset((name[len(child) :], tuple(tree.parameters[name].shape)) for name in tree.below(child))
        others = seen.setdefault(kind, set())
        if kind not in found and any(shapes <= other or other <= shapes for other in others):
            found.add(kind)
        others.add(shapes)
    return {child for child in children if type(tree.modules[child]) in found}


def _leftovers(tree: ModuleTree, module: str, limit: int) -> Iterator[UnitDraft]:
    """What no block has: whole modules up to `limit`, else what each module owns directly."""
    left = tree.below(module)
    if not left:
        return
    called = tree.called(module)
    if module and called is not None and tree.is_whole(module) and tree.bytes_of(left) <= limit:
        yield UnitDraft(module, left, called)
        return
    direct = tree.direct(module)
    if direct:
        yield UnitDraft(module, direct, called)
    for child in tree.children(module):
        yield from _leftovers(tree, child, limit)


def _small(tree: ModuleTree, leftovers: Sequence[UnitDraft], limit: int) -> list[UnitDraft]:
    """The leftovers that are kept resident: the smallest, as many as are little together."""
    rest, total = [], 0
    for piece in sorted(leftovers, key=lambda piece: tree.bytes_of(piece.parameters)):
        nbytes = tree.bytes_of(piece.parameters)
        total += nbytes
        if nbytes * _SMALL_PART > limit or total * _REST_PART > limit:
            break
        rest.append(piece)
    return rest


def _divided(tree: ModuleTree, piece: UnitDraft, bound: int) -> list[UnitDraft]:
    """The piece, or where it is larger than `bound` its parts, the small ones together."""
    if tree.bytes_of(piece.parameters) <= bound:
        return [piece]
    parts: list[UnitDraft] = []
    packed: UnitDraft | None = None
    packed_bytes = 0
    for part in _parts(tree, piece, bound):
        nbytes = tree.bytes_of(part.parameters)
        if nbytes * _SMALL_PART > bound:
            parts.append(part)
        elif packed is not None and (packed_bytes + nbytes) * _REST_PART <= bound:
            # Norms, or many small experts: one of them alone is not worth a read.
            packed.pack(part)
            packed_bytes += nbytes
        else:
            packed, packed_bytes = part, nbytes
            parts.append(part)
    return parts


def _parts(tree: ModuleTree, piece: UnitDraft, bound: int) -> Iterator[UnitDraft]:
    """Modules no larger than `bound`; what a module owns directly stays together, as its call binds all of it."""
    # A piece larger than the bound is a whole module, whose name it has, or what one owns directly.
    inside = set(piece.parameters)
    direct = [name for name in piece.parameters if tree.owner(name) == piece.name]
    if tree.bytes_of(piece.parameters) <= bound or len(direct) == len(piece.parameters):
        yield piece
        return
    if direct:
        yield UnitDraft(piece.name, direct, piece.module)
    for child in tree.children(piece.name):
        below = [name for name in tree.under(child) if name in inside]
        if below:
            yield from _parts(tree, UnitDraft(child, below, tree.called(child)), bound)


def _ordered(tree: ModuleTree, pieces: list[UnitDraft]) -> tuple[Unit, ...]:
    """Units in the order in which their parameters are registered, the head last."""
    head = _head(tree)

    def place(piece: UnitDraft) -> tuple[bool, int]:
        first = min(tree.index[name] for name in piece.parameters)
        return piece.parameters == head, first

    pieces = sorted(pieces, key=place)
    taken: set[str] = set()
    for piece in pieces:
        piece.name_among(taken)
    note_ties(tree, pieces)
    return tuple(
        Unit(
            name=piece.name,
            parameters=tuple(sorted(piece.parameters, key=tree.index.__getitem__)),
            nbytes=sum(map(tree.paged, piece.parameters)),
            module=piece.module,
            pinned=piece.pinned,
            again=tuple(piece.again),
            around=tuple(piece.around),
            around_again=tuple(piece.around_again),
            frozen_bytes=sum(tree.paged(name) for name in piece.parameters if not tree.parameters[name].requires_grad),
            elements=sum(tree.parameters[name].numel() for name in piece.parameters),
        )
        for piece in pieces
    )


def _head(tree: ModuleTree) -> list[str] | None:
    """The parameters of the head, where the model says what it is (as transformers' do)."""
    ask = getattr(tree.model, "get_output_embeddings", None)
    try:
        module = ask() if callable(ask) else None
    except NotImplementedError:
        return None
    return next((tree.under(name) for name, found in tree.modules.items() if found is module), None)


def forward_order(units: Sequence[Unit]) -> list[Unit]:
    """The units that are not pinned as a forward uses them, tied ones more than once; a backward goes the other way."""
    after: dict[str, list[Unit]] = {}
    for unit in units:
        for before in unit.again:
            after.setdefault(before, []).append(unit)
    order: list[Unit] = []
    for unit in units:
        if not unit.pinned:
            order += [unit, *after.get(unit.name, ())]
    return order


def list_windows(units: Sequence[Unit], length: int) -> list[dict[str, Unit]]:
    """What must be in memory at once where `length` units that follow each other are, by name; pinned ones always.

    A backward holds the same sets as the forward, and a step begins where the last one ended.
    """
    order, named = forward_order(units), {unit.name: unit for unit in units}
    pinned = {unit.name: unit for unit in units if unit.pinned}
    met: set[str] = set()
    uses: list[dict[str, Unit]] = []
    for unit in order:
        around = unit.around_again if unit.name in met else unit.around
        uses.append({name: named[name] for name in (unit.name, *around)})
        met.add(unit.name)
    sets = []
    for first in range(max(1, len(order) - length + 1)):
        held = dict(pinned)
        for use in uses[first : first + length]:
            held.update(use)
        sets.append(held)
    return sets


def count_reads(order: Sequence[Unit], slots: int) -> tuple[dict[str, int], dict[str, int]]:
    """How often one step reads each unit, in its forward and in its backward, with `slots` for all of them.

    What is used farthest from now makes room, and a commit makes what was trained useless. `order` is the forward's.
    """
    names = [unit.name for unit in order]
    frozen = {unit.name for unit in order if unit.frozen_bytes >= unit.nbytes}
    step = names + names[::-1]
    first = {name: names.index(name) for name in frozen}
    # The first step begins with nothing in memory; the second is like all that follow.
    uses = step * 2
    following: list[float] = [math.inf] * len(uses)
    seen: dict[str, int] = {}
    for at in range(len(uses) - 1, -1, -1):
        name = uses[at]
        if name in frozen:
            # After the last use that is looked at comes that of the next step.
            following[at] = seen.get(name, len(uses) + first[name])
        elif name in seen and seen[name] // len(step) == at // len(step):
            following[at] = seen[name]
        seen[name] = at
    count: tuple[dict[str, int], dict[str, int]] = (dict.fromkeys(names, 0), dict.fromkeys(names, 0))
    held: dict[str, float] = {}
    heap: list[tuple[float, str]] = []
    for at, name in enumerate(uses):
        if at == len(step):
            held = {kept: use for kept, use in held.items() if kept in frozen}
        if name not in held:
            if at >= len(step):
                count[at - len(step) >= len(names)][name] += 1
            while len(held) >= max(slots, 1):
                use, out = heapq.heappop(heap)
                if held.get(out) == -use:
                    del held[out]
        held[name] = following[at]
        heapq.heappush(heap, (-following[at], name))
    return count
