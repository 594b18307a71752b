"""Gives a new store its first values: from the model, from `weights=`, or by initialisation; commits buffers."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from memascend.checkpoint.files import BufferPlace, Names, each_buffer
from memascend.checkpoint.weights import WeightFiles
from memascend.errors import ConfigError
from memascend.optim.shared import options_of
from memascend.params.offloaded_param import dense_strides
from memascend.plan.units import find_units
from memascend.storage import Record, checksum_of
from memascend.tensors import laid_out, same_bits
from memascend.text import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    from memascend.checkpoint.weights import Weights
    from memascend.distributed.rows import Partition
    from memascend.plan.units import Unit
    from memascend.session.decide import Subject
    from memascend.storage import Engine, Store

    # A parameter's name, values as they are stored, the optimizer's state, what there is, and how many updates made it.
    First = tuple[str, torch.Tensor, dict[str, torch.Tensor], int]


# Parents initialise the parameters in these.
_LISTS = (torch.nn.ParameterList, torch.nn.ParameterDict)


def unwritten(like: torch.Tensor) -> torch.Tensor:
    """A tensor on the CPU with the shape and dtype of one on meta, marked so that `is_written` finds unset elements."""
    fill = float("nan") if like.dtype.is_floating_point or like.dtype.is_complex else 0
    with torch.inference_mode(mode=False):
        return torch.full(like.shape, fill, dtype=like.dtype, device="cpu")


def is_written(tensor: torch.Tensor) -> bool:
    """Whether every element of a tensor from `unwritten` was set, as far as that can be detected."""
    if tensor.numel() == 0:
        return True
    if tensor.dtype.is_floating_point and tensor.element_size() > 1:
        # `min` propagates a NaN, and needs no temporary.
        return not bool(tensor.detach().min().isnan())
    return tensor._version > 0  # noqa: SLF001


class Initialiser:
    """Initialises the modules of a model with its own code, in the order in which they are built."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._order: list[torch.nn.Module] = []
        self._init: dict[int, Callable[[torch.nn.Module], object] | None] = {}
        self._walk(model, None)

    def _walk(self, module: torch.nn.Module, init: Callable[[torch.nn.Module], object] | None) -> None:
        if id(module) in self._init:
            return
        own = getattr(module, "_init_weights", None)
        init = own if _takes_one(own) else init
        self._init[id(module)] = init
        for child in module.children():
            self._walk(child, init)
        self._order.append(module)

    # --- buffers ------------------------------------------------------------------------------

    def buffers_of(self, module: torch.nn.Module, made: Sequence[torch.Tensor]) -> None:
        """Let a module compute the buffers in `made`; its other real tensors keep their values."""
        with torch.no_grad(), _spared(module, set(map(id, made))):
            self._initialise(module, made)

    def _initialise(self, module: torch.nn.Module, made: Sequence[torch.Tensor]) -> None:
        init = self._init[id(module)]
        if init is not None:
            init(module)
        if made and not all(map(is_written, made)):
            for name in ("reset_parameters", "_reset_parameters"):
                reset = getattr(module, name, None)
                if callable(reset):
                    reset()
                    return

    # --- parameters ---------------------------------------------------------------------------

    def parameters(
        self, units: Sequence[Unit], named: Mapping[str, torch.nn.Parameter]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Initialise the parameters on meta, at most one unit or so at a time, from torch's default generator.

        Yields name and values of each that was on meta. The parameter itself is on meta again by then.
        """
        walk = _Walk(self._model, units, {name: named[name] for unit in units for name in unit.parameters})
        versions = {name: p._version for name, p in named.items() if not p.is_meta}  # noqa: SLF001
        try:
            for module in self._order:
                if isinstance(module, _LISTS):
                    continue
                made = walk.begin(module)
                # Code of a module may write to real parameters below it.
                if made or (walk.real_ids and any(id(p) in walk.real_ids for p in module.parameters())):
                    with torch.no_grad(), _spared(module, walk.real_ids):
                        self._initialise(module, made)
                yield from walk.ended(module)
        finally:
            walk.put_back()
        changed = [name for name, version in versions.items() if named[name]._version != version]  # noqa: SLF001
        if changed:
            raise ConfigError(
                f"initialising the parameters on meta wrote to {changed[0]}, which has values of its own, and they "
                "would be lost: make the whole model on meta, or give weights="
            )


class _Walk:
    """Makes parameters on meta real while their modules are initialised, those of a few modules at a time."""

    def __init__(self, model: torch.nn.Module, units: Sequence[Unit], named: Mapping[str, torch.nn.Parameter]) -> None:
        self._modules: dict[str, torch.nn.Module] = dict(model.named_modules())
        self._name = {id(parameter): name for name, parameter in named.items() if parameter.is_meta}
        self._sizes = dict.fromkeys(self._modules, 0)
        for name, one in named.items():
            owner = name
            while owner:
                owner = owner.rpartition(".")[0]
                if owner in self._sizes:
                    self._sizes[owner] += one.nbytes
        self._limit = max(unit.nbytes for unit in units)
        # These are all over the model.
        self._late = {name for unit in units if unit.pinned for name in unit.parameters}
        # Every place of a tied parameter.
        self._places: dict[int, list[tuple[torch.nn.Module, str]]] = {}
        for module in self._modules.values():
            for short, parameter in module._parameters.items():  # noqa: SLF001
                if parameter is not None:
                    self._places.setdefault(id(parameter), []).append((module, short))
        # By the module whose end they wait for: names, parameters on meta, and the real ones in their places.
        self._open: dict[int, list[tuple[str, torch.nn.Parameter, torch.nn.Parameter]]] = {}
        self.real_ids: set[int] = set()

    def begin(self, module: torch.nn.Module) -> list[torch.Tensor]:
        made: list[torch.Tensor] = []
        for owner in (module, *(child for child in module.children() if isinstance(child, _LISTS))):
            for parameter in owner._parameters.values():  # noqa: SLF001
                name = self._name.pop(id(parameter), None)
                if parameter is None or name is None:
                    continue
                real = torch.nn.Parameter(unwritten(parameter), requires_grad=parameter.requires_grad)
                self._open.setdefault(id(self._last(name)), []).append((name, parameter, real))
                self.real_ids.add(id(real))
                self._place(parameter, real)
                made.append(real)
        return made

    def _last(self, name: str) -> torch.nn.Module:
        """The module whose end a parameter waits for, since its code may write to it, too: none larger than a unit."""
        last = "" if name in self._late else name.rpartition(".")[0]
        while last:
            parent = last.rpartition(".")[0]
            # A list is not initialised by itself.
            if self._sizes[parent] > self._limit and not isinstance(self._modules[last], _LISTS):
                break
            last = parent
        return self._modules[last]

    def _place(self, parameter: torch.nn.Parameter, stands: torch.nn.Parameter) -> None:
        for module, short in self._places[id(parameter)]:
            module._parameters[short] = stands  # noqa: SLF001

    def ended(self, module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """The parameters that waited for the end of a module."""
        made = self._open.get(id(module), [])
        unknown = [name for name, _, real in made if not is_written(real)]
        if unknown:
            raise ConfigError(
                f"nothing initialises {listed(unknown)}: they are on meta, and their modules "
                "have no reset_parameters() and the model no _init_weights(module) that writes them; give weights="
            )
        # Those that are not handed on, where the caller fails meanwhile, are put back.
        while made:
            name, parameter, real = made.pop(0)
            self._place(parameter, parameter)
            self.real_ids.discard(id(real))
            yield name, real.detach()
            del real

    def put_back(self) -> None:
        for made in self._open.values():
            for _, parameter, _ in made:
                self._place(parameter, parameter)
        self._open.clear()


@contextlib.contextmanager
def _spared(module: torch.nn.Module, ours: set[int]) -> Iterator[None]:
    """Put copies in place of a module's real tensors, except `ours`, so that the originals keep their values."""
    spared: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    parameters: dict[str, Any] = module._parameters  # noqa: SLF001
    buffers: dict[str, Any] = module._buffers  # noqa: SLF001
    for table in (parameters, buffers):
        for short, tensor in table.items():
            if tensor is not None and not tensor.is_meta and id(tensor) not in ours:
                spared.append((table, short, tensor))
                copy = tensor.detach().clone()
                table[short] = torch.nn.Parameter(copy, tensor.requires_grad) if table is parameters else copy
    try:
        yield
    finally:
        for table, short, tensor in spared:
            table[short] = tensor


def _takes_one(function: object) -> bool:
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(None)
    except (TypeError, ValueError):
        return False
    return True


def require_plain(named: Mapping[str, torch.nn.Parameter]) -> None:
    """Reject parameters on meta that cannot be made real in place."""
    for name, parameter in named.items():
        if parameter.is_meta and weakref.getweakrefs(parameter):
            raise ConfigError(
                f"{name} is on meta, and a weak reference to it exists, which would not follow it to its values: call "
                "offload() before the code that made the reference"
            )
        used: Any = parameter
        if parameter.is_meta and (parameter.grad is not None or used._use_count() > 1):  # noqa: SLF001
            raise ConfigError(
                f"{name} is on meta and has a gradient, or is part of a graph: call zero_grad() and drop what was "
                "computed before offload()"
            )


def embody(parameter: torch.nn.Parameter, values: torch.Tensor) -> None:
    """Move a parameter on meta to the CPU, with `values`; module and optimizer keep the same object."""
    # `.data` has a version counter of its own: many parameters may share the memory of `values`.
    other = torch.nn.Parameter(values.data, requires_grad=parameter.requires_grad)
    other.__class__ = parameter.__class__
    other.__dict__.update(parameter.__dict__)
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(parameter, hooks, None) is not None:
            setattr(other, hooks, getattr(parameter, hooks))
    swap: Any = torch.utils.swap_tensors
    swap(parameter, other)


class MetaBuffers:
    """The buffers of a model that are on meta: made real before there is a store, and meta again where that fails."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        # By the tensor on meta: its places, itself, and the tensor that is made of it.
        self._places: dict[int, list[BufferPlace]] = {}
        self._old: dict[int, torch.Tensor] = {}
        self._new: dict[int, torch.Tensor] = {}
        for place, tensor in each_buffer(model):
            if tensor.is_meta:
                self._places.setdefault(id(tensor), []).append(place)
                self._old[id(tensor)] = tensor

    @property
    def saved(self) -> dict[str, torch.Tensor]:
        """Those that a state dict has, by their first names."""
        names = {key: [place.name for place in places if place.is_saved] for key, places in self._places.items()}
        return {named[0]: self._old[key] for key, named in names.items() if named}

    def install(self) -> None:
        """Put tensors on the CPU in their places, marked as not written."""
        self._new.update({key: unwritten(old) for key, old in self._old.items()})
        self._put(self._new)

    def uninstall(self) -> None:
        """Put the buffers on meta back."""
        self._put(self._old)

    def _put(self, tensors: Mapping[int, torch.Tensor]) -> None:
        for key, places in self._places.items():
            for place in places:
                place.put(tensors[key])

    def rebuild(self, weights: Weights | None, *, saved: bool) -> None:
        """Let the modules compute buffers that are not saved, and with `saved` all. Others come from `weights`."""
        asked = {key: places for key, places in self._places.items() if saved or not any(p.is_saved for p in places)}
        modules = {id(place.module): place.module for places in asked.values() for place in places}
        initialiser = Initialiser(self._model)
        with torch.random.fork_rng(devices=[]):
            for module in modules.values():
                made = [self._new[key] for key, places in asked.items() if any(p.module is module for p in places)]
                initialiser.buffers_of(module, made)
        lost = []
        for key, places in asked.items():
            new, name = self._new[key], places[0].name
            if is_written(new):
                continue
            if weights is not None and weights.has(name):
                new.copy_(weights.tensor(name, self._old[key]))
            else:
                lost.append(name)
        if lost:
            raise ConfigError(
                f"the values of these buffers are not known: {', '.join(lost)}. They are on meta, no weights have "
                "them, and no reset_parameters() or _init_weights() of the modules computes them; register them "
                "outside of torch.device('meta'), or give weights= a function that returns them"
            )
        self._require_no_others()

    def _require_no_others(self) -> None:
        for prefix, module in self._model.named_modules():
            for name, value in module.__dict__.items():
                if isinstance(value, torch.Tensor) and value.is_meta:
                    raise ConfigError(
                        f"{f'{prefix}.' if prefix else ''}{name} is a tensor on meta, and neither a parameter nor "
                        "a buffer; make it on the CPU"
                    )


@dataclass(eq=False)
class ModelValues:
    """First values from model and optimizer; parameters on meta come from `weights` or their initialisation."""

    subject: Subject
    weights: Weights | None
    meta_buffers: Mapping[str, torch.Tensor]  # the persistent buffers that were on meta
    partition: Partition  # says which rows of the model's parameters the subject's are, if ranks share them
    step = 0
    user_state = None

    def check(self) -> None:
        """Match names, shapes and dtypes with the weights; a function gives them when it is called."""
        if isinstance(self.weights, WeightFiles):
            wanted = {name: self.partition.whole(name, p) for name, p in self.subject.named.items() if p.is_meta}
            self.weights.check(Names(self.subject.model), {**wanted, **self.meta_buffers})

    def hyperparameters(self) -> dict[str, Any]:
        """The optimizer's own."""
        return {"groups": [options_of(group) for group in self.subject.original.param_groups], "loss_scale": None}

    def parameters(self, units: Sequence[Unit]) -> Generator[First, None, None]:
        """First the parameters that are initialised from meta, then the others in the order of the units."""
        subject = self.subject
        if self.weights is None and any(p.is_meta for p in subject.named.values()):
            yield from self._initialised(units)
        for unit in units:
            for name in unit.parameters:
                parameter = subject.named[name]
                if not parameter.is_meta:
                    state, step = subject.arithmetic.of(parameter).initial() if name in subject.trained else ({}, 0)
                    values = parameter.detach().cpu()
                    yield name, laid_out(values, dense_strides(values)), state, step
                elif self.weights is not None:
                    whole = self.weights.tensor(name, self.partition.whole(name, parameter))
                    yield name, laid_out(self.partition.part(name, whole), dense_strides(parameter)), {}, 0

    def _initialised(self, units: Sequence[Unit]) -> Iterator[First]:
        """Parameters on meta, initialised by the model's own code, which makes whole parameters."""
        whole = self.subject.named
        if self.subject.sharding is not None:
            units, whole = find_units(self.subject.model), self.subject.sharding.leaves
        for name, values in Initialiser(self.subject.model).parameters(units, whole):
            if name in self.subject.named:
                part = self.partition.part(name, values)
                yield name, laid_out(part, dense_strides(self.subject.named[name])), {}, 0

    def buffer(self, name: str, tensor: torch.Tensor) -> None:
        """From the weights, where it was on meta and was not initialised."""
        if self.weights is not None and name in self.meta_buffers:
            tensor.copy_(self.weights.tensor(name, self.meta_buffers[name]))


# Up to this many bytes in all, buffers are written with every step. Above, a buffer is written only if it changed.
_ALWAYS_BYTES_MAX = 1 << 20


class Buffers:
    """The persistent buffers of a model."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._places = {place.name: place for place in persistent_buffers(model)}
        # Checksums of committed values. Version counters would miss writes through `.data` (a codebook's).
        self._seen: dict[str, str] = {}
        self._staged: dict[str, str] = {}
        # A forward of a step that is not committed has run, and may have changed them.
        self.may_be_of_step = False
        self._kinds = {name: (self.target(name).dtype, self.target(name).shape) for name in self._places}
        self._always = sum(self.target(name).nbytes for name in self._places) <= _ALWAYS_BYTES_MAX

    @property
    def names(self) -> list[str]:
        """As `state_dict()` names them. If the model drops a buffer, storage keeps its last committed values."""
        return [name for name, place in self._places.items() if place.tensor is not None]

    def records(self) -> list[Record]:
        """How the store knows them."""
        return [
            Record(name=name, values=self.target(name), state={}, unit="buffers", buffer=True) for name in self.names
        ]

    def tensor(self, name: str) -> torch.Tensor:
        """A buffer's values, contiguous in host memory."""
        return self.target(name).cpu().contiguous()

    def target(self, name: str) -> torch.Tensor:
        """A buffer itself, to write to."""
        tensor = self._places[name].tensor
        assert tensor is not None, f"the model has dropped {name!r}"
        return tensor.detach()

    def restore(self, store: Store) -> None:
        """Take the values that the store holds."""
        for name in self.names:
            values, _ = store.read(name)
            self.target(name).copy_(values)

    def require_same_kinds(self) -> None:
        """Before a step or a save: reject buffers whose shape or dtype changed."""
        for name in self.names:
            now, (dtype, shape) = self.target(name), self._kinds[name]
            if (now.dtype, now.shape) != (dtype, shape):
                raise ConfigError(
                    f"buffer {name!r} is {now.dtype} of shape {list(now.shape)}, and was {dtype} of {list(shape)} when "
                    "the model was offloaded, which its store keeps: set it back, and call this again. A buffer that "
                    "changes its shape is registered with persistent=False before offload(), or is a plain attribute"
                )

    def differ(self, store: Store) -> bool:
        """Whether any has other values than the store's last commit."""
        self.require_same_kinds()
        return any(not same_bits(self.tensor(name), store.read(name)[0].contiguous()) for name in self.names)

    def stage(self, engine: Engine, step: int) -> None:
        """Stage the buffers that changed; what a step that was interrupted has staged goes."""
        self.unstage(engine)
        for name in self.names:
            values = self.tensor(name)
            now = "" if self._always else checksum_of(values)
            if self._always or self._seen.get(name) != now:
                engine.discard(name)
                engine.fill(name, values, step=step)
                self._staged[name] = now

    def unstage(self, engine: Engine) -> None:
        """Discard the staged buffers."""
        for name in self._staged:
            engine.discard(name)
        self._staged = {}

    def committed(self) -> None:
        """Note that the staged buffers were committed."""
        self._seen.update(self._staged)
        self._staged = {}
        self.may_be_of_step = False


def persistent_buffers(model: torch.nn.Module) -> list[BufferPlace]:
    """The first place of each persistent buffer."""
    found: dict[int, BufferPlace] = {}
    for place, tensor in each_buffer(model):
        if place.is_saved:
            found.setdefault(id(tensor), place)
    return [*found.values()]


def move_buffers(model: torch.nn.Module, device: torch.device) -> None:
    """Move all buffers of a model, persistent or not, to a device; if one fails, none is moved."""
    found = list(each_buffer(model))
    tensors = {id(tensor): tensor for _, tensor in found}
    moved = {key: tensor.to(device) for key, tensor in tensors.items()}
    for place, tensor in found:
        place.put(moved[id(tensor)])
