"""Supplies the first values of a new store: from the model, from `weights=`, or by initialisation. Stages buffers."""

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

    # A parameter's name, its values in the stored layout, its optimizer state (may be empty), and its number of
    # updates.
    First = tuple[str, torch.Tensor, dict[str, torch.Tensor], int]


# Containers of parameters. The parent module of such a container initialises the parameters.
_LISTS = (torch.nn.ParameterList, torch.nn.ParameterDict)


def unwritten(like: torch.Tensor) -> torch.Tensor:
    """Returns a CPU tensor with the shape and dtype of `like`.

    Fills the tensor so that `is_written()` can later detect whether the elements were set.
    """
    fill = float("nan") if like.dtype.is_floating_point or like.dtype.is_complex else 0
    with torch.inference_mode(mode=False):
        return torch.full(like.shape, fill, dtype=like.dtype, device="cpu")


def is_written(tensor: torch.Tensor) -> bool:
    """True if all elements of `tensor` have been set since `unwritten()` made it, as far as this can be detected.

    For floats of 16 bits or more, checks that no element is NaN. For other dtypes, checks that an in-place operation
    has written to the tensor.
    """
    if tensor.numel() == 0:
        return True
    if tensor.dtype.is_floating_point and tensor.element_size() > 1:
        # `min` returns NaN if an element is NaN, and needs no temporary tensor.
        return not bool(tensor.detach().min().isnan())
    return tensor._version > 0  # noqa: SLF001


class Initialiser:
    """Initialises the modules of a model with the model's own code. Children come before their parent."""

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
        """Makes `module` compute the buffers `made`. All other real tensors of `module` keep their values."""
        with torch.no_grad(), _spared(module, set(map(id, made))):
            self._initialise(module, made)

    def _initialise(self, module: torch.nn.Module, made: Sequence[torch.Tensor]) -> None:
        """Calls `_init_weights(module)`, if `module` or a module that contains it has this method.

        If elements of `made` are still unset, also calls the module's reset_parameters() or _reset_parameters().
        """
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
        """Initialises the parameters on meta, about one unit at a time, with torch's default generator.

        Yields the name and the values of each of these parameters. Before each yield, puts the parameter on meta back
        into the model.

        Raises:
            ConfigError: no code initialises a parameter, or the initialisation wrote to a parameter that is not on
                meta.
        """
        walk = _Walk(self._model, units, {name: named[name] for unit in units for name in unit.parameters})
        versions = {name: p._version for name, p in named.items() if not p.is_meta}  # noqa: SLF001
        try:
            for module in self._order:
                if isinstance(module, _LISTS):
                    continue
                made = walk.begin(module)
                # Also call the module's code if this code may write to real parameters of submodules.
                if made or (walk.real_ids and any(id(p) in walk.real_ids for p in module.parameters())):
                    with torch.no_grad(), _spared(module, walk.real_ids):
                        self._initialise(module, made)
                yield from walk.ended(module)
        finally:
            walk.put_back()
        changed = [name for name, version in versions.items() if named[name]._version != version]  # noqa: SLF001
        if changed:
            raise ConfigError(
                f"the initialisation of the parameters on meta also overwrote {changed[0]}, which is not on meta and "
                "already had values. Make the whole model on meta, or pass weights="
            )


