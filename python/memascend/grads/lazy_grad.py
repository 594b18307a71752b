"""Stands in `p.grad` for a gradient that is on storage or already used, with arithmetic that is still to be applied."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, cast

import torch
from torch.utils._pytree import tree_leaves, tree_map

from memascend.errors import UsageError
from memascend.grads.operations import UNSCALE, Operation, is_recordable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from memascend.grads.gradient import Gradient


Notice = Literal["add", "change", "norm", "read", "scaler", "zero"]
# A loop that scales for ever without a step would grow the list for ever; then the gradient is rewritten once.
OPERATIONS_MAX = 64
# How often a gradient's memory is counted that no other tensor has: its own use, and that of what asks.
_STORAGE_USES = 2
# How often a gradient that only autograd has is counted while it is being accumulated: by autograd's buffer and call,
# by the dispatcher and by Python.
_TENSOR_USES = 4


def shares_memory(values: Tensor) -> bool:
    """Whether another tensor has the memory."""
    return bool(torch._C._storage_Use_Count(values.untyped_storage()._cdata) > _STORAGE_USES)  # noqa: SLF001


def is_shared(gradient: Tensor) -> bool:
    """Whether user code may have a gradient that reached a handle, and may write to it while it is being stored.

    `backward(gradient=mine)` passes on such a tensor where no operation in between makes a new one.
    """
    if torch._C._current_graph_task_id() == -1:  # noqa: SLF001
        return True
    return shares_memory(gradient) or bool(gradient._use_count() > _TENSOR_USES)  # noqa: SLF001


@dataclass
class Dropped:
    """Stands for a gradient that was dropped: any other access raises an error."""

    name: str
    shape: torch.Size
    dtype: torch.dtype

    def __getattr__(self, _: str) -> NoReturn:
        raise UsageError(
            f"this gradient of {self.name} was dropped, by zero_grad() or because p.grad was replaced: "
            "take p.grad.clone() before, which lasts"
        )


@dataclass(eq=False)
class DeferredGradient:
    """The state that a handle shares with all tensors detached from it.

    Tensors go to and come from `backing` with the handle's shape, dtype and strides. One that goes there is its own,
    and is held for as long as it likes; one that comes from there belongs to the handle, which writes into it.
    """

    backing: Gradient
    strides: tuple[int, ...]
    device: torch.device  # where results appear
    # Arithmetic on the gradient that its stored bytes do not contain yet.
    operations: list[Operation] = field(default_factory=list)

    # --- its value ----------------------------------------------------------------

    def empty(self) -> Tensor:
        """Memory for a gradient, its values undefined."""
        return torch.empty_strided(self.backing.shape, self.strides, dtype=self.backing.dtype, device=self.device)

    def drop(self) -> None:
        """Drop it: a handle that user code still has raises an error, and never shows the parameter's next gradient."""
        self.backing = cast("Gradient", Dropped(self.backing.name, self.backing.shape, self.backing.dtype))
        self.operations.clear()

    def laid_out(self, tensor: Tensor) -> Tensor:
        """The tensor with the gradient's strides, nothing lazy about it; itself where it is so."""
        if tensor.stride() == self.strides and not tensor.is_conj() and not tensor.is_neg():
            return tensor
        return self.empty().copy_(tensor)

    def replay(self, tensor: Tensor) -> Tensor:
        """Do the operations to a tensor, in place, and return it."""
        with torch.no_grad():
            for operation in self.operations:
                operation.apply(tensor)
        return tensor

    def factors(self) -> tuple[float, ...] | None:
        """The operations as fp32 numbers: multiply in fp32 by each, in order, and round to the gradient's dtype.

        None where torch would compute another result: then the update takes materialize().
        """
        factors = []
        for operation in self.operations:
            factor = operation.factor(self.backing.dtype, len(self.backing.shape), self.device)
            if factor is None:
                return None
            factors.append(factor)
        return tuple(factors)

    def materialize(self) -> Tensor:
        """The gradient as it is now, in new memory. Not reported to noticed()."""
        if self.backing.fused:
            raise UsageError(
                f"the gradient of {self.backing.name} is gone, the update already used it: "
                "pass gradients='ssd' to offload() to read gradients before step()"
            )
        if self.operations and self.operations[0].overwrites:
            return self.replay(self.empty())
        return self.replay(self.backing.read().to(self.device))

    def read(self, what: Notice = "read") -> Tensor:
        """Materialize it for user code, which is reported to the backing."""
        self.backing.noticed(what)
        return self.materialize()

    def norm(self, operation: Operation) -> Tensor:
        """A norm, by torch; the 2-norm also once the gradient is used."""
        self.backing.noticed("norm")
        if not self.backing.fused:
            taken = None if self.operations or not operation.is_of_all else self.backing.norm_by(operation)
            result: Tensor = operation.apply(self.materialize()) if taken is None else taken
            return result
        order, dimensions, keep = (*operation.arguments, *(2, None, False)[len(operation.arguments) :])[:3]
        dtype = operation.options.get("dtype")
        if operation.listed:
            dimensions, keep, dtype = None, False, operation.arguments[1] if len(operation.arguments) > 1 else dtype
        if order != 2 or dimensions or keep:
            raise UsageError(
                f"of the gradient of {self.backing.name} only the 2-norm is left, the update already used it: "
                "pass gradients='ssd' to offload()"
            )
        return torch.tensor(self.backing.norm(), dtype=torch.float64, device="cpu").to(
            self.device, dtype or self.backing.dtype
        )

    # --- changes ------------------------------------------------------------------

    def assign(self, tensor: Tensor) -> None:
        """Replace it by a tensor to which no other code writes."""
        self.backing.assign(self.laid_out(tensor))
        self.operations.clear()

    def overwrite(self, source: Tensor) -> None:
        """Replace it by what copy_ makes of the source."""
        self.backing.noticed("change")
        if self.backing.fused:
            self._refuse_change("copy_")
        self.assign(self.empty().copy_(source))

    def accumulate(self, operation: Operation, gradient: Tensor) -> None:
        """Add a gradient of the same shape and dtype; `operation` is the addition as torch was asked for it."""
        self.require_open()
        if self.operations:
            total = self.materialize()
            operation.apply(total)
            self.assign(total)
            return
        self.backing.add(self.laid_out(gradient.clone() if is_shared(gradient) else gradient))

    def replace_by_sum(self, total: Tensor) -> None:
        """Replace it by its sum with another gradient, which was computed elsewhere."""
        self.require_open()
        if self.operations:
            self.assign(total)
        else:
            self.backing.add(self.laid_out(total), summed=True)

    def require_open(self) -> None:
        """Note that another gradient is added, and reject it where an update used this one."""
        self.backing.noticed("add")
        if self.backing.fused:
            raise UsageError(
                f"a second gradient for {self.backing.name}, whose update already used the first: call step() and "
                "zero_grad() after each backward, or pass accumulation_steps= or gradients='ssd' to offload()"
            )

    def record(self, operation: Operation) -> None:
        """Do an elementwise operation by scalars, later."""
        self.backing.noticed("zero" if operation.name == "zero_" else "change")
        # torch's own complaint, if it has one, on as little as possible.
        shape = (0,) if self.backing.shape else ()
        operation.apply(torch.zeros(shape, dtype=self.backing.dtype, device=self.device))
        self._append(operation)

    def unscale(self, operation: Operation) -> None:
        """GradScaler's pass: whether anything is not finite is needed now, the product at step()."""
        self.backing.noticed("scaler")
        if self.backing.fused:
            raise UsageError(
                f"GradScaler comes too late for the gradient of {self.backing.name}, the update already used it: "
                "pass loss_scale= to offload() and call optimizer.backward(loss), or gradients='ssd'"
            )
        found: Tensor = operation.arguments[0]
        nonfinite = None if self.operations else self.backing.nonfinite()
        if nonfinite is None:
            operation.apply(self.materialize())
        elif nonfinite:
            found.fill_(1.0)
        # The replay writes its flag again, which is not used.
        own = (torch.zeros_like(found), *operation.arguments[1:])
        self._append(Operation(operation.function, UNSCALE, own, operation.options, listed=True))

    def _append(self, operation: Operation) -> None:
        # To read the number from a GPU, every clip would wait for it: only a call that is rejected otherwise does.
        if (self.backing.fused or not operation.is_on_gpu) and operation.changes_nothing():
            return
        if self.backing.fused:
            self._refuse_change(operation.name)
        if operation.overwrites:
            self.operations.clear()
        self.operations.append(operation.owned())
        if len(self.operations) > OPERATIONS_MAX:
            self.assign(self.materialize())

    # --- errors -------------------------------------------------------------------

    def refuse_memory(self, what: str) -> NoReturn:
        """Say that something needs memory which is not there."""
        raise UsageError(
            f"{what} needs the memory of {self.backing.name}'s gradient, which is kept elsewhere: "
            "take p.grad.clone(), or pass gradients='ram' to offload()"
        )

    def _refuse_change(self, name: str) -> NoReturn:
        if name == "zero_":
            raise UsageError(
                f"zero_grad(set_to_none=False) would leave a zero gradient for {self.backing.name} to the next step, "
                "but gradients='fused' keeps none: leave set_to_none=True, or pass gradients='ssd' to offload()"
            )
        raise UsageError(
            f"{name}() comes too late for the gradient of {self.backing.name}, the update already used it: "  # noqa: S608
            "pass max_grad_norm= to offload() (and set the Trainer's to 0), or gradients='ssd'"
        )


