"""Groups a model's parameters into units that are read together, and orders the units as a step uses them."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from memascend.errors import ConfigError
from memascend.memory import whole_pages
from memascend.plan.outline import Outline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import nn


# Container classes of torch. A forward never calls a container itself.
_UNCALLED = ("ModuleList", "ModuleDict", "ParameterList", "ParameterDict")


def _is_one_of(module: nn.Module | Outline, *containers: str) -> bool:
    """True if `module` is an instance of one of the torch classes named in `containers`."""
    if isinstance(module, Outline):
        return module.kind in containers
    from torch import nn

    return isinstance(module, tuple(getattr(nn, name) for name in containers))


def _lazy(model: nn.Module | Outline) -> list[str]:
    """Returns the names of parameters that have no shape yet."""
    if isinstance(model, Outline):
        return []
    from torch.nn.parameter import is_lazy

    return [name for name, parameter in model.named_parameters() if is_lazy(parameter)]


@dataclass(eq=False)
class UnitDraft:
    """A unit that `find_units` is still building. The class `Unit` describes the fields."""

    name: str
    parameters: list[str]
    nbytes: int  # without padding
    module: str | None
    pinned: bool = False
    # These dicts are ordered sets: each value is None.
    again: dict[str, None] = field(default_factory=dict)
    around: dict[str, None] = field(default_factory=dict)
    around_again: dict[str, None] = field(default_factory=dict)

    def take_in(self, other: UnitDraft) -> None:
        """Adds the parameters of `other`. The draft then has parameters of several modules, so `module` is None."""
        self.parameters += other.parameters
        self.nbytes += other.nbytes
        self.module = None

    def take_name(self, taken: set[str]) -> None:
        """Adds apostrophes to the draft's name until it is not in `taken`, then adds the name to `taken`.

        A draft of the root module has no name, and gets the name "root". A user's module may have the name "root" or
        "rest", too.
        """
        self.name = self.name or "root"
        while self.name in taken:
            self.name += "'"
        taken.add(self.name)


class ModuleTree:
    """The modules and parameters of a model by name. A shared module or parameter is listed by its first name only."""

    def __init__(self, model: nn.Module | Outline) -> None:
        self.model = model
        self.modules: dict[str, Any] = dict(model.named_modules())
        self.parameters: dict[str, Any] = dict(model.named_parameters())
        if not self.parameters:
            raise ConfigError("the model has no parameters to offload: pass a model that has parameters")
        if lazy := _lazy(model):
            raise ConfigError(
                f"the parameter {lazy[0]!r} is lazy and has no shape yet: run one forward of the model before offload()"
            )
        self.raw = {name: parameter.numel() * parameter.dtype.itemsize for name, parameter in self.parameters.items()}
        owners: Counter[str] = Counter()
        for name, nbytes in self.raw.items():
            owners[self.owner(name)] += nbytes
        # The call of a module materializes all parameters that the module owns directly. So the arena needs at least
        # the bytes of the module that owns the most bytes.
        self.largest_owner = max(owners.values())
        self.claimed: set[str] = set()
        # For each module, by name, the names of all parameters inside the module.
        self.under: dict[str, list[str]] = {name: [] for name in self.modules}
        for name in self.parameters:
            owner = self.owner(name)
            self.under[""].append(name)
            while owner:
                if owner in self.under:
                    self.under[owner].append(name)
                owner = self.owner(owner)

    @staticmethod
    def owner(parameter: str) -> str:
        """Returns the name of the module that directly contains the parameter or module named `parameter`."""
        return parameter.rpartition(".")[0]

    def below(self, module: str) -> list[str]:
        """Returns the parameters inside a module, except parameters that a draft has claimed."""
        return [name for name in self.under[module] if name not in self.claimed]

    def children(self, module: str) -> Iterator[str]:
        """Yields the names of a module's children, except a shared child that has an earlier name in the tree."""
        prefix = f"{module}." if module else ""
        for name, _ in self.modules[module].named_children():
            # `modules` contains a shared child only under its first name.
            if prefix + name in self.modules:
                yield prefix + name

    def draft(self, module: str, parameters: list[str]) -> UnitDraft:
        """Returns a draft of `parameters`, which are inside the module named `module`.

        The draft's `module` is None if a forward never calls this module.
        """
        called = None if _is_one_of(self.modules[module], *_UNCALLED) else module
        return UnitDraft(module, parameters, sum(self.raw[name] for name in parameters), called)

    def claim(self, drafts: Iterable[UnitDraft]) -> None:
        """Marks the parameters of these drafts as claimed."""
        for draft in drafts:
            self.claimed.update(draft.parameters)

    def is_whole(self, module: str) -> bool:
        """True if no draft has claimed a parameter inside the module."""
        return self.claimed.isdisjoint(self.under[module])


