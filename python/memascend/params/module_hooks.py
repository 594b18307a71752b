"""Hooks modules so that their parameters are loaded while they compute; frees what a failed backward leaves."""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from memascend.errors import UsageError
from memascend.params.threads import works_for_another

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import FrameType

    from memascend.params.residency import Residency
    from memascend.params.unit import Home


def let_go() -> None:
    """Free the work that failed backwards left in this thread; nothing while a backward runs in it."""
    if torch._C._current_graph_task_id() != -1:  # noqa: SLF001
        return
    # Work that belongs to no backward any more leaves the queue before any other. A forked child may have no autograd,
    # if its parent had threads of it; torch then raises RuntimeError.
    with contextlib.suppress(RuntimeError), torch.inference_mode(mode=False), torch.enable_grad():
        torch.zeros((), requires_grad=True, device="cpu").backward()


class _End:
    """Held by a thread, and gone when it ends, in that thread, while it still may use Python."""

    def __del__(self) -> None:
        let_go()


class _Thread(threading.local):
    def __init__(self) -> None:
        self._end: _End | None = None

    def watch(self) -> None:
        """A backward may begin in this thread: look after its queue when it ends."""
        if not _exiting:
            self._end = self._end or _End()

    def end(self) -> None:
        """It is the first one, which ends with the process."""
        self._end = None


_thread = _Thread()
note_thread = _thread.watch
# Later than that, nothing of torch can be called.
_exiting = False


@atexit.register
def _exit() -> None:
    global _exiting  # noqa: PLW0603
    _exiting = True
    _thread.end()


_KEY = "memascend"
# What TorchScript calls first.
_SCRIPT = "__prepare_scriptable__"


# A module's own table of parameters, the name there, and the parameter.
_Owned = tuple[dict[str, Any], str, torch.nn.Parameter]


@dataclass(eq=False, slots=True)
class Gate:
    """The state of a module's hooks: the units to materialize, and how often the module is being computed."""

    homes: tuple[Home, ...]
    # The parameters of these units, and where their modules keep them.
    owned: tuple[_Owned, ...]
    residency: Residency
    root: bool
    open: int = 0

    def count(self, module: torch.nn.Module) -> None:
        """Count how often the module is being computed: anew, since an interrupt may have left it behind the stacks."""
        with self.residency.lock:
            self.open = sum(frame.module is module for _, stack in self.residency.frames.stacks for frame in stack)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            "an offloaded model cannot be copied or pickled: its values are on storage; do it within "
            "memascend.materialized(model), or save model.state_dict()"
        )


class _Frame:
    """A module that is being computed: the units materialized and the hooks pushed for it."""

    __slots__ = ("_homes", "_pushed", "_task", "caller", "module")

    def __init__(self, module: torch.nn.Module, caller: FrameType | None) -> None:
        """`caller`, of the outermost one, is the Python frame that computes it, which is on the stack until then."""
        self.module = module
        self.caller = caller
        self._homes: list[Home] = []
        self._pushed = False
        # The backward in which they were pushed; see `end`.
        self._task = torch._C._current_graph_task_id()  # noqa: SLF001

    def begin(self, gate: Gate) -> None:
        """Materialize the units of the module, and push the hooks; after an exception `end` undoes it."""
        residency = gate.residency
        for home in gate.homes:
            residency.materialize(home)
            self._homes.append(home)
        if self._homes or (gate.root and residency.hooks.keeper is not None):
            self._pushed = residency.hooks.push()

    def end(self, residency: Residency, holder: int | None = None) -> None:
        """Undo `begin`; `holder`: the thread of `begin`, where that is another, which ended, and its hooks with it."""
        if self._pushed:
            self._pushed = False
            # Autograd itself removes hooks that are pushed within a backward, with each node that it computes: outside
            # of it, the hooks that are on top are others'.
            if holder is None and self._task == torch._C._current_graph_task_id():  # noqa: SLF001
                residency.hooks.pop()
        while self._homes:
            residency.offload(self._homes.pop(), holder)


