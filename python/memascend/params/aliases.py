"""Finds tensors whose memory other objects use, too: after offload() these objects would silently keep old values."""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from memascend.errors import ConfigError
from memascend.memory import is_file_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

_WEIGHT = "the weight"
# The largest number of tensors that an error names.
_NAMED = 3
# How many levels of containers and objects `attributes` searches in an attribute of a module.
_DEPTH_MAX = 4
_PLAIN = str | bytes | int | float | complex | None
# How errors describe memory that code outside of torch may use: torch cannot count the users of such memory. torch
# cannot distinguish memory of torch.load() from memory of numpy.
FOREIGN = "memory that code outside of torch may use, too (from numpy, torch.load(), DLPack or another process)"


def require_unaliased(
    named: Mapping[str, torch.Tensor],
    model: torch.nn.Module,
    known: Iterable[torch.Tensor] = (),
    *,
    what: str = _WEIGHT,
) -> None:
    """Rejects tensors whose memory other objects use: after offload() these objects would silently keep old values.

    Args:
        named: the tensors, by the names that error messages use.
        model: the model. The attributes of its modules are searched for the object that shares memory, so that the
            error can name this object.
        known: tensors that may share memory with `named`, because offload() replaces these tensors, too.
        what: the words for a tensor in error messages, such as "the weight".

    Raises:
        ConfigError: a tensor shares memory with another object, or a weight is in memory that code outside of torch may
            use. The message names the tensor and says what to do.
    """
    counts = _Counts([*named.values(), *known, *_recomputed(model)])
    aliased = held_for_good(named, lambda name: counts.others(named[name]))
    if aliased:
        first = named[aliased[0]]
        where = next((where for where, one in attributes(model) if counts.is_alias(first, one)), None)
        raise shared_memory(what, aliased, where)
    # Only weights in foreign memory are rejected. Optimizer state is often in memory of torch.load(), and torch cannot
    # distinguish this memory from memory of numpy.
    foreign = find_foreign(named) if what == _WEIGHT else []
    if foreign:
        raise ConfigError(
            f"{_listed(what, foreign)} is in {FOREIGN}. Such code would keep old values during the run. Copy the "
            "tensor before offload(): p.data = p.data.clone(), or copy.deepcopy(model)"
        )


