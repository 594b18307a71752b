"""Takes the state of the original optimizer apart, and refuses memory that others hold and that would not follow."""

from __future__ import annotations

import ctypes
import gc
import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from memascend.errors import ConfigError, UsageError
from memascend.optim.shared import attributes_of
from memascend.optim.trial import reached_from
from memascend.session.optimizer import session_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from memascend.session.optimizer import OffloadedOptimizer


# A refusal names as many.
_NAMED = 3


# Words at the beginning of what torch keeps of a storage; where its memory is, and what frees it, are among them.
_WORDS = 6


def require_unaliased(
    named: Mapping[str, torch.Tensor],
    model: torch.nn.Module,
    known: Iterable[torch.Tensor] = (),
    *,
    what: str = "the weight",
) -> None:
    """Refuse tensors whose memory others reach: once it is on storage, these would keep old values in silence.

    Args:
        named: the tensors, by the names that a refusal gives.
        model: in whose modules what holds them is looked for.
        known: tensors that may lie in the same memory, as they leave with the others.
        what: one of the tensors, in words.

    Raises:
        ConfigError: which of them, and what to do.
    """
    counts = _Counts([*named.values(), *known, *_computed_anew(model)])
    aliased = [name for name, tensor in named.items() if counts.others(tensor)]
    if aliased:
        # Cycles that nobody reaches hold some until they are collected.
        gc.collect()
        aliased = [name for name in aliased if counts.others(named[name])]
    if aliased:
        where = _attribute(model, named[aliased[0]], counts)
        raise ConfigError(
            f"{_listed(what, aliased)} shares memory with {where or 'something outside of the model'}, which would "
            "keep old values while the run goes on, and lose what is written to it: delete it, or take it after "
            "offload(). It may be .data, detach() or another view, numpy(), a state_dict(), a buffer that it is a part "
            "of, or what an earlier forward computed, whose graph holds views"
        )
    foreign = _foreign(named)
    if foreign:
        raise ConfigError(
            f"{_listed(what, foreign)} lies in memory that torch did not allocate (of numpy, DLPack or frombuffer(), "
            "or shared with other processes), and its owner would keep old values while the run goes on: give it "
            "memory of its own by clone() before offload() (p.data = p.data.clone())"
        )


@dataclass
class _Memory:
    """One storage, and how many of the tensors on it are known."""

    tensor: torch.Tensor  # one of them
    tensors: set[int] = field(default_factory=set)


class _Counts:
    """How many tensors and objects that are not known reach the memory of known ones."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._memory: dict[int, _Memory] = {}
        # What is known stays, so that no other object comes to be where one of it was.
        self._known = list(_with_bases(tensors))
        for tensor in self._known:
            found = _storage_of(tensor)
            if found is not None:
                self._memory.setdefault(found._cdata, _Memory(tensor)).tensors.add(id(tensor))  # noqa: SLF001
        self._alone = _uses(torch.empty(1, device="cpu"))

    def others(self, tensor: torch.Tensor) -> bool:
        """Whether anything else holds its memory."""
        memory = self._of(tensor)
        return memory is not None and _uses(memory.tensor) > self._alone + len(memory.tensors) - 1

    def is_alias(self, tensor: torch.Tensor, other: Any) -> bool:
        """Whether something is a tensor in this memory, and not a known one."""
        memory = self._of(tensor)
        return (
            memory is not None
            and issubclass(type(other), torch.Tensor)
            and id(other) not in memory.tensors
            and self._of(other) is memory
        )

    def _of(self, tensor: torch.Tensor) -> _Memory | None:
        storage = _storage_of(tensor)
        return None if storage is None else self._memory.get(storage._cdata)  # noqa: SLF001


def _uses(tensor: torch.Tensor) -> int:
    """How many tensors and storages of C++ have its memory, and how many hold the object that is its storage."""
    storage = _storage_of(tensor)
    assert storage is not None
    uses: int = torch._C._storage_Use_Count(storage._cdata)  # noqa: SLF001
    return uses + sys.getrefcount(storage)


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Its memory; None where there is none of a plain kind."""
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
        if tensor.is_meta or tensor.layout != torch.strided or not torch._C._has_storage(tensor):  # noqa: SLF001
            return None
        storage = tensor.untyped_storage()
    return storage if storage.nbytes() else None