def note_ties(tree: ModuleTree, drafts: Sequence[UnitDraft]) -> None:
    """Fills the fields `again`, `around` and `around_again` of the drafts.

    A further name of a tied parameter counts as a further use of the parameter. This use is assumed to follow the unit
    whose parameters are registered just before this name.
    """
    unit_of = {id(tree.parameters[name]): draft for draft in drafts for name in draft.parameters}
    bound_in = _bound_in(tree, drafts, unit_of)
    before: UnitDraft | None = None
    for name, parameter in tree.model.named_parameters(remove_duplicate=False):
        here = unit_of[id(parameter)]
        again = here.around
        if name in tree.parameters:
            before = here if not here.pinned else before
        elif before is not None and before is not here and not here.pinned:
            again = here.around_again
            here.again[before.name] = None
        others = bound_in(tree.owner(name))
        again.update((other.name, None) for other in others if other is not here and not other.pinned)


def tied_bytes(model: nn.Module) -> int:
    """Returns the bytes of trained parameters that several modules share.

    If micro-batches are computed by layer, each micro-batch keeps a separate gradient of a shared parameter between two
    uses of this parameter.
    """
    named = model.named_parameters(remove_duplicate=False)
    times = Counter(parameter for _, parameter in named if parameter.requires_grad)
    return sum(parameter.nbytes for parameter, count in times.items() if count > 1)


def _bound_in(
    tree: ModuleTree, drafts: Sequence[UnitDraft], unit_of: Mapping[int, UnitDraft]
) -> Callable[[str], Iterable[UnitDraft]]:
    """Returns a function that takes a module's name and returns the units in memory while this module computes."""
    # The keys of `own` are the ids of modules, since a shared module has several names.
    modules = dict(tree.model.named_modules(remove_duplicate=False))
    own: dict[int, dict[UnitDraft, None]] = {}
    for draft in drafts:
        if draft.module is not None:
            own.setdefault(id(tree.modules[draft.module]), {})[draft] = None
    for name, parameter in tree.model.named_parameters(remove_duplicate=False):
        owner = tree.owner(name)
        # A list of parameters is never called: the call of the module that owns the list materializes the parameters.
        while owner and _is_one_of(modules[owner], "ParameterList", "ParameterDict"):
            owner = tree.owner(owner)
        own.setdefault(id(modules[owner]), {})[unit_of[id(parameter)]] = None

    def bound_in(module: str) -> Iterable[UnitDraft]:
        names = [module]
        while names[-1]:
            names.append(tree.owner(names[-1]))
        return dict.fromkeys(draft for name in reversed(names) for draft in own.get(id(modules[name]), ()))

    return bound_in


# Blocks and leftovers with more bytes than this limit are divided. If a single module owns more bytes, the limit is
# that module's bytes instead, since the parameters of one module are never divided.
_BOUND_BYTES = 1 << 30
# A leftover is a module, or a part of a module, outside of blocks. The smallest leftovers are pinned. Each pinned
# leftover has at most 1/16 of `limit` bytes (see `find_units`). All pinned leftovers together have at most 1/4 of
# `limit` bytes.
_SMALL_PART = 16
_REST_PART = 4


@dataclass(frozen=True)
class Unit:
    """A group of parameters that are read and evicted together."""

    name: str  # unique; usually the name of the module that contains the unit's parameters
    parameters: tuple[str, ...]  # names as in `model.named_parameters()`; a tied parameter has only its first name
    nbytes: int  # bytes of all values, each parameter padded to whole pages
    # The name of the module whose call materializes the whole unit. None if no single call materializes the whole unit.
    module: str | None
    pinned: bool  # True if the unit is never evicted, because all its modules are small
    # The names of the units after which a forward uses this unit again, because this unit has tied parameters. For
    # example, an embedding that is also the LM head is used again after the last block.
    again: tuple[str, ...] = ()
    # The names of other units that are materialized at the first use of this unit. For example, while an inner module
    # computes, the parameters of its outer module stay materialized.
    around: tuple[str, ...] = ()
    around_again: tuple[str, ...] = ()  # other units that are materialized at later uses of this unit
    frozen_bytes: int = 0  # the bytes of frozen parameters, which no step changes; a part of `nbytes`
    elements: int = 0  # the number of elements of all parameters