class _Stack(threading.local):
    """The modules that a thread is computing."""

    def __init__(self, frames: Frames) -> None:
        self.frames: list[_Frame] = []
        frames.begin_thread(self.frames)


class Frames:
    """The modules that are being computed, outermost first, of each thread.

    Attributes:
        stacks: the stacks of all threads; an interrupted thread may end without having left its modules.
    """

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self.stacks: list[tuple[threading.Thread, list[_Frame]]] = []
        self._own = _Stack(self)

    @property
    def stack(self) -> list[_Frame]:
        """This thread's."""
        return self._own.frames

    def begin_thread(self, own: list[_Frame]) -> None:
        """Another thread may compute modules, whose stack this is."""
        note_thread()
        self.stacks = [(thread, stack) for thread, stack in self.stacks if stack or thread.is_alive()]
        self.stacks.append((threading.current_thread(), own))

    def enter(self, module: torch.nn.Module, gate: Gate) -> None:
        """Materialize the units of a module: all of them or, with an exception, none."""
        self._residency.units.require_open()
        if not gate.homes:
            # Materializing does it otherwise.
            self._residency.turns.note_thread()
        _refuse_wrappers()
        for table, name, parameter in gate.owned:
            if table.get(name) is not parameter:
                raise UsageError(
                    f"parameter {name!r} of a module is not the one that was offloaded: it was deleted, replaced or "
                    "tied to another after offload(), or torch.func.functional_call put another there for a call. Undo "
                    "that; or save(), do it in a plain model with those weights, and offload() anew. Values are "
                    "changed within memascend.materialized(model, modify=True)"
                )
        stack = self.stack
        if gate.root:
            self.unwind()
        if self._residency.stages is not None:
            self._residency.stages.arrive(gate.homes)
        self._residency.session.entered(module, outermost=not stack)
        frame = _Frame(module, None if stack else _caller())
        # First, so that `unwind` finds it after an interrupt between any two lines.
        stack.append(frame)
        try:
            frame.begin(gate)
            gate.count(module)
        except BaseException:
            frame.end(self._residency)
            stack.remove(frame)
            gate.count(module)
            raise

    def leave(self, module: torch.nn.Module, gate: Gate, result: Any) -> None:
        """End what `enter` began, if it began anything; `result` is what the module returns."""
        if self._residency.stages is not None and gate.homes:
            self._announce(gate, result)
        stack = self.stack
        if not stack or stack[-1].module is not module:
            return
        stack[-1].end(self._residency)
        stack.pop()
        gate.count(module)

    def _announce(self, gate: Gate, result: Any) -> None:
        """Have the backward of a module begin a stage, though none of its nodes may read a weight: an embedding's."""
        residency = self._residency

        def begin(_: Any) -> None:
            if residency.stages is not None:
                residency.stages.arrive(gate.homes)

        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                value.grad_fn.register_prehook(begin)

    @property
    def inside(self) -> bool:
        """Whether this thread computes a module now."""
        stack = self.stack
        return bool(stack) and _is_running(stack[0].caller)

    def unwind(self, *, all_of_it: bool = False) -> None:
        """End modules that an interrupt left open; `all_of_it`: also modules that are being computed."""
        if all_of_it or not self.inside:
            self._end(self.stack)
            if works_for_another():
                # Units that are materialized here are so for all micro-batches of a call.
                return
            # And units and hooks without a frame: an interrupt came while they were materialized or pushed.
            self._residency.offload_all(threading.get_ident())
            self._residency.turns.release()
            self._residency.hooks.pop_left()
        for thread, stack in self.stacks:
            if stack and not thread.is_alive():
                self._end(stack, thread.ident)

    def _end(self, stack: list[_Frame], holder: int | None = None) -> None:
        while stack:
            stack[-1].end(self._residency, holder)
            module = stack.pop().module
            gate = _gate_of(module)
            if gate is not None:
                gate.count(module)


