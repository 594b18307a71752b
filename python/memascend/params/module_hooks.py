"""Hooks modules: loads their parameters before they compute, and cleans up after interrupts and failed backwards.

[Note: failed backwards] Autograd keeps the unfinished work of a failed backward in a queue of the thread that ran the
backward. The process crashes if tensors in that queue are freed after Python has shut down. `drain_autograd_queue`
empties the queue: `_End` calls it when a thread ends, and `_exit` when the process ends.
"""

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
    from memascend.params.unit import CachedUnit


def drain_autograd_queue() -> None:
    """Frees the work that failed backwards left in this thread's queue; does nothing while this thread runs a backward.

    See [Note: failed backwards].
    """
    if torch._C._current_graph_task_id() != -1:  # noqa: SLF001
        return
    # A new backward first frees the queued work of failed backwards. In a forked child torch raises RuntimeError if the
    # parent had threads of autograd.
    with contextlib.suppress(RuntimeError), torch.inference_mode(mode=False), torch.enable_grad():
        torch.zeros((), requires_grad=True, device="cpu").backward()


class _End:
    """Calls `drain_autograd_queue` when it is deleted. Python deletes the `_End` of a thread when the thread ends."""

    def __del__(self) -> None:
        drain_autograd_queue()


class _Thread(threading.local):
    def __init__(self) -> None:
        self._end: _End | None = None

    def watch(self) -> None:
        """Makes this thread call `drain_autograd_queue` when it ends; call it where a backward may begin."""
        if not _exiting:
            self._end = self._end or _End()

    def end(self) -> None:
        """Deletes this thread's `_End`. The exit handler calls this method, because the main thread ends too late."""
        self._end = None


_thread = _Thread()
note_thread = _thread.watch
# True once the exit handler has begun: then no thread gets an `_End`, whose deletion could call torch too late.
_exiting = False


@atexit.register
def _exit() -> None:
    global _exiting  # noqa: PLW0603
    _exiting = True
    _thread.end()


# The key of memascend's hooks in the hook tables of a module.
_KEY = "memascend"
# The method of a module that TorchScript calls first.
_SCRIPT = "__prepare_scriptable__"


# Where a parameter is registered: the table `_parameters` of a module, a name in this table, and the parameter.
_Owned = tuple[dict[str, Any], str, torch.nn.Parameter]


@dataclass(eq=False, slots=True)
class HookState:
    """The state of a module's hooks: the units to materialize, and how many calls of the module are running."""

    units: tuple[CachedUnit, ...]
    # The parameters of these units, with the tables of the modules that own them.
    owned: tuple[_Owned, ...]
    residency: Residency
    root: bool  # True if the module is the model that was given to offload()
    open: int = 0  # the number of frames of this module on the stacks of all threads

    def count(self, module: torch.nn.Module) -> None:
        """Sets `open` by counting all frames of the module: after an interrupt the old number may be wrong."""
        with self.residency.lock:
            self.open = sum(frame.module is module for _, stack in self.residency.frames.stacks for frame in stack)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            "an offloaded model cannot be pickled with its hooks, because its values are on storage: pickle "
            "copy.deepcopy(model), pickle the model within memascend.materialized(model), or save model.state_dict()"
        )


class _Frame:
    """One running call of a module: the units materialized for the call, and the hooks pushed for it."""

    __slots__ = ("_pushed", "_task", "_units", "caller", "module")

    def __init__(self, module: torch.nn.Module, caller: FrameType | None) -> None:
        """`caller`: torch's Python frame that runs the thread's outermost module; None for inner modules."""
        self.module = module
        self.caller = caller
        self._units: list[CachedUnit] = []
        self._pushed = False
        # The identifier of the backward that runs now, in which `begin` will push the hooks; -1 if no backward runs.
        self._task = torch._C._current_graph_task_id()  # noqa: SLF001

    def begin(self, state: HookState) -> None:
        """Materializes the module's units, and pushes the saved-tensor hooks; after an exception `end` undoes both."""
        residency = state.residency
        for unit in state.units:
            residency.materialize(unit)
            self._units.append(unit)
        if self._units or (state.root and residency.hooks.keeper is not None):
            self._pushed = residency.hooks.push()

    def end(self, residency: Residency, holder: int | None = None) -> None:
        """Undoes `begin`.

        `holder` is the thread that called `begin`, if that thread has ended. The saved-tensor hooks of the thread have
        ended with it.
        """
        if self._pushed:
            self._pushed = False
            # After each node of a backward, autograd itself removes hooks that were pushed inside the node. So outside
            # of the backward in which `begin` ran, the top hooks belong to other code.
            if holder is None and self._task == torch._C._current_graph_task_id():  # noqa: SLF001
                residency.hooks.pop()
        while self._units:
            residency.offload(self._units.pop(), holder)


