"""Decides which optimizers can stream: torch's own by a tested list, any other class by a trial on small tensors."""

from __future__ import annotations

import contextlib
import functools
import gc
import random
import sys
import types
import warnings
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memascend.errors import ConfigError
from memascend.optim.comparison import (
    PLAIN,
    Comparison,
    Manner,
    all_present,
    chosen_members,
    copy_of_one,
    members_at_size,
    some_missing,
    without_scratch,
)
from memascend.optim.shared import SharedName, SharedValues, attributes_of, give_gradient, named, run

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


class _Draws(TorchDispatchMode):
    """Rejects operations that draw random numbers, on any device."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # A trial compiles nothing; to tell torch's compiler so would load it, which takes seconds.
        return False

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._optimizer = optimizer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A generator that the step makes itself begins with the same state for each parameter.
        if torch.Tag.nondeterministic_seeded in func.tags and (kwargs or {}).get("generator") is None:
            raise _draws_refused(self._optimizer)
        return func(*args, **(kwargs or {}))


def _draws_refused(optimizer: torch.optim.Optimizer) -> ConfigError:
    return ConfigError(
        f"{named(optimizer)} cannot run on streamed state: its step draws random numbers, which streamed parameters "
        "would get in another order than torch's; use an optimizer that draws none"
    )


@contextlib.contextmanager
def on_trial(optimizer: torch.optim.Optimizer, *, meta: bool = False) -> Iterator[None]:
    """Run a trial of an optimizer, without warnings; one that draws random numbers is rejected.

    The generators of torch, Python and numpy stay as they are. On `meta`, unlike elsewhere, torch itself draws from
    Python's generator for a collective. What a step compiles runs uncompiled: for small tensors it would take minutes.
    """
    numpy: Any = sys.modules.get("numpy")
    before = random.getstate()
    theirs: Any = numpy.random.get_state() if numpy else None
    # Without the compiler nothing is compiled yet, and loading it takes seconds.
    uncompiled: Any = torch.compiler.set_stance if "torch._dynamo" in sys.modules else contextlib.nullcontext
    try:
        with (
            torch.random.fork_rng(devices=[]),
            _Draws(optimizer),
            warnings.catch_warnings(),
            uncompiled("force_eager"),
        ):
            warnings.simplefilter("ignore")
            yield
        drawn = random.getstate() != before or (numpy is not None and numpy.random.get_state()[2] != theirs[2])
    finally:
        random.setstate(before)
        if numpy is not None:
            numpy.random.set_state(theirs)
    if drawn and not meta:
        raise _draws_refused(optimizer)


# These lead to the whole interpreter, and to nothing that a step would change.
_SKIPPED = (type, types.ModuleType, types.CodeType, types.FrameType, str, bytes, int, float)


def require_self_contained(optimizer: torch.optim.Optimizer) -> None:
    """Reject an optimizer that reaches the user's own objects by another way than its groups and its state.

    A step of a copy would change these objects. No code of the optimizer runs here.
    """
    for name in ("param_groups", "state"):
        if hasattr(getattr(type(optimizer), name, None), "__set__"):
            raise _reach_refused(optimizer, f"its {name} are those of another optimizer")
    held = [(f"its attribute {name!r}", value) for name, value in attributes_of(optimizer).items()]
    for group in optimizer.param_groups:
        held += [(f"the option {name!r} of a group", value) for name, value in group.items() if name != "params"]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    ids, memory = set(map(id, parameters)), set(map(_memory, parameters)) - {None}
    for where, value in held:
        for reached in reached_from(value):
            is_parameter = isinstance(reached, torch.Tensor) and (id(reached) in ids or _memory(reached) in memory)
            what = "a parameter" if is_parameter else _users(optimizer, reached)
            if what is not None:
                raise _reach_refused(optimizer, f"{where} holds {what}")


def _users(optimizer: torch.optim.Optimizer, reached: Any) -> str | None:
    """A name in words for an object of the user's; None for others."""
    if reached is optimizer:
        return "the optimizer itself"
    if isinstance(reached, torch.optim.Optimizer):
        return f"another optimizer ({named(reached)})"
    if isinstance(reached, torch.nn.Module) and next(reached.parameters(), None) is not None:
        return f"a model ({type(reached).__qualname__})"
    return "a random number generator" if isinstance(reached, torch.Generator) else None