def find_units(
    model: nn.Module | Outline, *, units: Sequence[str] | None = None, bytes_max: int | None = None
) -> tuple[Unit, ...]:
    """Groups the parameters of `model` into units. The units are in the order in which a forward is likely to use them.

    Each repeated block is a unit, and so is each embedding, LM head and other large module. The smallest modules
    outside of blocks, such as a final norm, are together one pinned unit with the name "rest". A block or other module
    larger than `bytes_max` is divided into its modules; the default of `bytes_max` is 1 GiB, or more if a single module
    owns more bytes. The parameters that a single module owns stay together, since one call of the module needs all of
    them. Each module named in `units` is one unit, whatever its size.
    """
    tree = ModuleTree(model)
    bound = max(_BOUND_BYTES, tree.largest_owner) if bytes_max is None else bytes_max
    drafts = [tree.draft(name, tree.below(name)) for name in _checked(tree, units or ())]
    tree.claim(drafts)
    blocks = list(_blocks(tree, ""))
    tree.claim(blocks)
    # `limit` is the bytes of the largest block or module in `units`. If there is none, `limit` is the bytes of the
    # module that owns the most bytes. A larger module outside of blocks is divided.
    limit = max([draft.nbytes for draft in (*drafts, *blocks)], default=tree.largest_owner)
    leftovers = list(_leftovers(tree, "", min(limit, bound)))
    small = _small(leftovers, limit)
    for draft in (*blocks, *leftovers):
        if draft not in small:
            drafts += _divided(tree, draft, bound)
    if small:
        rest = UnitDraft("rest", [], 0, None, pinned=True)
        for draft in small:
            rest.take_in(draft)
        drafts.append(rest)
    return _ordered(tree, drafts)


def _checked(tree: ModuleTree, names: Sequence[str]) -> Sequence[str]:
    """Returns `names`, the value of the option `units`, after checking each name.

    Raises:
        ConfigError: the model has no module with one of the names; or a named module has no parameters, or only
            parameters that an earlier module shares; or one named module contains another named module; or a name
            occurs twice.
    """
    unknown = [name for name in names if name not in tree.modules]
    if unknown:
        raise ConfigError(
            f"units= contains {', '.join(map(repr, unknown))}, but the model has no such module: use names that "
            "model.named_modules() lists"
        )
    for name in names:
        if not tree.below(name):
            raise ConfigError(
                f"units= contains {name!r}, but this module has no parameters, or all its parameters are tied to "
                "parameters of earlier modules: remove this name from units="
            )
    for index, name in enumerate(names):
        for other in names[:index]:
            if not (name and other) or f"{name}.".startswith(f"{other}.") or f"{other}.".startswith(f"{name}."):
                raise ConfigError(
                    f"units= contains {other!r} and {name!r}, which have parameters in common, but each parameter is "
                    "read with one unit: remove one of the two names from units="
                )
    return names


def _blocks(tree: ModuleTree, module: str) -> Iterator[UnitDraft]:
    """Yields the repeated blocks inside a module: similar children of a `ModuleList` or `Sequential`.

    The only child of a `ModuleList` is a block, too. If a block contains other repeated blocks, only the outermost
    block is yielded.
    """
    children = [child for child in tree.children(module) if tree.below(child)]
    repeated: set[str] = set()
    kind = tree.modules[module]
    if _is_one_of(kind, "ModuleList") and len(children) == 1:
        # The only child of a list is a block, too: the model has a single layer, or all its layers share one module.
        repeated = set(children)
    elif _is_one_of(kind, "ModuleList", "Sequential"):
        repeated = _repeated(tree, children)
    for child in children:
        if child in repeated and tree.is_whole(child):
            yield tree.draft(child, tree.below(child))
        else:
            yield from _blocks(tree, child)


def _repeated(tree: ModuleTree, children: Sequence[str]) -> set[str]:
    """Returns the children that are repeated blocks.

    All children of one class are repeated blocks if two of these children have the same parameter shapes. One of the
    two children may have further parameters: the first block of T5, for example, has an additional bias.
    """
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
    """Yields drafts of the parameters in a module that no draft has claimed.

    A module below the root is one draft if it has at most `limit` bytes, a forward calls it, and `is_whole()` is True.
    In any other module, the parameters that the module owns directly are one draft, and each child module is divided by
    the same rule.
    """
    left = tree.below(module)
    if not left:
        return
    whole = tree.draft(module, left)
    if module and whole.module is not None and tree.is_whole(module) and whole.nbytes <= limit:
        yield whole
        return
    direct = [name for name in left if tree.owner(name) == module]
    if direct:
        yield tree.draft(module, direct)
    for child in tree.children(module):
        yield from _leftovers(tree, child, limit)


def _small(leftovers: Sequence[UnitDraft], limit: int) -> list[UnitDraft]:
    """Returns the smallest leftovers, which become the pinned unit.

    Each returned leftover has at most 1/16 of `limit` bytes. All returned leftovers together have at most 1/4 of
    `limit` bytes.
    """
    found, total = [], 0
    for draft in sorted(leftovers, key=lambda draft: draft.nbytes):
        total += draft.nbytes
        if draft.nbytes * _SMALL_PART > limit or total * _REST_PART > limit:
            break
        found.append(draft)
    return found