class _Stack(threading.local):
    """The modules that a thread is computing."""

    def __init__(self, frames: Frames) -> None:
        self.frames: list[_Frame] = []
        frames.begin_thread(self.frames)


class Frames:
    """The modules that each thread is computing, outermost first.

    Attributes:
        stacks: each thread with its stack. If an interrupt has ended a thread, its stack may still have frames.
    """

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self.stacks: list[tuple[threading.Thread, list[_Frame]]] = []
        self._own = _Stack(self)

    @property
    def stack(self) -> list[_Frame]:
        """The stack of this thread."""
        return self._own.frames

    def begin_thread(self, own: list[_Frame]) -> None:
        """Registers `own` as the stack of the calling thread."""
        note_thread()
        self.stacks = [(thread, stack) for thread, stack in self.stacks if stack or thread.is_alive()]
        self.stacks.append((threading.current_thread(), own))

    def enter(self, module: torch.nn.Module, state: HookState) -> None:
        """Materializes all units of a module that is about to compute. After an error, offloads these units again."""
        self._residency.units.require_open()
        if not state.units:
            # For a module with units, `Residency.materialize` makes this call.
            self._residency.turns.note_thread()
        _refuse_wrappers()
        for table, name, parameter in state.owned:
            if table.get(name) is not parameter:
                raise UsageError(
                    f"parameter {name!r} of a module is not the parameter that was offloaded. After offload() it was "
                    "deleted, replaced or tied to another parameter, or torch.func.functional_call replaces it during "
                    "a call. Undo this change. Or call save(), load the weights into a plain model, change that model, "
                    "and call offload() on it. To change only values, use memascend.materialized(model, modify=True)"
                )
        stack = self.stack
        if state.root:
            self.unwind()
        if self._residency.stages is not None:
            self._residency.stages.arrive(state.units)
        self._residency.session.entered(module, outermost=not stack)
        frame = _Frame(module, None if stack else _caller())
        # The frame is pushed before `begin`, so that `unwind` finds it after an interrupt at any line.
        stack.append(frame)
        try:
            frame.begin(state)
            state.count(module)
        except BaseException:
            frame.end(self._residency)
            stack.remove(frame)
            state.count(module)
            raise

    def leave(self, module: torch.nn.Module, state: HookState, result: Any) -> None:
        """Undoes `enter` if `enter` pushed a frame. `result` is the output of the module."""
        if self._residency.stages is not None and state.units:
            self._announce(state, result)
        stack = self.stack
        if not stack or stack[-1].module is not module:
            return
        stack[-1].end(self._residency)
        stack.pop()
        state.count(module)

    def _announce(self, state: HookState, result: Any) -> None:
        """Registers hooks that notify `stages` when the backward of the module begins.

        Unpacking a saved weight notifies `stages`, too, but the backward of an embedding unpacks no weight.
        """
        residency = self._residency

        def begin(_: Any) -> None:
            if residency.stages is not None:
                residency.stages.arrive(state.units)

        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                value.grad_fn.register_prehook(begin)

    @property
    def inside(self) -> bool:
        """True while this thread computes a module."""
        stack = self.stack
        return bool(stack) and _is_running(stack[0].caller)

    def unwind(self, *, all_of_it: bool = False) -> None:
        """Ends modules that an interrupt left open; with `all_of_it`, also modules that this thread is computing."""
        if all_of_it or not self.inside:
            self._end(self.stack)
            if works_for_another():
                # All micro-batches of an `accumulate()` call share the materialized units, so one micro-batch must not
                # offload them.
                return
            # An interrupt in `begin` may leave units and hooks that no frame has recorded.
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
            state = _state_of(module)
            if state is not None:
                state.count(module)