def _with_bases(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The tensors, and those that they are views of, which lie in the same memory."""
    for tensor in tensors:
        yield tensor
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            base = tensor._base  # noqa: SLF001
        if base is not None:
            yield base


def _computed_anew(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """What torch's spectral_norm() keeps as `weight`: a view of `weight_orig` at first, which each forward replaces."""
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():  # noqa: SLF001
            kept = vars(module).get(str(getattr(hook, "name", None)))
            if type(hook).__module__.startswith("torch.nn.utils.") and isinstance(kept, torch.Tensor):
                yield kept


def _attribute(model: torch.nn.Module, tensor: torch.Tensor, counts: _Counts) -> str | None:
    """The attribute of a module that is the alias, or a list, tuple or dict with it, in words."""
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            within = (
                value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
            )
            if any(counts.is_alias(tensor, one) for one in within):
                return f"the attribute {key!r} of {name or 'the model'} ({type(module).__name__})"
    return None


def _listed(what: str, names: list[str]) -> str:
    more = f" (and {len(names) - 1} more: {', '.join(names[1:_NAMED])}...)" if len(names) > 1 else ""
    return f"{what} {names[0]}{more}"


def _foreign(named: Mapping[str, torch.Tensor]) -> list[str]:
    """Those in memory whose owner torch does not count, and which is no file of weights that torch maps for itself."""
    found: list[str] = []
    maps: list[tuple[int, int]] | None = None
    for name, tensor in named.items():
        storage = _storage_of(tensor)
        if storage is None or storage.device.type != "cpu":
            continue
        # numpy() of a tensor makes the memory one that cannot be resized, too.
        if (storage.resizable() and not storage.is_shared()) or _is_torchs_own(storage):
            continue
        if maps is None:
            maps = _private_files()
        address = storage.data_ptr()
        if not any(begin <= address < end for begin, end in maps):
            found.append(name)
    return found


def _is_torchs_own(storage: torch.UntypedStorage) -> bool:
    """Whether torch's allocator of host memory made it: then what is to be freed is the memory itself."""
    own = torch.empty(1, device="cpu").untyped_storage()
    return _addresses(own) == 2 == _addresses(storage)


def _addresses(storage: torch.UntypedStorage) -> int:
    words = (ctypes.c_void_p * _WORDS).from_address(storage._cdata)  # noqa: SLF001
    return sum(word == storage.data_ptr() for word in words)


def _private_files() -> list[tuple[int, int]]:
    """Where files lie in memory whose changes are this process's alone, as torch and safetensors map weights."""
    found = []
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        span, permissions, _, _, _, *path = line.split(maxsplit=5)
        if permissions.endswith("p") and path and path[0].startswith("/"):
            begin, end = span.split("-")
            found.append((int(begin, 16), int(end, 16)))
    return found


_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]


_WHERE = "is on storage: use the optimizer that offload() returned, and its state[p]"


def require_unaliased_state(
    optimizer: torch.optim.Optimizer, named: Mapping[str, torch.nn.Parameter], model: torch.nn.Module
) -> None:
    """Refuse state that others reach by a view, or by the dict in which it is; nothing was changed.

    Raises:
        ConfigError: whose state it is, and what to do.
    """
    state = optimizer.state
    states = {name: state[parameter] for name, parameter in named.items() if parameter in state}
    tensors = {
        f"{key} of {name}": value
        for name, own in states.items()
        for key, value in own.items()
        if isinstance(value, torch.Tensor)
    }
    known = [value for own in state.values() for value in own.values() if isinstance(value, torch.Tensor)]
    require_unaliased(tensors, model, known, what="the optimizer's state")
    names = list(states)
    states.clear()
    held = _held(optimizer, named, names)
    if held:
        gc.collect()
        held = _held(optimizer, named, held)
    if held:
        raise ConfigError(
            f"the optimizer's state of {held[0]} is held by something else than the optimizer: a variable, or what its "
            "state_dict() gave, has the very dict optimizer.state[p], which would keep old values while the run goes "
            "on: delete it, or take it from the optimizer that offload() returns"
        )