def _divided(tree: ModuleTree, draft: UnitDraft, bound: int) -> list[UnitDraft]:
    """Returns `draft` alone if it has at most `bound` bytes, else the parts of `draft`. Small parts are combined."""
    if draft.nbytes <= bound:
        return [draft]
    parts: list[UnitDraft] = []
    packed: UnitDraft | None = None
    for part in _parts(tree, draft, bound):
        if part.nbytes * _SMALL_PART > bound:
            parts.append(part)
        elif packed is not None and (packed.nbytes + part.nbytes) * _REST_PART <= bound:
            # Combines small parts, such as norms or small experts, because many small reads would be slow.
            packed.take_in(part)
        else:
            packed = part
            parts.append(part)
    return parts


def _parts(tree: ModuleTree, draft: UnitDraft, bound: int) -> Iterator[UnitDraft]:
    """Divides the draft by module into drafts of at most `bound` bytes.

    The parameters that one module owns directly stay together, even if they have more than `bound` bytes.
    """
    # The name of a draft above the bound is the name of a module. The draft contains all parameters inside this module,
    # or only the parameters that the module owns directly.
    inside = set(draft.parameters)
    direct = [name for name in draft.parameters if tree.owner(name) == draft.name]
    if draft.nbytes <= bound or len(direct) == len(draft.parameters):
        yield draft
        return
    if direct:
        yield tree.draft(draft.name, direct)
    for child in tree.children(draft.name):
        below = [name for name in tree.under[child] if name in inside]
        if below:
            yield from _parts(tree, tree.draft(child, below), bound)


def _ordered(tree: ModuleTree, drafts: list[UnitDraft]) -> tuple[Unit, ...]:
    """Returns units in the order in which their parameters are registered, with the LM head last."""
    head, index = _head(tree), {name: index for index, name in enumerate(tree.parameters)}
    drafts.sort(key=lambda draft: (draft.parameters == head, min(index[name] for name in draft.parameters)))
    taken: set[str] = set()
    for draft in drafts:
        draft.take_name(taken)
    note_ties(tree, drafts)
    return tuple(
        Unit(
            name=draft.name,
            parameters=tuple(sorted(draft.parameters, key=index.__getitem__)),
            nbytes=sum(whole_pages(tree.raw[name]) for name in draft.parameters),
            module=draft.module,
            pinned=draft.pinned,
            again=tuple(draft.again),
            around=tuple(draft.around),
            around_again=tuple(draft.around_again),
            frozen_bytes=sum(
                whole_pages(tree.raw[name]) for name in draft.parameters if not tree.parameters[name].requires_grad
            ),
            elements=sum(tree.parameters[name].numel() for name in draft.parameters),
        )
        for draft in drafts
    )


def _head(tree: ModuleTree) -> list[str] | None:
    """Returns the names of the LM head's parameters; None if `get_output_embeddings()` is missing or without result."""
    ask = getattr(tree.model, "get_output_embeddings", None)
    try:
        module = ask() if callable(ask) else None
    except NotImplementedError:
        return None
    return next((tree.under[name] for name, found in tree.modules.items() if found is module), None)


def forward_order(units: Sequence[Unit]) -> list[Unit]:
    """Returns the unpinned units in the order in which a forward uses them. A backward uses them in reverse order.

    A unit with tied parameters may occur several times.
    """
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
    """Returns every set of units that is in memory at once if the window is `length` units.

    Each set is a dict from names to units, and contains all pinned units. Only the windows of a forward are listed,
    because a backward has the same windows, and a step begins with the unit with which the previous step ended.
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
    """Counts how often a step reads each unit, in its forward and in its backward, if all units share `slots` slots.

    An eviction chooses the unit whose next use is farthest away. A commit invalidates the cached values of trained
    units. `order` has the units in the order in which a forward uses them.
    """
    names = [unit.name for unit in order]
    frozen = {unit.name for unit in order if unit.frozen_bytes >= unit.nbytes}
    step = names + names[::-1]
    first = {name: names.index(name) for name in frozen}
    # Two steps are simulated. The first step begins with nothing in memory. The second step is like all later steps, so
    # only its reads are counted.
    uses = step * 2
    following: list[float] = [math.inf] * len(uses)
    seen: dict[str, int] = {}
    for at in range(len(uses) - 1, -1, -1):
        name = uses[at]
        if name in frozen:
            # After its last use in the simulation, a frozen unit is used next in the third step.
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
