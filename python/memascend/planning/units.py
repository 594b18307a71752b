"""Groups a model's parameters into units that are read together: embeddings, blocks, the head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from memascend.errors import ConfigError
from memascend.planning.module_tree import ModuleTree, UnitDraft
from memascend.planning.ties import note_ties

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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
            "units names modules of the model, as model.named_modules() gives them, and not "
            f"{', '.join(map(repr, unknown))}"
        )
    for name in names:
        if not tree.below(name):
            raise ConfigError(
                f"units names {name!r}, which has no parameters, or only such as are tied to earlier ones"
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
                raise ConfigError(f"units names {other!r} and {name!r}, and a parameter travels in one unit only")
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
            packed.parameters += part.parameters
            packed.module = None
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
        piece.name = piece.name or "root"
        # A module may be called "root" or "rest".
        while piece.name in taken:
            piece.name += "'"
        taken.add(piece.name)
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