# These look at shape and dtype alone.
SHAPE_ONLY = frozenset((
    "empty_like", "full_like", "is_pinned", "is_same_size", "new_empty", "new_empty_strided", "new_full", "new_ones",
    "new_zeros", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like",
))  # fmt: skip


def _refusing(what: str) -> Any:
    def refuse(self: GradientHandle, *_: Any, **__: Any) -> NoReturn:
        self.gradient.refuse_memory(what)

    return refuse


class GradientHandle(torch.Tensor):
    """A gradient without its bytes."""

    gradient: DeferredGradient

    @staticmethod
    def __new__(cls: type[Self], gradient: DeferredGradient) -> Self:
        """Make a tensor that has all of a tensor but its memory."""
        handle: Self = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001
            cls,
            gradient.backing.shape,
            strides=gradient.strides,
            dtype=gradient.backing.dtype,
            device=gradient.device,
        )
        return handle

    def __init__(self, gradient: DeferredGradient) -> None:
        self.gradient = gradient

    # Results are plain tensors; torch's default would make handles of them.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment] # noqa: SLF001

    @property
    def backing(self) -> Gradient:
        """Where the gradient is."""
        return self.gradient.backing

    # --- calls of torch -----------------------------------------------------------

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Every operation of torch that gets a handle comes through here."""
        if torch.is_inference_mode_enabled():
            # A tensor that is made under it could not be written to outside it.
            with torch.inference_mode(False), torch.no_grad():
                return cls.__torch_dispatch__(func, types, args, kwargs)
        options = kwargs or {}
        name = func._schema.name.removeprefix("aten::")  # noqa: SLF001
        if name == "detach":
            # Another tensor that is the same gradient.
            return GradientHandle(args[0].gradient)
        if name in SHAPE_ONLY:
            return func(*tree_map(_without_values, args), **tree_map(_without_values, options))
        # Under inference_mode composite operations arrive here, too.
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):  # noqa: SLF001
            return func.decompose(*args, **options)
        special = _SPECIAL.get(name)
        return special(func, args, options) if special is not None else _through_memory(func, args, options)

    # --- calls outside of the dispatcher ------------------------------------------

    @property
    def data(self) -> Tensor:
        """The same gradient, as torch's `.data` is; setting it changes the gradient."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        self.detach().copy_(value)

    def tolist(self) -> Any:
        """Read the numbers."""
        return self.gradient.read().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A plain tensor: a copy is no gradient of a parameter yet."""
        if id(self) not in memo:
            memo[id(self)] = self.gradient.read()
        copy: Tensor = memo[id(self)]
        return copy

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        del tensor_contents
        if self.backing.fused:
            return f"GradientHandle({self.backing.name}, shape={tuple(self.shape)}, dtype={self.dtype}, already used)"
        return f"GradientHandle({self.backing.name}, {self.gradient.read()!r})"

    def __format__(self, format_spec: str) -> str:
        return format(self.item(), format_spec) if self.dim() == 0 else object.__format__(self, format_spec)

    # A file or another process has no store behind it; and there is no memory to share, to point to, or to walk over.
    __reduce_ex__ = _refusing("pickling")
    __array__ = _refusing("numpy")
    __dlpack__ = _refusing("dlpack")
    numpy = _refusing("numpy()")
    data_ptr = _refusing("data_ptr()")
    untyped_storage = _refusing("untyped_storage()")
    storage = _refusing("storage()")
    _typed_storage = _refusing("storage()")
    share_memory_ = _refusing("share_memory_()")
    apply_ = _refusing("apply_()")
    map_ = _refusing("map_()")


def _handles(values: Any) -> Iterator[GradientHandle]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, GradientHandle))


def _without_values(value: object) -> object:
    return value.gradient.empty() if isinstance(value, GradientHandle) else value


def _is_view(func: Any) -> bool:
    returns = func._schema.returns  # noqa: SLF001
    return any(result.alias_info is not None and not result.alias_info.is_write for result in returns)


def _written(func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> list[GradientHandle]:
    written: list[GradientHandle] = []
    for index, argument in enumerate(func._schema.arguments):  # noqa: SLF001
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) and not argument.kwarg_only else options.get(argument.name)
        written.extend(_handles(value))
    return written


def _through_copies(func: Any, args: tuple[Any, ...], options: dict[str, Any], written: list[GradientHandle]) -> Any:
    """Do any operation on copies of the gradients, and write back the copies that it changed."""
    # Two handles of one gradient are one tensor to the operation.
    copies: dict[DeferredGradient, Tensor] = {}
    changed = {handle.gradient: handle for handle in written}

    def copy(value: object) -> object:
        if not isinstance(value, GradientHandle):
            return value
        if value.gradient not in copies:
            copies[value.gradient] = value.gradient.read("change" if value.gradient in changed else "read")
        return copies[value.gradient]

    result = func(*tree_map(copy, args), **tree_map(copy, options))
    back: dict[int, GradientHandle] = {}
    for gradient, handle in changed.items():
        tensor = copies[gradient]
        if tensor.shape != handle.shape:
            gradient.refuse_memory(f"{func}")
        gradient.assign(tensor)
        back[id(tensor)] = handle
    return tree_map(lambda value: back.get(id(value), value), result) if back else result


def _through_memory(func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Do what looks at values, or changes them."""
    written = _written(func, args, options)
    name = func._schema.name.removeprefix("aten::")  # noqa: SLF001
    if torch.Tag.inplace_view in func.tags if written else _is_view(func):
        next(_handles((args, options))).gradient.refuse_memory(f"{name}()")
    if written and any(True for _ in _handles(args[:1])):
        return _each(func, args, options, _change)
    return _through_copies(func, args, options, written)