def open_gates(
    model: torch.nn.Module,
    modules: Iterable[tuple[torch.nn.Module, tuple[Home, ...]]],
    residency: Residency,
) -> None:
    """Install module hooks, also on `model` itself."""
    owners = _owners(model)
    # Of the modules of a unit it is the same.
    owned: dict[tuple[Home, ...], tuple[_Owned, ...]] = {}
    for module, homes in modules:
        if homes not in owned:
            owned[homes] = tuple(
                one for home in homes for place in home.places for one in owners.get(id(place.parameter), ())
            )
        if module._modules:  # noqa: SLF001
            # In others torch stumbles over the hooks.
            module.__dict__[_SCRIPT] = _refuse_script
        _hook(module)
        # torch asks for the key alone. An attribute of its own would cost each module a dict that is not shared.
        gate: Any = Gate(homes, owned[homes], residency, root=module is model)
        module._forward_hooks_always_called[_KEY] = gate  # type: ignore[index] # noqa: SLF001


def _hook(module: torch.nn.Module) -> None:
    module._forward_pre_hooks[_KEY] = _before  # type: ignore[index] # noqa: SLF001
    # Before others' hooks: a parametrization computes in its own.
    module._forward_pre_hooks.move_to_end(_KEY, last=False)  # type: ignore[attr-defined] # noqa: SLF001
    module._forward_hooks[_KEY] = _after  # type: ignore[index] # noqa: SLF001


def close_gates(modules: Iterable[torch.nn.Module]) -> None:
    """Remove the module hooks."""
    for module in modules:
        module.__dict__.pop(_SCRIPT, None)
        module._forward_pre_hooks.pop(_KEY, None)  # type: ignore[call-overload] # noqa: SLF001
        module._forward_hooks.pop(_KEY, None)  # type: ignore[call-overload] # noqa: SLF001
        module._forward_hooks_always_called.pop(_KEY, None)  # type: ignore[call-overload] # noqa: SLF001


def gated(model: torch.nn.Module) -> bool:
    """Whether a module, or one in it, is offloaded."""
    return any(_gate_of(module) is not None for module in model.modules())


def _gate_of(module: torch.nn.Module) -> Gate | None:
    gate: Any = module.__dict__.get("_forward_hooks_always_called", {}).get(_KEY)
    return gate  # type: ignore[no-any-return]


def _owners(model: torch.nn.Module) -> dict[int, list[_Owned]]:
    owners: dict[int, list[_Owned]] = {}
    for module in model.modules():
        table: dict[str, Any] = module._parameters  # noqa: SLF001
        for name, parameter in table.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((table, name, parameter))
    return owners


def _before(module: torch.nn.Module, args: Any) -> None:
    del args
    gate: Any = module._forward_hooks_always_called.get(_KEY)  # type: ignore[call-overload] # noqa: SLF001
    if gate is None:
        raise _hooks_moved(module, "")
    residency = gate.residency
    if gate.open > 0 or gate.root or residency.turns.several or residency.stages is not None:
        # The module calls itself, or another thread or micro-batch may have materialized the units.
        _enter(module, gate)
        return
    for home in gate.homes:
        if not home.holders:
            _enter(module, gate)
            return


def _after(module: torch.nn.Module, args: Any, result: Any) -> None:
    del args
    gate: Any = module._forward_hooks_always_called.get(_KEY)  # type: ignore[call-overload] # noqa: SLF001
    if gate is not None and gate.open > 0:
        _leave(module, gate, result)


@torch._dynamo.disable  # type: ignore[untyped-decorator] # noqa: SLF001
def _enter(module: torch.nn.Module, gate: Gate) -> None:
    gate.residency.frames.enter(module, gate)


