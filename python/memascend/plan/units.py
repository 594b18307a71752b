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


# Containers of torch that a forward never calls.
_UNCALLED = ("ModuleList", "ModuleDict", "ParameterList", "ParameterDict")


def _is_one_of(module: nn.Module | Outline, *containers: str) -> bool:
    """True if the module is one of these containers of torch, given by their class names."""
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
    """A unit while it is built; `Unit` describes the fields."""

    name: str
    parameters: list[str]
    nbytes: int  # without padding
    module: str | None
    pinned: bool = False
    # Dicts are used as ordered sets.
    again: dict[str, None] = field(default_factory=dict)
    around: dict[str, None] = field(default_factory=dict)
    around_again: dict[str, None] = field(default_factory=dict)

    def take_in(self, other: UnitDraft) -> None:
        """Adds the parameters of another draft; afterwards no single module's call materializes the whole unit."""
        self.parameters += other.parameters
        self.nbytes += other.nbytes
        self.module = None

    def take_name(self, taken: set[str]) -> None:
        """Makes the draft's name unique: a user's module may be called "root" or "rest", as special drafts are."""
        self.name = self.name or "root"
        while self.name in taken:
            self.name += "'"
        taken.add(self.name)


class ModuleTree:
    """The modules and parameters of a model by name; a shared module or parameter has only the first of its names."""

    def __init__(self, model: nn.Module | Outline) -> None:
        self.model = model
        self.modules: dict[str, Any] = dict(model.named_modules())
        self.parameters: dict[str, Any] = dict(model.named_parameters())
        if not self.parameters:
            raise ConfigError("the model has no parameters, so there is nothing to offload: pass a model that has some")
        if lazy := _lazy(model):
            raise ConfigError(f"the shape of {lazy[0]!r} is not known yet: run one forward before offload()")
        self.raw = {name: parameter.numel() * parameter.dtype.itemsize for name, parameter in self.parameters.items()}
        owners: Counter[str] = Counter()
        for name, nbytes in self.raw.items():
            owners[self.owner(name)] += nbytes
        # A module's call materializes all parameters that the module owns, so the arena needs at least the bytes of the
        # module that owns most.
        self.largest_owner = max(owners.values())
        self.claimed: set[str] = set()
        # The parameters inside each module; one pass over the names fills the table for all modules.
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
        """Returns the name of the module that directly contains a parameter or module."""
        return parameter.rpartition(".")[0]

    def below(self, module: str) -> list[str]:
        """Returns the parameters inside a module, except parameters that a draft has claimed."""
        return [name for name in self.under[module] if name not in self.claimed]

    def children(self, module: str) -> Iterator[str]:
        """Yields the children of a module that are not registered earlier in the tree."""
        prefix = f"{module}." if module else ""
        for name, _ in self.modules[module].named_children():
            # `modules` has a shared child only by its first name.
            if prefix + name in self.modules:
                yield prefix + name

    def draft(self, module: str, parameters: list[str]) -> UnitDraft:
        """Returns a unit of parameters inside a module; its `module` is None if a forward never calls that module."""
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
    """Records in the drafts where tied parameters are used again, and which other units are materialized at each use.

    A second use of a tied parameter is assumed to follow the unit whose parameters are registered just before it.
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

    With micro-batches by layer, each micro-batch keeps its own gradient of such a parameter between two uses.
    """
    named = model.named_parameters(remove_duplicate=False)
    times = Counter(parameter for _, parameter in named if parameter.requires_grad)
    return sum(parameter.nbytes for parameter, count in times.items() if count > 1)


def _bound_in(
    tree: ModuleTree, drafts: Sequence[UnitDraft], unit_of: Mapping[int, UnitDraft]
) -> Callable[[str], Iterable[UnitDraft]]:
    """Returns a function from the name of a module to the units that are materialized while the module computes."""
    # `own` has modules by id, since a shared module has several names.
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


# Blocks with more bytes than this are divided. If one module owns more, its bytes are the limit instead, since its
# parameters need a slot of that size anyway.
_BOUND_BYTES = 1 << 30
# Leftovers, the parameters outside of blocks, are pinned if each has at most 1/16 of the bytes of the largest block,
# and all of them together have at most 1/4.
_SMALL_PART = 16
_REST_PART = 4


@dataclass(frozen=True)
class Unit:
    """The parameters that are read and evicted together."""

    name: str  # unique; the name of the module whose parameters the unit has, if it is one module
    parameters: tuple[str, ...]  # names as in `model.named_parameters()`, each tied parameter once
    nbytes: int  # bytes of all values, each parameter padded to whole pages
    # The module whose call materializes the whole unit; None: calls of several modules each materialize a part.
    module: str | None
    pinned: bool  # True for a small unit that is in use while other units are: it is never evicted
    # The units after which this unit is used again, since it has tied parameters: an embedding that is also the LM head
    # is used again after the last block.
    again: tuple[str, ...] = ()
    # Other units that are materialized at the first use of this unit: the parameters of an outer module stay
    # materialized until its call returns, while inner modules compute.
    around: tuple[str, ...] = ()
    around_again: tuple[str, ...] = ()  # other units that are materialized at later uses of this unit
    frozen_bytes: int = 0  # the part of `nbytes` that no step changes
    elements: int = 0  # the number of elements of all parameters