def _each(
    func: Any,
    args: tuple[Any, ...],
    options: dict[str, Any],
    one: Callable[[GradientHandle, Operation], Any],
) -> Any:
    """Do one gradient of a list after the other, so that one at a time is in memory; plain tensors go together."""
    first, rest = args[0], args[1:]
    name = func._schema.name.removeprefix("aten::")  # noqa: SLF001
    if isinstance(first, GradientHandle):
        return one(first, Operation(func, name, rest, options))
    count = len(first)
    if any(isinstance(value, torch.Tensor) and value.dim() for value in rest):
        return _through_copies(func, args, options, _written(func, args, options))

    def part(indices: list[int]) -> tuple[Any, ...]:
        return tuple(
            [value[index] for index in indices] if isinstance(value, list | tuple) and len(value) == count else value
            for value in rest
        )

    plain = [index for index in range(count) if not isinstance(first[index], GradientHandle)]
    results: list[Any] = [None] * count
    if plain:
        # A handle may still stand in another list of the call.
        done = _through_copies(func, ([first[index] for index in plain], *part(plain)), options, [])
        for index, result in zip(plain, done or [], strict=False):
            results[index] = result
    short = name.removeprefix("_foreach_")
    for index in range(count):
        if isinstance(first[index], GradientHandle):
            results[index] = one(first[index], Operation(func, short, part([index]), options, listed=True))
    return results if func._schema.returns else None  # noqa: SLF001