@torch._dynamo.disable  # type: ignore[untyped-decorator] # noqa: SLF001
def _leave(module: torch.nn.Module, gate: Gate, result: Any) -> None:
    gate.residency.frames.leave(module, gate, result)


def _refuse_wrappers() -> None:
    if torch._C._is_tracing():  # noqa: SLF001
        raise UsageError("torch.jit.trace would record placeholders, which have no values: trace copy.deepcopy(model)")
    if torch._C._functorch.peek_interpreter_stack() is not None:  # noqa: SLF001
        raise UsageError("torch.func transforms do not work on an offloaded model; use autograd's own functions")
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined] # noqa: SLF001
        raise UsageError(
            "saved-tensor hooks are disabled here, and an offloaded model reads weights again by them in the backward: "
            "compute it outside of disable_saved_tensors_hooks()"
        )


def _refuse_script() -> Any:
    raise UsageError("torch.jit.script would record placeholders, which have no values: script copy.deepcopy(model)")


def _hooks_moved(module: torch.nn.Module, name: str) -> UsageError:
    whose = f"{name!r}, a {type(module).__name__}," if name else f"a {type(module).__name__}"
    return UsageError(
        f"{whose} was given the hooks of an offloaded module, as fuse_modules() moves them: fuse before offload(), or "
        "a copy.deepcopy() of the model, which is a plain one"
    )


def refuse_moved(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
    """Refuse an offloaded parameter in another place of a model, as pruning, parametrizing and tying put it there.

    And what takes the place of one that was taken out, as the older `weight_norm` does it.
    """
    if parameter is None:
        return
    gate = _gate_of(module)
    table: dict[str, Any] = module._parameters  # noqa: SLF001
    gone = {} if gate is None else {of: one for where, of, one in gate.owned if where is table and of not in table}
    place: Any = parameter.__dict__.get("_memascend")
    if place is None:
        # Within materialized() all parameters are plain.
        place = next((one.__dict__["_memascend"] for one in gone.values() if "_memascend" in one.__dict__), None)
        if place is None:
            return
    elif gate is None:
        # Modules of other models may have it, such as an LM head outside of the model.
        if not isinstance(module, torch.nn.utils.parametrize.ParametrizationList):
            return
    elif any(where is table and of == name and one is parameter for where, of, one in gate.owned):
        return
    elif all(of != name and one is not parameter for _, of, one in gate.owned):
        # Nothing of this module's own goes, and the parameter stays where it is.
        return
    # Some take it from its own place first.
    table.update(gone)
    raise UsageError(
        f"{place.name!r} is offloaded and cannot become {name!r} of a {type(module).__name__}: parametrize, prune, "
        "normalise and tie before offload(); now save(), do it in a plain model with those weights, and offload() anew"
    )


def refuse_wrapper(wrapper: torch.nn.Module, name: str, module: torch.nn.Module | None) -> None:
    """Refuse wrappers for several devices when they are made: they may call what is in them from anywhere.

    And modules that were given the hooks of an offloaded module, as fusing modules moves them.
    """
    if module is None:
        return
    if _gate_of(module) is None:
        if _before in module._forward_pre_hooks.values() or _after in module._forward_hooks.values():  # noqa: SLF001
            for own in wrapper.modules():
                if _gate_of(own) is not None:
                    _hook(own)
            raise _hooks_moved(module, name)
        return
    kinds = [kind.__name__ for kind in type(wrapper).__mro__]
    for kind in ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel"):
        if kind in kinds:
            raise UsageError(
                f"{kind} does not work with an offloaded model: call the model itself. Several ranks share it by "
                "fully_shard() (torch.distributed.fsdp), on each block and on the model, before offload() on each rank"
            )


def _caller() -> FrameType | None:
    """The Python frame that called the module."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None and (frame.f_code.co_filename == __file__ or "torch/_dynamo" in frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _is_running(caller: FrameType | None) -> bool:
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None:
        if frame is caller:
            return True
        frame = frame.f_back
    return False