def install_hooks(
    model: torch.nn.Module,
    modules: Iterable[tuple[torch.nn.Module, tuple[CachedUnit, ...]]],
    residency: Residency,
) -> None:
    """Installs hooks on each module in `modules`, with the units that the hooks materialize.

    `modules` includes `model` itself.
    """
    owners = _owners(model)
    # All modules with the same units share one tuple of `_Owned`.
    owned: dict[tuple[CachedUnit, ...], tuple[_Owned, ...]] = {}
    for module, units in modules:
        if units not in owned:
            owned[units] = tuple(
                one for unit in units for place in unit.places for one in owners.get(id(place.parameter), ())
            )
        if module._modules:  # noqa: SLF001
            # TorchScript calls `_refuse_script`, which raises an error that says what to do. A module without children
            # does not need this method: TorchScript fails at the module's hooks.
            module.__dict__[_SCRIPT] = _refuse_script
        _hook(module)
        # torch only looks up keys in this table, so its values can be `HookState` objects. A separate attribute would
        # make Python give each module an unshared `__dict__`, which takes more memory.
        state: Any = HookState(units, owned[units], residency, root=module is model)
        module._forward_hooks_always_called[_KEY] = state  # type: ignore[index] # noqa: SLF001


def _hook(module: torch.nn.Module) -> None:
    module._forward_pre_hooks[_KEY] = _before  # type: ignore[index] # noqa: SLF001
    # Our hook must run first, because hooks of other code may compute with the parameters.
    module._forward_pre_hooks.move_to_end(_KEY, last=False)  # type: ignore[attr-defined] # noqa: SLF001
    module._forward_hooks[_KEY] = _after  # type: ignore[index] # noqa: SLF001


def remove_hooks(modules: Iterable[torch.nn.Module]) -> None:
    """Removes the hooks that `install_hooks` installed."""
    for module in modules:
        module.__dict__.pop(_SCRIPT, None)
        module._forward_pre_hooks.pop(_KEY, None)  # type: ignore[call-overload] # noqa: SLF001
        module._forward_hooks.pop(_KEY, None)  # type: ignore[call-overload] # noqa: SLF001
        module._forward_hooks_always_called.pop(_KEY, None)  # type: ignore[call-overload] # noqa: SLF001


def has_hooks(model: torch.nn.Module) -> bool:
    """True if a module or one of its submodules is offloaded."""
    return any(_state_of(module) is not None for module in model.modules())


def _state_of(module: torch.nn.Module) -> HookState | None:
    state: Any = module.__dict__.get("_forward_hooks_always_called", {}).get(_KEY)
    return state  # type: ignore[no-any-return]


def _owners(model: torch.nn.Module) -> dict[int, list[_Owned]]:
    owners: dict[int, list[_Owned]] = {}
    for module in model.modules():
        table: dict[str, Any] = module._parameters  # noqa: SLF001
        for name, parameter in table.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((table, name, parameter))
    return owners


def _before(module: torch.nn.Module, args: Any) -> None:
    """Forward pre-hook: enters the module, unless its units are materialized and no case below applies."""
    del args
    state: Any = module._forward_hooks_always_called.get(_KEY)  # type: ignore[call-overload] # noqa: SLF001
    if state is None:
        raise _hooks_moved(module, "")
    residency = state.residency
    if state.open > 0 or state.root or residency.turns.several or residency.stages is not None:
        # In these cases the check of `holders` below is not enough. An open module may be calling itself. Another
        # thread or micro-batch may have materialized the units. The root always gets a frame.
        _enter(module, state)
        return
    for unit in state.units:
        if not unit.holders:
            _enter(module, state)
            return


def _after(module: torch.nn.Module, args: Any, result: Any) -> None:
    """Forward hook, also called after an exception: leaves the module if `_before` entered it."""
    del args
    state: Any = module._forward_hooks_always_called.get(_KEY)  # type: ignore[call-overload] # noqa: SLF001
    if state is not None and state.open > 0:
        _leave(module, state, result)


@torch._dynamo.disable  # type: ignore[untyped-decorator] # noqa: SLF001
def _enter(module: torch.nn.Module, state: HookState) -> None:
    state.residency.frames.enter(module, state)