def others_hold(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Returns the names of tensors whose memory is also used by an object outside of `tensors`."""
    counts = _Counts(tensors.values())
    return held_for_good(tensors, lambda name: counts.others(tensors[name]))


def overlapping(tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[str, str] | None:
    """Returns the names of a parameter and another tensor that overlap in memory; None if there is no such pair."""
    spans = []
    for name, tensor in tensors:
        if tensor.is_meta or tensor.layout != torch.strided or tensor.numel() == 0:
            continue
        # A tensor with gaps is skipped: another tensor may use the gaps.
        if torch.ops.aten.is_non_overlapping_and_dense(tensor):
            begin = tensor.data_ptr()
            spans.append((begin, begin + tensor.nbytes, name, isinstance(tensor, torch.nn.Parameter)))
    # `anything` has the highest end address of all tensors so far, and the name of that tensor. `parameter` has the
    # highest end address of all parameters so far, and the name of that parameter.
    parameter = anything = (0, "")
    for begin, end, name, is_parameter in sorted(spans):
        before = anything if is_parameter else parameter
        if begin < before[0]:
            return before[1], name
        anything = max(anything, (end, name))
        if is_parameter:
            parameter = max(parameter, (end, name))
    return None


def held_for_good(names: Iterable[str], is_held: Callable[[str], bool]) -> list[str]:
    """Returns the names for which `is_held` is still true after a garbage collection.

    The collection frees unreachable objects that still refer to tensors.
    """
    held = [name for name in names if is_held(name)]
    if held:
        gc.collect()
    return [name for name in held if is_held(name)]


def shared_memory(what: str, names: list[str], where: str | None = None) -> ConfigError:
    """Returns the error for tensors that share memory with another object; `where` describes the object, if known."""
    return ConfigError(
        f"{_listed(what, names)} shares memory with {where or 'an object outside of the model'}. This object "
        "would keep old values during the run, and writes to it would be lost: delete the object, or make it after "
        "offload(). The object may be .data, detach() or another view, numpy(), a state_dict(), a buffer that contains "
        "the tensor, or a result of an earlier forward, whose graph holds views"
    )


@dataclass
class _Memory:
    """One torch storage, and the known tensors on it."""

    tensor: torch.Tensor  # any known tensor on the storage
    tensors: set[int] = field(default_factory=set)  # the ids of all known tensors on the storage


class _Counts:
    """Detects whether tensors or objects other than the known tensors use the memory of the known tensors."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._memory: dict[int, _Memory] = {}
        known = list(tensors)
        # The base of a view uses the same memory as the view.
        bases = [base for base in map(_base_of, known) if base is not None]
        # This list keeps the known tensors alive, so that no other object gets the id of a known tensor.
        self._known = known + bases
        for tensor in self._known:
            found = storage_of(tensor)
            if found is not None:
                self._memory.setdefault(found._cdata, _Memory(tensor)).tensors.add(id(tensor))  # noqa: SLF001
        # The result of `_holders` for a tensor that no C++ code holds.
        self._one = _holders(torch.empty(1, device="cpu"))
        self._views = Counter(map(id, bases))

    def others(self, tensor: torch.Tensor) -> bool:
        """True if an object other than a known tensor uses the memory of `tensor`."""
        memory = self._of(tensor)
        if memory is None:
            return False
        return uses(memory.tensor) > uses_of_one() + len(memory.tensors) - 1 or self._is_exported(tensor)

    def _is_exported(self, tensor: torch.Tensor) -> bool:
        """True if C++ code, such as a DLPack export, holds the tensor itself.

        Always False for a tensor that requires gradients: DLPack rejects it, so users export the result of `detach()`,
        which is another tensor.
        """
        return not tensor.requires_grad and _holders(tensor) > self._one + self._views[id(tensor)]

    def is_alias(self, tensor: torch.Tensor, other: Any) -> bool:
        """True if `other` is a tensor that shares memory with `tensor` and is not a known tensor."""
        memory = self._of(tensor)
        return (
            memory is not None
            and issubclass(type(other), torch.Tensor)
            and id(other) not in memory.tensors
            and self._of(other) is memory
        )

    def _of(self, tensor: torch.Tensor) -> _Memory | None:
        storage = storage_of(tensor)
        return None if storage is None else self._memory.get(storage._cdata)  # noqa: SLF001


def uses(tensor: torch.Tensor) -> int:
    """Returns how many C++ objects use a tensor's memory, plus the number of Python references to its storage."""
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
        storage = tensor.untyped_storage()
    count: int = torch._C._storage_Use_Count(storage._cdata)  # noqa: SLF001
    return count + sys.getrefcount(storage)


@functools.cache
def uses_of_one() -> int:
    """Returns the result of `uses` for a tensor whose memory no other object uses.

    The result depends on torch's version.
    """
    return uses(torch.empty(1, device="cpu"))


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Returns a tensor's storage; None if the tensor is on meta, is not strided, or has no storage or no bytes."""
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
        if tensor.is_meta or tensor.layout != torch.strided or not torch._C._has_storage(tensor):  # noqa: SLF001
            return None
        storage = tensor.untyped_storage()
    return storage if storage.nbytes() else None


def _base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
        return tensor._base  # noqa: SLF001


def _holders(tensor: torch.Tensor) -> int:
    """Returns the C++ reference count of a tensor. The tensor's Python object counts as one reference."""
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
        return int(tensor._use_count())  # noqa: SLF001


def _recomputed(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yields the tensors that torch's spectral_norm() and the older weight_norm() compute anew in each forward.

    With spectral_norm(), such a tensor shares the memory of `weight_orig` until the first forward replaces the tensor.
    """
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():  # noqa: SLF001
            kept = vars(module).get(str(getattr(hook, "name", None)))
            if type(hook).__module__.startswith("torch.nn.utils.") and isinstance(kept, torch.Tensor):
                yield kept


def attributes(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields, for each tensor in an attribute of a module, a description of the attribute, and the tensor.

    Also searches containers and objects in attributes.

    Skips attributes and closures of functions, because hooks keep values of past forwards there on purpose.
    """
    modules = dict(model.named_modules())
    seen = {id(module) for module in modules.values()}
    for name, module in modules.items():
        # Parameters and buffers are described by their own names, not by the names of the tables that contain them.
        tables = {"_parameters", "_buffers"} & vars(module).keys()
        own = {key: value for key, value in list(vars(module).items()) if key not in tables}
        for key, value in [*own.items(), *(item for table in tables for item in vars(module)[table].items())]:
            for tensor in _tensors_in(value, _DEPTH_MAX, seen):
                yield f"the attribute {key!r} of {name or 'the model'} ({type(module).__name__})", tensor


def _tensors_in(value: Any, depth: int, seen: set[int]) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
        return
    if depth == 0 or id(value) in seen or isinstance(value, type | types.ModuleType | types.FunctionType | _PLAIN):
        return
    seen.add(id(value))
    if isinstance(value, dict):
        parts = list(value.values())
    elif isinstance(value, list | tuple | set | frozenset | deque):
        parts = list(value)
    else:
        parts = list(getattr(value, "__dict__", {}).values())
    for part in parts:
        yield from _tensors_in(part, depth - 1, seen)


def _listed(what: str, names: list[str]) -> str:
    rest = ", ".join(names[1:_NAMED]) + ("..." if len(names) > _NAMED else "")
    return f"{what} {names[0]}" + (f" (and {len(names) - 1} more: {rest})" if len(names) > 1 else "")


def find_foreign(named: Mapping[str, torch.Tensor]) -> list[str]:
    """Returns the names of tensors in memory that code outside of torch may use.

    torch cannot count the users of such memory. Privately mapped files do not count as such memory.
    """
    addresses: dict[str, int] = {}
    for name, tensor in named.items():
        storage = storage_of(tensor)
        if storage is None or storage.device.type != "cpu" or (storage.resizable() and not storage.is_shared()):
            continue
        # Copies of offloaded parameters are in memory of `file_memory`, which is not foreign: only torch owns it.
        if not is_file_memory(storage.data_ptr()):
            addresses[name] = storage.data_ptr()
    maps = _private_files() if addresses else []
    return [name for name, address in addresses.items() if not any(begin <= address < end for begin, end in maps)]


def _private_files() -> list[tuple[int, int]]:
    """Returns the address ranges of privately mapped files; torch and safetensors map files of weights privately."""
    found = []
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        span, permissions, _, _, _, *path = line.split(maxsplit=5)
        if permissions.endswith("p") and path and path[0].startswith("/"):
            begin, end = span.split("-")
            found.append((int(begin, 16), int(end, 16)))
    return found