class _Walk:
    """Replaces parameters on meta by real parameters while their modules are initialised, a few modules at a time."""

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
        # Parameters of pinned units are spread over the model, so they stay real until the whole model is initialised.
        self._late = {name for unit in units if unit.pinned for name in unit.parameters}
        # Id of a parameter -> its places. A place is a module and the parameter's name in this module. A tied parameter
        # has several places.
        self._places: dict[int, list[tuple[torch.nn.Module, str]]] = {}
        for module in self._modules.values():
            for short, parameter in module._parameters.items():  # noqa: SLF001
                if parameter is not None:
                    self._places.setdefault(id(parameter), []).append((module, short))
        # Id of a module -> the parameters that are yielded after this module. Each entry has the parameter's name, the
        # parameter on meta, and the real parameter that replaces the parameter on meta.
        self._open: dict[int, list[tuple[str, torch.nn.Parameter, torch.nn.Parameter]]] = {}
        self.real_ids: set[int] = set()

    def begin(self, module: torch.nn.Module) -> list[torch.Tensor]:
        """Replaces the parameters on meta of a module and of its parameter lists by real parameters.

        Returns the real parameters.
        """
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
        """Returns the module after whose initialisation the values of a parameter count as final.

        A parent module may write to parameters of its children. So the result is the outermost module that contains the
        parameter and is at most as large as the largest unit. If the parameter's own module is larger, the result is
        this module. For a parameter of a pinned unit, the result is the model.
        """
        last = "" if name in self._late else name.rpartition(".")[0]
        while last:
            parent = last.rpartition(".")[0]
            # The parent of a parameter list initialises the list, so continue with the parent.
            if self._sizes[parent] > self._limit and not isinstance(self._modules[last], _LISTS):
                break
            last = parent
        return self._modules[last]

    def _place(self, parameter: torch.nn.Parameter, stands: torch.nn.Parameter) -> None:
        """Puts the parameter `stands` at all places of `parameter`."""
        for module, short in self._places[id(parameter)]:
            module._parameters[short] = stands  # noqa: SLF001

    def ended(self, module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the name and values of each parameter whose values are final once `module` is initialised.

        Before each yield, puts the parameter on meta back into the model.
        """
        made = self._open.get(id(module), [])
        unknown = [name for name, _, real in made if not is_written(real)]
        if unknown:
            raise ConfigError(
                f"no code initialises these parameters on meta: {listed(unknown)}. No reset_parameters() of the module "
                "and no _init_weights(module) of the model sets all of their values. Pass weights="
            )
        # Pop one at a time: if the caller stops the iteration, put_back() restores the rest.
        while made:
            name, parameter, real = made.pop(0)
            self._place(parameter, parameter)
            self.real_ids.discard(id(real))
            yield name, real.detach()
            del real

    def put_back(self) -> None:
        """Puts parameters on meta back into the model: all parameters that `ended()` has not yielded."""
        for made in self._open.values():
            for _, parameter, _ in made:
                self._place(parameter, parameter)
        self._open.clear()


@contextlib.contextmanager
def _spared(module: torch.nn.Module, ours: set[int]) -> Iterator[None]:
    """Replaces a module's real tensors by copies during the block, so that the originals keep their values.

    `ours`: the ids of tensors that the block may change. These tensors are not replaced.
    """
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
    """True if `function` can be called with one argument."""
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(None)
    except (TypeError, ValueError):
        return False
    return True


def require_plain(named: Mapping[str, torch.nn.Parameter]) -> None:
    """Rejects parameters on meta to which `materialize_parameter()` cannot give values in place."""
    for name, parameter in named.items():
        if parameter.is_meta and weakref.getweakrefs(parameter):
            raise ConfigError(
                f"{name} is on meta and has a weak reference, so offload() cannot give values to this parameter. Call "
                "offload() before the code that makes the weak reference"
            )
        used: Any = parameter
        if parameter.is_meta and (parameter.grad is not None or used._use_count() > 1):  # noqa: SLF001
            raise ConfigError(
                f"{name} is on meta, and has a gradient or belongs to an autograd graph. Call zero_grad() and delete "
                "all results of the model before you call offload()"
            )


def materialize_parameter(parameter: torch.nn.Parameter, values: torch.Tensor) -> None:
    """Gives `values` to a parameter on meta. Module and optimizer keep the same parameter object."""
    # Use `.data` to get a separate version counter: other parameters may share the memory of `values`.
    other = torch.nn.Parameter(values.data, requires_grad=parameter.requires_grad)
    other.__class__ = parameter.__class__
    other.__dict__.update(parameter.__dict__)
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(parameter, hooks, None) is not None:
            setattr(other, hooks, getattr(parameter, hooks))
    swap: Any = torch.utils.swap_tensors
    swap(parameter, other)


class MetaBuffers:
    """Replaces a model's buffers on meta by real buffers.

    `uninstall()` puts the old buffers back.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        # The key of each dict is the id of a buffer on meta. `_places` has the buffer's places, `_old` the buffer
        # itself, and `_new` the real tensor that replaces the buffer.
        self._places: dict[int, list[BufferPlace]] = {}
        self._old: dict[int, torch.Tensor] = {}
        self._new: dict[int, torch.Tensor] = {}
        for place, tensor in each_buffer(model):
            if tensor.is_meta:
                self._places.setdefault(id(tensor), []).append(place)
                self._old[id(tensor)] = tensor

    @property
    def saved(self) -> dict[str, torch.Tensor]:
        """The persistent buffers on meta, each by its first name."""
        names = {key: [place.name for place in places if place.is_saved] for key, places in self._places.items()}
        return {named[0]: self._old[key] for key, named in names.items() if named}

    def install(self) -> None:
        """Replaces the buffers on meta by `unwritten()` CPU tensors."""
        self._new.update({key: unwritten(old) for key, old in self._old.items()})
        self._put(self._new)

    def uninstall(self) -> None:
        """Puts the buffers on meta back into the model."""
        self._put(self._old)

    def _put(self, tensors: Mapping[int, torch.Tensor]) -> None:
        for key, places in self._places.items():
            for place in places:
                place.put(tensors[key])

    def rebuild(self, weights: Weights | None, *, saved: bool) -> None:
        """Computes the non-persistent buffers that were on meta, with the code of their modules.

        With `saved`, also computes the persistent buffers that were on meta.

        If a module does not compute one of its buffers, copies the buffer's values from `weights`.

        Raises:
            ConfigError: neither a module nor `weights` supplies the values of a buffer, the values in `weights` do not
                fit the buffer, or a module has a tensor on meta that is neither a parameter nor a buffer.
        """
        asked = {key: places for key, places in self._places.items() if saved or not any(p.is_saved for p in places)}
        modules = {id(place.module): place.module for places in asked.values() for place in places}
        initialiser = Initialiser(self._model)
        with torch.random.fork_rng(devices=[]):
            for module in modules.values():
                made = [self._new[key] for key, places in asked.items() if any(p.module is module for p in places)]
                initialiser.buffers_of(module, made)
        lost = []
        unwritten = {key: places for key, places in asked.items() if not is_written(self._new[key])}
        if unwritten and isinstance(weights, WeightFiles):
            weights.find(Names(self._model))
        for key, places in unwritten.items():
            new, name = self._new[key], places[0].name
            if weights is not None and weights.has(name):
                new.copy_(weights.tensor(name, self._old[key]))
            else:
                lost.append(name)
        if lost:
            raise ConfigError(
                f"the values of these buffers are not known: {', '.join(lost)}. The buffers are on meta, no weights "
                "supply their values, and no reset_parameters() or _init_weights() computes them. "
                "Register the buffers outside of torch.device('meta'), or pass as weights= a function that returns "
                "their values"
            )
        self._require_no_others()

    def _require_no_others(self) -> None:
        """Rejects tensors on meta that are plain attributes of modules."""
        for prefix, module in self._model.named_modules():
            for name, value in module.__dict__.items():
                if isinstance(value, torch.Tensor) and value.is_meta:
                    raise ConfigError(
                        f"{f'{prefix}.' if prefix else ''}{name} is a tensor on meta that is neither a parameter nor "
                        "a buffer. Create this tensor on the CPU"
                    )


@dataclass(eq=False)
class ModelValues:
    """Supplies first values from the model and the optimizer.

    For parameters on meta, supplies values from `weights` or by initialisation.
    """

    subject: Subject
    weights: Weights | None
    meta_buffers: Mapping[str, torch.Tensor]  # the persistent buffers that were on meta
    partition: Partition  # the rows of the model's parameters that this rank has; all rows for one process
    step = 0
    user_state = None

    def check(self) -> None:
        """Compares names, shapes and dtypes of the model with the weight files.

        If the weights come from a function, `WeightFunction.tensor()` checks the result of each call instead.
        """
        if isinstance(self.weights, WeightFiles):
            wanted = {name: self.partition.whole(name, p) for name, p in self.subject.named.items() if p.is_meta}
            self.weights.check(Names(self.subject.model), {**wanted, **self.meta_buffers})

    def hyperparameters(self) -> dict[str, Any]:
        """Returns the options of the optimizer's groups, and no loss scale."""
        return {"groups": [options_of(group) for group in self.subject.original.param_groups], "loss_scale": None}

    def parameters(self, units: Sequence[Unit]) -> Generator[First, None, None]:
        """Yields first values.

        Parameters that are initialised from meta come first, then all other parameters in unit order.
        """
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
        """Initialises the parameters on meta with the model's code, and yields this rank's rows of each parameter."""
        whole = self.subject.named
        if self.subject.sharding is not None:
            units, whole = find_units(self.subject.model), self.subject.sharding.leaves
        for name, values in Initialiser(self.subject.model).parameters(units, whole):
            if name in self.subject.named:
                part = self.partition.part(name, values)
                yield name, laid_out(part, dense_strides(self.subject.named[name])), {}, 0

    def buffer(self, name: str, tensor: torch.Tensor) -> None:
        """Copies a buffer's values from `weights`, if there are weights and the buffer was on meta."""
        if self.weights is not None and name in self.meta_buffers:
            tensor.copy_(self.weights.tensor(name, self.meta_buffers[name]))


# If all buffers together have at most this many bytes, every step writes all buffers. Otherwise a step writes only the
# buffers that changed.
_ALWAYS_BYTES_MAX = 1 << 20


class Buffers:
    """Stages, restores and compares the persistent buffers of a model."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._places = {place.name: place for place in persistent_buffers(model)}
        # Name -> checksum of the committed values; "" if `_always` is true. A version counter would miss changes,
        # because some models write to buffers through `.data`, which does not change the version counter.
        self._seen: dict[str, str] = {}
        # Name -> checksum of the staged values; "" if `_always` is true.
        self._staged: dict[str, str] = {}
        # True if a forward since the last commit may have changed the buffers.
        self.may_be_of_step = False
        self._kinds = {name: (self.target(name).dtype, self.target(name).shape) for name in self._places}
        self._always = sum(self.target(name).nbytes for name in self._places) <= _ALWAYS_BYTES_MAX

    @property
    def names(self) -> list[str]:
        """The names of the buffers in `state_dict()`.

        If the model drops a buffer, the store keeps the buffer's last values.
        """
        return [name for name, place in self._places.items() if place.tensor is not None]

    def records(self) -> list[Record]:
        """Returns the buffers' records for a new store."""
        return [
            Record(name=name, values=self.target(name), state={}, unit="buffers", buffer=True) for name in self.names
        ]

    def tensor(self, name: str) -> torch.Tensor:
        """Returns a buffer's values, contiguous in host memory."""
        return self.target(name).cpu().contiguous()

    def target(self, name: str) -> torch.Tensor:
        """Returns a buffer, detached, so that the caller can write to it."""
        tensor = self._places[name].tensor
        assert tensor is not None, f"the model has dropped {name!r}"
        return tensor.detach()

    def restore(self, store: Store) -> None:
        """Copies the store's values into the buffers."""
        for name in self.names:
            values, _ = store.read(name)
            self.target(name).copy_(values)

    def require_same_kinds(self) -> None:
        """Rejects buffers whose shape or dtype changed since `offload()`.

        Each step and each save calls this method before it uses the buffers.
        """
        for name in self.names:
            now, (dtype, shape) = self.target(name), self._kinds[name]
            if (now.dtype, now.shape) != (dtype, shape):
                raise ConfigError(
                    f"buffer {name!r} is {now.dtype} of shape {list(now.shape)}, but was {dtype} of {list(shape)} when "
                    "the model was offloaded, and its dtype and shape in the store are fixed. Set the buffer back to "
                    "this dtype and shape, and repeat the call. For a buffer that changes its shape, use "
                    "persistent=False or a plain attribute"
                )

    def differ(self, store: Store) -> bool:
        """True if the values of a buffer differ from the values in the store's last commit."""
        self.require_same_kinds()
        return any(not same_bits(self.tensor(name), store.read(name)[0].contiguous()) for name in self.names)

    def stage(self, engine: Engine, step: int) -> None:
        """Stages the buffers that changed, or all buffers if `_always` is true.

        Before that, discards buffers that an earlier call staged without a commit.
        """
        self.unstage(engine)
        for name in self.names:
            values = self.tensor(name)
            now = "" if self._always else checksum_of(values)
            if self._always or self._seen.get(name) != now:
                engine.discard(name)
                engine.fill(name, values, step=step)
                self._staged[name] = now

    def unstage(self, engine: Engine) -> None:
        """Discards the staged buffers."""
        for name in self._staged:
            engine.discard(name)
        self._staged = {}

    def committed(self) -> None:
        """Notes that the staged buffers were committed."""
        self._seen.update(self._staged)
        self._staged = {}
        self.may_be_of_step = False


def persistent_buffers(model: torch.nn.Module) -> list[BufferPlace]:
    """Returns the first place of each persistent buffer."""
    found: dict[int, BufferPlace] = {}
    for place, tensor in each_buffer(model):
        if place.is_saved:
            found.setdefault(id(tensor), place)
    return [*found.values()]


def move_buffers(model: torch.nn.Module, device: torch.device, undo: contextlib.ExitStack) -> None:
    """Moves all buffers of a model to a device. If the move of one buffer fails, moves no buffer.

    `undo` gets the calls that put the present buffers back into the model.
    """
    found = list(each_buffer(model))
    tensors = {id(tensor): tensor for _, tensor in found}
    moved = {key: tensor.to(device) for key, tensor in tensors.items()}
    for place, tensor in found:
        undo.callback(place.put, tensor)
        place.put(moved[id(tensor)])
