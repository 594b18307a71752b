"""Finds the random generators in a program's data set, collator and sampler. Saves and restores their states.

Each generator has a path: the names of the attributes and container entries from a root to the generator, joined by
dots.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import random
import types
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from memascend.errors import ConfigError
from memascend.trainer.position import RandomNumbers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

# Bounds of a walk through a program's objects: the number of objects, and the length of the longest container that the
# walk enters.
_OBJECTS_MAX = 20_000
_PARTS_MAX = 1_000
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
# Types of objects that the walk skips, because such an object holds either no generator of a program or too many
# objects.
_PASSED_OVER = (
    *(str, bytes, int, float, complex, type(None), type, types.ModuleType),
    *(torch.Tensor, torch.nn.Module, torch.dtype, torch.device, np.ndarray, np.generic),
)


def generators_in(roots: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the generators of Python, numpy and torch that are reachable from `roots`, by path.

    Leaves out the global generators of `random`, numpy and torch's CPU, and each `SystemRandom`, which has no state.
    """
    # These functions are bound methods, so `__self__` of each method is a global generator of the process.
    methods: list[Any] = [random.random, np.random.rand]
    of_process = {id(method.__self__) for method in methods}
    return {
        path: value
        for path, value in _walk(roots)
        if isinstance(value, _GENERATORS)
        and not isinstance(value, random.SystemRandom)
        and id(value) not in of_process
        and value is not torch.default_generator
    }


