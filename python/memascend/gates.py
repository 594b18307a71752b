"""Module hooks: a unit is bound while one of its modules computes.

Every module that owns a parameter, and every module that is a unit as a whole, has a gate. One function, under one key,
serves all modules, so that Dynamo compiles equal blocks once; what is done when a unit is bound already is nothing.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

import torch

from memascend.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from memascend.residency import Home, Residency

__all__ = ["Frames", "Gate", "close_gates", "open_gates"]

_KEY = "memascend"
_CALL = torch.nn.Module._call_impl.__code__  # noqa: SLF001


class Gate:
    """What a module's hooks know: the units to bind, and how often the module is being computed."""

    __slots__ = ("frames", "homes", "is_root", "open", "residency")

    def __init__(self, homes: tuple[Home, ...], residency: Residency, frames: Frames, *, is_root: bool) -> None:
        self.homes = homes
        self.residency = residency
        self.frames = frames
        # The model's own: what an interrupt left open is found here.
        self.is_root = is_root
        self.open = 0


class _Frame:
    __slots__ = ("again", "bound", "module", "pushed")

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.bound: list[Home] = []
        self.pushed = False
        # Calls of the module from inside itself.
        self.again = 0


class Frames:
    """The modules that are being computed, outermost first, of each thread."""

    def __init__(self, residency: Residency, entered: Callable[[], None]) -> None:
        """`entered` hears of every module that is entered."""
        self._residency = residency
        self._entered = entered
        self._local = threading.local()
        self._first_thread = 0
        # More than one thread computes: what another has bound, it may take away at any time.
        self.several = False

    @property
    def stack(self) -> list[_Frame]:
        """This thread's."""
        if not hasattr(self._local, "stack"):
            self._local.stack = []
        stack: list[_Frame] = self._local.stack
        return stack

    def enter(self, module: torch.nn.Module, gate: Gate) -> None:
        """Bind what a module needs: all of it or, with an exception, nothing."""
        if self._residency.closed:
            raise UsageError(self._residency.closed)
        _refuse_wrappers()
        self._entered()
        thread = threading.get_ident()
        self._first_thread = self._first_thread or thread
        self.several = self.several or thread != self._first_thread
        stack = self.stack
        if stack and gate.is_root and _calls(module) <= 1:
            # An interrupt skipped the hooks that end a forward.
            self.unwind()
        if stack and stack[-1].module is module:
            stack[-1].again += 1
            return
        frame = _Frame(module)
        try:
            for home in gate.homes:
                self._residency.bind(home)
                frame.bound.append(home)
            frame.pushed = bool(gate.homes) and self._residency.hooks.push()
        except BaseException:
            self._leave(frame)
            raise
        with self._residency.lock:
            gate.open += 1
        stack.append(frame)

    def leave(self, module: torch.nn.Module, gate: Gate) -> None:
        """End what `enter` began, if it began anything."""
        stack = self.stack
        if not stack or stack[-1].module is not module:
            return
        if stack[-1].again:
            stack[-1].again -= 1
            return
        with self._residency.lock:
            gate.open -= 1
        self._leave(stack.pop())

    def unwind(self) -> None:
        """End everything: what an interrupt left open, seen from outside of the model."""
        stack = self.stack
        while stack:
            frame = stack.pop()
            gate = frame.module.__dict__.get("_memascend_gate")
            if gate is not None:
                with self._residency.lock:
                    gate.open -= 1
            self._leave(frame)

    def _leave(self, frame: _Frame) -> None:
        if frame.pushed:
            self._residency.hooks.pop()
            frame.pushed = False
        while frame.bound:
            self._residency.unbind(frame.bound.pop())


def open_gates(
    modules: Iterable[tuple[torch.nn.Module, tuple[Home, ...]]],
    root: torch.nn.Module,
    residency: Residency,
    frames: Frames,
) -> None:
    """Give modules their gates; `root` is the model."""
    for module, homes in modules:
        module.__dict__["_memascend_gate"] = Gate(homes, residency, frames, is_root=module is root)
        module._forward_pre_hooks[_KEY] = _before  # type: ignore[index] # noqa: SLF001
        # Before others' hooks: a parametrization computes in its own.
        module._forward_pre_hooks.move_to_end(_KEY, last=False)  # type: ignore[arg-type] # noqa: SLF001
        module._forward_hooks[_KEY] = _after  # type: ignore[index] # noqa: SLF001
        module._forward_hooks_always_called[_KEY] = True  # type: ignore[index] # noqa: SLF001


def close_gates(modules: Iterable[torch.nn.Module]) -> None:
    """Take the gates away."""
    for module in modules:
        module.__dict__.pop("_memascend_gate", None)
        module._forward_pre_hooks.pop(_KEY, None)  # type: ignore[call-overload] # noqa: SLF001
        module._forward_hooks.pop(_KEY, None)  # type: ignore[call-overload] # noqa: SLF001
        module._forward_hooks_always_called.pop(_KEY, None)  # type: ignore[call-overload] # noqa: SLF001


def _before(module: torch.nn.Module, args: Any) -> None:
    del args
    gate = module.__dict__["_memascend_gate"]
    if gate.open > 0 or gate.is_root or gate.frames.several:
        # The module may call itself, or be computed by another thread too.
        _enter(module, gate)
        return
    for home in gate.homes:
        if home.bound == 0:
            _enter(module, gate)
            return


def _after(module: torch.nn.Module, args: Any, result: Any) -> None:
    del args, result
    gate = module.__dict__["_memascend_gate"]
    if gate.open > 0:
        _leave(module, gate)


@torch._dynamo.disable  # noqa: SLF001
def _enter(module: torch.nn.Module, gate: Gate) -> None:
    gate.frames.enter(module, gate)


@torch._dynamo.disable  # noqa: SLF001
def _leave(module: torch.nn.Module, gate: Gate) -> None:
    gate.frames.leave(module, gate)


def _calls(module: torch.nn.Module) -> int:
    """How often this thread is within a call of a module."""
    count, frame = 0, sys._getframe()  # noqa: SLF001
    while frame is not None:
        count += frame.f_code is _CALL and frame.f_locals.get("self") is module
        frame = frame.f_back  # type: ignore[assignment]
    return count


def _refuse_wrappers() -> None:
    if torch._C._is_tracing():  # noqa: SLF001
        raise UsageError("torch.jit.trace would record placeholders; trace the model before offload()")
    if torch._C._functorch.peek_interpreter_stack() is not None:  # noqa: SLF001
        raise UsageError("torch.func transforms do not work on an offloaded model; use autograd's own functions")
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # noqa: SLF001
        raise UsageError("saved-tensor hooks are disabled here, and an offloaded model needs them")