def _reach_refused(optimizer: torch.optim.Optimizer, why: str) -> ConfigError:
    inner = "; where it wraps an optimizer, give offload() that one" if "optimizer" in why else ""
    return ConfigError(
        f"{named(optimizer)} cannot run on streamed state: {why}, and only the groups and the state of each parameter "
        f"are streamed{inner}"
    )


def _memory(tensor: torch.Tensor) -> int | None:
    """The identity of a tensor's memory; None where it has none of a plain kind."""
    if tensor.layout != torch.strided or hasattr(tensor, "__tensor_flatten__"):
        return None
    memory: int = tensor.untyped_storage()._cdata  # noqa: SLF001
    return memory


def reached_from(value: Any) -> Iterator[Any]:
    """The value, and every object that it refers to, through containers, objects, closures and weak references."""
    seen: set[int] = set()
    # References to all of them: a new object must not get the id of a freed one.
    waiting = [value]
    held = []
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, _SKIPPED):
            continue
        seen.add(id(value))
        held.append(value)
        yield value
        if isinstance(value, types.FunctionType):
            # Not its globals.
            waiting += [value.__closure__, value.__defaults__, value.__kwdefaults__, vars(value)]
        elif isinstance(value, weakref.ref):
            waiting.append(value())
        elif isinstance(value, dict) and value.get("__name__") in sys.modules:
            # The globals of a module.
            continue
        elif not isinstance(value, torch.nn.Module | torch.optim.Optimizer | torch.Tensor):
            waiting += gc.get_referents(value)
        elif isinstance(value, torch.nn.Module):
            waiting.append(vars(value))


_MANNERS = [
    replace(one, zeros=zeros)
    for one in (PLAIN, Manner(omits=True), Manner(omits=True, stacks=True))
    for zeros in (False, True)
]


def require_independent(
    optimizer: torch.optim.Optimizer, master_dtype: torch.dtype | None
) -> tuple[dict[SharedName, Any], Manner]:
    """Reject an optimizer whose parameters do not get the same bits together and one at a time.

    Small parameters are stepped several times, all with a gradient, then some without. `train()` and `eval()` are tried
    too, where the class has them. Returns the values that a step changes for all parameters alike, as at the end of the
    trial, and the first manner that works, in which the optimizer is then run for one parameter.
    """
    first: ConfigError | None = None
    for manner in _MANNERS:
        try:
            return _tried(optimizer, master_dtype, manner)
        except ConfigError as error:
            # A manner in which the code runs, and differs, explains more than one in which it fails.
            if first is None or (first.__cause__ is not None and error.__cause__ is None):
                first = error
    assert first is not None
    raise first


def _tried(
    optimizer: torch.optim.Optimizer, master_dtype: torch.dtype | None, manner: Manner
) -> tuple[dict[SharedName, Any], Manner]:
    generator = torch.Generator().manual_seed(1)
    members = chosen_members(optimizer, master_dtype, generator)
    begin = SharedValues.of(optimizer)
    with on_trial(optimizer):
        every = Comparison(optimizer, begin, members, manner, spread=False)
        after = every.follow(all_present(optimizer, members), generator)
        some = Comparison(optimizer, begin, members, manner, spread=True)
        some.follow(some_missing(optimizer, members), generator)
        if manner.stacks:
            for group in sorted(every.stacked_groups):
                whole = members_at_size(optimizer, group, master_dtype, generator)
                whole += [member for member in members if member.group != group]
                true = Comparison(optimizer, begin, whole, manner, spread=False)
                true.follow([("step", [True] * len(whole))] * 2, generator)
    scratch = every.scratch | some.scratch
    return without_scratch(begin.changes(after), scratch), replace(manner, scratch=scratch)