@torch._dynamo.disable  # type: ignore[untyped-decorator] # noqa: SLF001
def _leave(module: torch.nn.Module, state: HookState, result: Any) -> None:
    state.residency.frames.leave(module, state, result)


def _refuse_wrappers() -> None:
    if torch._C._is_tracing():  # noqa: SLF001
        raise UsageError("torch.jit.trace would record placeholders, which have no values: trace copy.deepcopy(model)")
    if torch._C._functorch.peek_interpreter_stack() is not None:  # noqa: SLF001
        raise UsageError("torch.func transforms do not work on an offloaded model: use torch.autograd instead")
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined] # noqa: SLF001
        raise UsageError(
            "saved-tensor hooks are disabled here, but an offloaded model needs them to read its weights in the "
            "backward: call the model outside of disable_saved_tensors_hooks()"
        )


def _refuse_script() -> Any:
    raise UsageError("torch.jit.script would record placeholders, which have no values: script copy.deepcopy(model)")


def _hooks_moved(module: torch.nn.Module, name: str) -> UsageError:
    whose = f"{name!r}, a {type(module).__name__}," if name else f"a {type(module).__name__}"
    return UsageError(
        f"{whose} has the hooks of an offloaded module, perhaps because fuse_modules() moved them: fuse modules before "
        "offload(), or fuse modules of a copy.deepcopy() of the model, which is not offloaded"
    )


def refuse_moved(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
    """Rejects an offloaded parameter that pruning, parametrizing or tying registers in another place in the model.

    Also rejects any plain parameter that code registers in a module while an offloaded parameter of the module is
    deleted, as the older `weight_norm` does.
    """
    if parameter is None:
        return
    state = _state_of(module)
    table: dict[str, Any] = module._parameters  # noqa: SLF001
    removed = {} if state is None else {of: one for where, of, one in state.owned if where is table and of not in table}
    place: Any = parameter.__dict__.get("_memascend")
    if place is None:
        # A plain parameter may replace a deleted offloaded parameter. Within materialized() this is allowed: there no
        # parameter has the attribute `_memascend`.
        place = next((one.__dict__["_memascend"] for one in removed.values() if "_memascend" in one.__dict__), None)
        if place is None:
            return
    elif state is None:
        # A module outside of the offloaded model may share the parameter, as a separate LM head does.
        if not isinstance(module, torch.nn.utils.parametrize.ParametrizationList):
            return
    elif any(where is table and of == name and one is parameter for where, of, one in state.owned):
        return
    elif all(of != name and one is not parameter for _, of, one in state.owned):
        # The parameter belongs to another module, and replaces no parameter of this module.
        return
    # The caller may already have deleted this module's parameters: restore these parameters.
    table.update(removed)
    raise UsageError(
        f"{place.name!r} is offloaded and cannot become {name!r} of a {type(module).__name__}. Parametrize, prune, "
        "normalise and tie before offload(). To do so now, call save(), load the weights into a plain model, change "
        "that model, and call offload() on it"
    )


def refuse_wrapper(wrapper: torch.nn.Module, name: str, module: torch.nn.Module | None) -> None:
    """Rejects a wrapper for several devices around an offloaded module.

    Also rejects a module with hooks that fuse_modules() moved there from an offloaded module, and installs these hooks
    on the offloaded modules in `wrapper` again.
    """
    if module is None:
        return
    if _state_of(module) is None:
        if _before in module._forward_pre_hooks.values() or _after in module._forward_hooks.values():  # noqa: SLF001
            for own in wrapper.modules():
                if _state_of(own) is not None:
                    _hook(own)
            raise _hooks_moved(module, name)
        return
    kinds = [kind.__name__ for kind in type(wrapper).__mro__]
    for kind in ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel"):
        if kind in kinds:
            raise UsageError(
                f"{kind} does not work with an offloaded model: call the model itself. To train on several ranks, "
                "call fully_shard() (torch.distributed.fsdp) on each block and on the model, and then call offload() "
                "on each rank"
            )


def _caller() -> FrameType | None:
    """Returns torch's Python frame that runs the module and its hooks; the frame ends with the call of the module."""
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