def _walk(roots: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the path and the value of each object that is reachable from `roots`, breadth first.

    Yields each object only once. Skips objects of the types in `_PASSED_OVER`, and stops after `_OBJECTS_MAX` objects.
    """
    queue: list[tuple[str, Any]] = [*roots.items()]
    seen: set[int] = set()
    for path, value in queue:
        if id(value) in seen or isinstance(value, _PASSED_OVER):
            continue
        if len(seen) >= _OBJECTS_MAX:
            return
        seen.add(id(value))
        yield path, value
        if not isinstance(value, _GENERATORS):
            queue += [(f"{path}.{name}", part) for name, part in _parts(value)]


def _parts(value: Any) -> Iterable[tuple[Any, Any]]:
    """Returns the names and values of the objects in `value` that the walk visits next.

    Returns nothing for a container with more than `_PARTS_MAX` entries. Of a class's attributes, returns only those for
    which `_may_hold()` is true.
    """
    if isinstance(value, dict | list | tuple | set | frozenset):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return list(pairs) if len(value) <= _PARTS_MAX else []
    if isinstance(value, functools.partial):
        return [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    if isinstance(value, types.MethodType):
        return [("self", value.__self__), ("func", value.__func__)]
    if isinstance(value, types.BuiltinFunctionType):
        # The object may be a method of a generator, such as `generator.random`.
        return [("self", value.__self__)]
    if isinstance(value, types.FunctionType):
        return list(_parts_of_function(value))
    kind = type(value)
    # The class's attributes that are generators, and the class's methods that use a generator of their module.
    shared = [(name, part) for base in kind.__mro__ for name, part in vars(base).items() if _may_hold(part)]
    own = [(name, getattr(value, name, None)) for base in kind.__mro__ for name in _slots(base)]
    return [*getattr(value, "__dict__", {}).items(), *own, *shared]


def _may_hold(part: Any) -> bool:
    """True if a class's attribute is a generator, or a method that uses a generator of its module."""
    if isinstance(part, types.FunctionType):
        return any(isinstance(value, _GENERATORS) for _, value in _named_globals(part))
    return isinstance(part, _GENERATORS)


def _slots(base: type) -> Iterable[str]:
    slots = vars(base).get("__slots__", ())
    return [slots] if isinstance(slots, str) else [name for name in slots if not name.startswith("__")]


def _parts_of_function(function: types.FunctionType) -> Iterator[tuple[Any, Any]]:
    for number, cell in enumerate(function.__closure__ or ()):
        with contextlib.suppress(ValueError):
            # `cell_contents` raises ValueError while the cell is empty.
            yield function.__code__.co_freevars[number], cell.cell_contents
    yield from enumerate(function.__defaults__ or ())
    yield from (function.__kwdefaults__ or {}).items()
    for name, value in _named_globals(function):
        is_own = getattr(value, "__module__", None) == function.__module__
        if isinstance(value, _GENERATORS) or (is_own and not isinstance(value, type)):
            yield name, value


def _named_globals(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield name, function.__globals__[name]


# --- states ----------------------------------------------------------------------------------------------


def states_of(generators: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the states of generators as JSON, by path."""
    return {path: _packed(_state(one)) for path, one in generators.items()}


def restore(generators: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Sets the generators to states that `states_of()` returned.

    Raises:
        ConfigError: `states` has a path that is not in `generators`. Then no generator was set.
    """
    missing = sorted(states.keys() - generators.keys())
    if missing:
        raise ConfigError(
            f"the stored training used a random generator at {missing[0]}, which does not exist now. Pass the same "
            'data set, collator and sampler as before, or start a new training with existing="replace"'
        )
    for path, state in states.items():
        _set_state(generators[path], _unpacked(state))


def _state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return list(generator.getstate())
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.get_state().numpy()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        version, words, gauss = state
        generator.setstate((version, tuple(words), gauss))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.set_state(torch.from_numpy(state))


def _packed(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _packed(part) for name, part in value.items()}
    if isinstance(value, tuple):
        # The tuple has the 32-bit words of the state of a random.Random.
        return _packed(np.array(value, np.uint32))
    if isinstance(value, np.ndarray):
        return [str(value.dtype), base64.b64encode(value.tobytes()).decode()]
    if isinstance(value, list):
        return {"parts": [_packed(part) for part in value]}
    return value.item() if isinstance(value, np.generic) else value


def _unpacked(value: Any) -> Any:
    if isinstance(value, list):
        dtype, text = value
        return np.frombuffer(bytearray(base64.b64decode(text)), dtype)
    if isinstance(value, dict):
        parts = value.get("parts")
        if parts is not None:
            version, words, gauss = map(_unpacked, parts)
            return version, words.tolist(), gauss
        return {name: _unpacked(part) for name, part in value.items()}
    return value


@contextlib.contextmanager
def undisturbed(*roots: Any) -> Iterator[Callable[[], bool]]:
    """At the end of the block, restores the process's generators and the generators that are reachable from `roots`.

    The block may read and collate examples. If the program makes a generator inside the block, the attribute that holds
    the generator gets its earlier value back, or is deleted if it is new. The program then makes the generator again at
    the next use. Yields a function that returns True if a generator has changed its state or is new.
    """
    named = {str(number): root for number, root in enumerate(roots)}
    own, generators = RandomNumbers.now(), generators_in(named)
    states = states_of(generators)
    objects = [(path, value, dict(vars(value))) for path, value in _walk(named) if hasattr(value, "__dict__")]

    def draws() -> bool:
        now = generators_in(named)
        return RandomNumbers.now().to_json() != own.to_json() or states_of(now) != states

    try:
        yield draws
    finally:
        known = {id(one) for one in generators.values()}
        made = [path for path, one in generators_in(named).items() if id(one) not in known]
        for path, value, attributes in objects if made else ():
            _take_back(path, value, attributes, made)
        restore(generators, states)
        own.restore()


def _take_back(path: str, value: Any, attributes: dict[str, Any], made: Iterable[str]) -> None:
    """Resets the attributes of `value` that lead to a generator at one of the paths `made`.

    `path`: the path of `value`. `attributes`: the earlier values of the attributes.
    """
    for name, now in list(vars(value).items()):
        leads = any(one == f"{path}.{name}" or one.startswith(f"{path}.{name}.") for one in made)
        if leads and now is not attributes.get(name):
            with contextlib.suppress(AttributeError, TypeError):
                if name in attributes:
                    setattr(value, name, attributes[name])
                else:
                    delattr(value, name)