def stepping(
    optimizer: torch.optim.Optimizer,
    group: int,
    parameter: torch.nn.Parameter,
    gradients: Iterator[torch.Tensor],
    options: Mapping[str, Any],
    manner: Manner = PLAIN,
) -> Iterator[dict[str, Any]]:
    """Step one parameter in place of the original's, changing it; yields its state after each step.

    `group` is the number of its group, and `options` override those of every group that has such an option.
    """
    shared = SharedValues.of(optimizer).copy(deep=True)
    for made in shared.groups:
        made.update({name: value for name, value in options.items() if name in made})
    copy = copy_of_one(optimizer, shared, group, parameter, {}, manner)
    if callable(getattr(type(optimizer), "train", None)):
        run(copy, "train")
    for gradient in gradients:
        give_gradient(parameter, gradient)
        run(copy)
        yield dict(copy.state.get(parameter, {}))


# The update of an element needs only that element and the scalars of its parameter.
_ELEMENTWISE = frozenset(
    {
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.Adamax,
        torch.optim.ASGD,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
    }
)
# The update of a parameter needs the whole parameter, and nothing else.
_WHOLE = frozenset({torch.optim.Adafactor, torch.optim.Muon, torch.optim.SparseAdam})


def elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether each element's update needs only that element: of torch's own classes, by their exact type."""
    return type(optimizer) in _ELEMENTWISE


def known(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is one of torch's own classes, which need no trial."""
    return type(optimizer) in _ELEMENTWISE | _WHOLE


def require_streamable(
    optimizer: torch.optim.Optimizer, master_dtype: torch.dtype | None = torch.float32
) -> tuple[dict[SharedName, Any], Manner]:
    """Reject an optimizer whose updates cannot be exact on streamed state; see `require_independent` for the result.

    The optimizer, its parameters and random numbers do not change.
    """
    _require_class(optimizer)
    for group in optimizer.param_groups:
        for option in ("capturable", "differentiable"):
            if group.get(option):
                raise ConfigError(
                    f"{option}=True is rejected: updates run outside of autograd and CUDA graphs; set {option}=False"
                )
        for parameter in group["params"]:
            if parameter.is_complex():
                raise ConfigError(
                    f"a parameter of {parameter.dtype} cannot be streamed, since only real floats are updated: freeze "
                    "it with requires_grad_(False), or take it from the optimizer"
                )
            plain_sgd = group.get("fused") and master_dtype is None and type(optimizer) is torch.optim.SGD
            if plain_sgd and parameter.dtype.itemsize == 2 and not _fused_sgd_updates(parameter.dtype):
                raise ConfigError(
                    f"fused=True is rejected for SGD on parameters of {parameter.dtype}: torch {torch.__version__} "
                    "leaves most elements as they are, and reads momentum past its end; set fused=False, leave "
                    "master_dtype at torch.float32, or take a newer torch"
                )
    if known(optimizer):
        return {}, PLAIN
    require_self_contained(optimizer)
    return require_independent(optimizer, master_dtype)


def _require_class(optimizer: torch.optim.Optimizer) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"the optimizer must be a torch.optim.Optimizer, not a {type(optimizer).__qualname__}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            f"{named(optimizer)} is rejected: its step evaluates the model several times, and its state spans all "
            "parameters. Use AdamW, or any optimizer whose state is per parameter"
        )
    if any(kind.__module__.startswith("bitsandbytes.") for kind in type(optimizer).__mro__):
        raise ConfigError(
            f"{named(optimizer)} of bitsandbytes is rejected: the bits of its updates depend on the processor. Use "
            'torch.optim.AdamW, Adam, or SGD with momentum, and pass offload(..., state="8bit"), which keeps moments '
            "in the same 8 bits"
        )


@functools.cache
def _fused_sgd_updates(dtype: torch.dtype) -> bool:
    """Whether torch's kernel updates whole vectors on the CPU, which it skips in torch 2.11; found by running it."""
    values, gradient = torch.zeros(64, dtype=dtype, device="cpu"), torch.ones(64, dtype=dtype, device="cpu")
    torch._fused_sgd_(
        *([values], [gradient], []),
        weight_decay=0.0,
        momentum=0.0,
        lr=1.0,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=True,
    )
    return bool((values == -1.0).all())