def _held(optimizer: torch.optim.Optimizer, named: Mapping[str, torch.nn.Parameter], names: list[str]) -> list[str]:
    """Those whose dict is not the optimizer's alone."""
    key = object()
    alone = _references({key: {}}, key)
    return [name for name in names if _references(optimizer.state, named[name]) > alone]


def _references(mapping: Mapping[Any, Any], key: Any) -> int:
    return sys.getrefcount(mapping[key])


def leave(optimizer: torch.optim.Optimizer, offloaded: OffloadedOptimizer) -> None:
    """Let the original's state be that of the run; what somebody holds of the old one raises when it is used."""
    state = optimizer.state
    # What all states have, as tables, is nobody's own.
    common = Counter(id(value) for own in state.values() for value in own.values())
    if state:
        common.update(2 * [id(one) for value in attributes_of(optimizer).values() for one in reached_from(value)])
    alone = _references({0: torch.empty(1, device="cpu")}, 0)
    for own in state.values():
        for key in own:
            if isinstance(own[key], torch.Tensor) and common[id(own[key])] == 1 and _references(own, key) > alone:
                _take_memory(own[key], key)
    state.clear()
    if isinstance(state, defaultdict):
        state.default_factory = _refuse_state
    optimizer.state = OriginalState(offloaded)  # type: ignore[assignment]
    optimizer.register_load_state_dict_pre_hook(_refuse_load)


def _take_memory(tensor: torch.Tensor, key: str) -> None:
    """Let a tensor that somebody holds have no values: what it had goes on elsewhere."""
    nothing = torch.empty((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
    torch._C._set_storage_access_error_msg(nothing, f"this tensor was {key} of an optimizer, whose state {_WHERE}")  # noqa: SLF001
    _SET_DATA(tensor, nothing)


def _refuse_state() -> NoReturn:
    raise UsageError(f"the state of this optimizer {_WHERE}")


def _refuse_load(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    del state_dict
    if not isinstance(optimizer.state, OriginalState) or optimizer.state.run is None:
        return
    raise UsageError(
        "this optimizer was given to offload(), and its state is on storage: load into it before offload(), or call "
        "load_state_dict() of the optimizer that offload() returned"
    )


class OriginalState(MutableMapping[torch.Tensor, dict[str, Any]]):
    """The `state` of the original optimizer: that of the run, as long as it lasts; then an empty one."""

    def __init__(self, offloaded: OffloadedOptimizer) -> None:
        # Whoever holds the original, as schedulers do, does not hold the run.
        self._offloaded = weakref.ref(offloaded)
        self._own: defaultdict[torch.Tensor, dict[str, Any]] = defaultdict(dict)

    @property
    def run(self) -> OffloadedOptimizer | None:
        """What has the state; None where it is closed."""
        offloaded = self._offloaded()
        return None if offloaded is None or session_of(offloaded).run.resources.closed else offloaded

    @property
    def _now(self) -> MutableMapping[torch.Tensor, dict[str, Any]]:
        run = self.run
        return self._own if run is None else run.state

    def __getitem__(self, parameter: torch.Tensor) -> dict[str, Any]:
        return self._now[parameter]

    def __setitem__(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        self._now[parameter] = state

    def __delitem__(self, parameter: torch.Tensor) -> None:
        del self._now[parameter]

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._now

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._now)

    def __len__(self) -> int:
        return len(self._now)