def find_units(
    model: nn.Module | Outline, *, units: Sequence[str] | None = None, bytes_max: int | None = None
) -> tuple[Unit, ...]:
    """Groups the parameters of `model` into units, in the order of the forward that the module tree suggests.

    Each repeated block is a unit, and so is each embedding, LM head and other large module. Small leftovers (a final
    norm, a class token) are one pinned unit, "rest". Blocks larger than `bytes_max` (1 GiB) are divided by module;
    parameters that a single module owns stay together, since one call needs them all. Each module named in `units` is
    one unit, whatever its size.
    """
    tree = ModuleTree(model)
    bound = max(_BOUND_BYTES, tree.largest_owner) if bytes_max is None else bytes_max
    drafts = [tree.draft(name, tree.below(name)) for name in _checked(tree, units or ())]
    tree.claim(drafts)
    blocks = list(_blocks(tree, ""))
    tree.claim(blocks)
    # A module outside of blocks stays whole if it is no larger than a block.
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
    """Returns the names in the option `units`.

    Raises:
        ConfigError: the model has no module of a name; or the module has no parameters, or only parameters that are
            tied to earlier ones; or one named module contains another.
    """
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
            if not (name and other) or f"{name}.".startswith(f"{other}.") or f"{other}.".startswith(f"{name}."):
                raise ConfigError(
                    f"units names {other!r} and {name!r}, which share parameters, and each is read with one unit: name "
                    "one of the two"
                )
    return names


def _blocks(tree: ModuleTree, module: str) -> Iterator[UnitDraft]:
    """Yields the repeated blocks: similar children of a module list or Sequential, the outermost if several nest."""
    children = [child for child in tree.children(module) if tree.below(child)]
    repeated: set[str] = set()
    kind = tree.modules[module]
    if _is_one_of(kind, "ModuleList") and len(children) == 1:
        # A model of one layer, or with one group of shared layers, has a list of one block.
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

    All children of a class are repeated blocks if two of them have the same parameter shapes, or if one child has all
    shapes of another child and more, as among T5's blocks.
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
    """Yields drafts of the parameters outside of blocks.

    A module of at most `limit` bytes is one draft; of a larger module, the parameters that it owns directly are one.
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
    """Returns the smallest leftovers, for the pinned unit: each at most 1/16 of `limit` bytes, all at most 1/4."""
    found, total = [], 0
    for draft in sorted(leftovers, key=lambda draft: draft.nbytes):
        total += draft.nbytes
        if draft.nbytes * _SMALL_PART > limit or total * _REST_PART > limit:
            break
        found.append(draft)
    return found


def _divided(tree: ModuleTree, draft: UnitDraft, bound: int) -> list[UnitDraft]:
    """Returns the draft alone, or its parts if it has more than `bound` bytes; small parts are put together."""
    if draft.nbytes <= bound:
        return [draft]
    parts: list[UnitDraft] = []
    packed: UnitDraft | None = None
    for part in _parts(tree, draft, bound):
        if part.nbytes * _SMALL_PART > bound:
            parts.append(part)
        elif packed is not None and (packed.nbytes + part.nbytes) * _REST_PART <= bound:
            # Norms, or many small experts, are put together: each is too small for a read of its own.
            packed.take_in(part)
        else:
            packed = part
            parts.append(part)
    return parts


def _parts(tree: ModuleTree, draft: UnitDraft, bound: int) -> Iterator[UnitDraft]:
    """Divides the draft by module into drafts of at most `bound` bytes; the parameters of one owner stay together."""
    # A draft above the bound has the name of a module: it is the whole module, or the parameters that the module owns.
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
    """Returns the parameters of the LM head; None if `get_output_embeddings()` gives none."""
    ask = getattr(tree.model, "get_output_embeddings", None)
    try:
        module = ask() if callable(ask) else None
    except NotImplementedError:
        return None
    return next((tree.under[name] for name, found in tree.modules.items() if found is module), None)


def forward_order(units: Sequence[Unit]) -> list[Unit]:
    """Returns the unpinned units in the order of a forward, tied ones more than once; a backward reverses the order."""
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
    """Returns the sets of units, by name, that are in memory at once with windows of `length` units.

    Pinned units are in each set. The windows of one forward are all windows of a run: a backward has the same, and a
    step begins with the unit with which the previous step ended.
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

    Evictions choose the unit whose next use is farthest away, and a commit invalidates trained units. `order` is the
    order of the forward.
    """
    names = [unit.name for unit in order]
    frozen = {unit.name for unit in order if unit.frozen_bytes >= unit.nbytes}
    step = names + names[::-1]
    first = {name: names.index(name) for name in frozen}
    # Two steps are simulated: the first begins with nothing in memory, and the second is like all later steps.
    uses = step * 2
    following: list[float] = [math.inf] * len(uses)
    seen: dict[str, int] = {}
    for at in range(len(uses) - 1, -1, -1):
        name = uses[at]
        if name in frozen:
            # After the last simulated use, the next use of a frozen unit is in the following step.
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