def _norms(func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return _each(func, args, options, lambda handle, operation: handle.gradient.norm(operation))


def _unscale(func: Any, args: tuple[list[Tensor], Tensor, Tensor], options: dict[str, Any]) -> None:
    del options
    tensors, found, inverse = args
    plain = [tensor for tensor in tensors if not isinstance(tensor, GradientHandle)]
    if plain:
        func(plain, found, inverse)
    for handle in _handles(tensors):
        handle.gradient.unscale(Operation(func, UNSCALE, (found, inverse), listed=True))


def _change(handle: GradientHandle, operation: Operation) -> GradientHandle:
    """Change one gradient in place: with its keeper, in the record, or by way of a copy."""
    name, arguments, options = operation.name, operation.arguments, operation.options
    values = [value[0] if isinstance(value, list | tuple) and len(value) == 1 else value for value in arguments]
    if name == "add_" and not options and len(values) == 1 and _is_gradient_of(handle, values[0]):
        gradient = _plain(values[0])
        argument = [gradient] if operation.listed else gradient
        addition = Operation(operation.function, name, (argument,), listed=operation.listed)
        handle.gradient.accumulate(addition, gradient)
    elif name == "copy_" and isinstance(values[0], GradientHandle) and values[0].gradient is handle.gradient:
        # On itself, as a module's `.cpu()` does where nothing moves: it may be of a gradient that was used.
        pass
    elif name == "copy_":
        handle.gradient.overwrite(_plain(values[0]))
    elif is_recordable(name, [*values, *options.values()]):
        handle.gradient.record(operation)
    else:
        first = [handle] if operation.listed else handle
        _through_copies(operation.function, (first, *arguments), options, [handle])
    return handle


def _plain(value: Tensor) -> Tensor:
    return value.gradient.read() if isinstance(value, GradientHandle) else value


def _is_gradient_of(handle: GradientHandle, value: object) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and value.shape == handle.shape
        and value.dtype == handle.dtype
    )


# Operations that need less than the values.
_SPECIAL: dict[str, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    UNSCALE: _unscale,
    "linalg_vector_norm": _norms,
    "_foreach_norm": _norms,
}
