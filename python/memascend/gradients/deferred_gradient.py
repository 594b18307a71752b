"""Holds one gradient outside of torch's sight, with the arithmetic that is still to be applied to it.

No tensor that torch knows: `handles` puts one in front of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NoReturn, Protocol

import torch

from memascend.errors import UsageError
from memascend.gradients.operations import UNSCALE, Operation, factors_of

if TYPE_CHECKING:
    from torch import Tensor

Notice = Literal["add", "change", "norm", "read", "scaler", "zero"]

# A loop that scales for ever without a step would grow the list for ever; then the gradient is rewritten once.
OPERATIONS_MAX = 64

# How often a gradient that only autograd has is counted while it is being accumulated: by its tensor and by what asks
# for the count; by autograd's buffer and call, by the dispatcher and by Python.
STORAGE_USES = 2
TENSOR_USES = 4


class Backing(Protocol):
    """The gradient behind a handle: where it lies is the keeper's business.

    Tensors go in and out with the handle's shape, dtype and strides. One that comes in belongs to the keeper, which
    may hold it for as long as it likes; one that goes out belongs to the handle, which writes into it.
    """

    @property
    def name(self) -> str:
        """The parameter, for messages."""

    @property
    def shape(self) -> torch.Size:
        """The parameter's shape."""

    @property
    def dtype(self) -> torch.dtype:
        """The gradient's dtype."""

    @property
    def fused(self) -> bool:
        """Whether the update already used the gradient, so that nothing but its norm is left. May change with time."""

    def read(self) -> Tensor:
        """A copy of the gradient. Not called once it is fused, as the others below but for norm() and noticed()."""

    def add(self, gradient: Tensor) -> None:
        """Add in the gradient's dtype, with the bits of torch's add_."""

    def assign(self, gradient: Tensor) -> None:
        """Replace the gradient."""

    def norm(self) -> float:
        """The 2-norm in double precision; asked for where the gradient is fused."""

    def nonfinite(self) -> bool | None:
        """Whether an infinity or a NaN is in there; None where that takes a read."""

    def noticed(self, what: Notice) -> None:
        """Something did more than pass the handle on; called before it happens, also where it then raises."""


def is_shared(gradient: Tensor) -> bool:
    """Whether a gradient that reached a handle may be somebody's else, who may write to it while it is being stored.

    `backward(gradient=mine)` brings such a one where nothing on the way makes another tensor of it.
    """
    if torch._C._current_graph_task_id() == -1:  # noqa: SLF001
        return True
    storage_uses = torch._C._storage_Use_Count(gradient.untyped_storage()._cdata)  # noqa: SLF001
    tensor_uses = gradient._use_count()  # noqa: SLF001
    return bool(storage_uses > STORAGE_USES or tensor_uses > TENSOR_USES)


class Dropped:
    """What keeps a gradient that was dropped: nobody."""

    def __init__(self, name: str, shape: torch.Size, dtype: torch.dtype) -> None:
        self.name = name
        self.shape = shape
        self.dtype = dtype

    def _refuse(self) -> NoReturn:
        raise UsageError(
            f"this gradient of {self.name} was dropped, by zero_grad() or because p.grad was replaced: "
            "take p.grad.clone() before, which lasts"
        )

    @property
    def fused(self) -> bool:
        """Asked before anything is done with it."""
        self._refuse()

    def read(self) -> Tensor:
        """Refused."""
        self._refuse()

    def add(self, gradient: Tensor) -> None:
        """Refused."""
        del gradient
        self._refuse()

    def assign(self, gradient: Tensor) -> None:
        """Refused."""
        del gradient
        self._refuse()

    def norm(self) -> float:
        """Refused."""
        self._refuse()

    def nonfinite(self) -> bool:
        """Refused."""
        self._refuse()

    def noticed(self, what: Notice) -> None:
        """Refused."""
        del what
        self._refuse()


class DeferredGradient:
    """What a handle and everything detached from it share.

    Attributes:
        backing: where the bytes are.
        operations: what was done to the gradient since, and is not in those bytes.
        strides: of the gradient, and of every tensor that goes to or comes from the keeper.
        device: where results appear.
    """

    def __init__(self, backing: Backing, strides: tuple[int, ...], device: torch.device) -> None:
        self.backing = backing
        self.operations: list[Operation] = []
        self.strides = strides
        self.device = device

    # --- its value ----------------------------------------------------------------

    def empty(self) -> Tensor:
        """Memory for a gradient, its values undefined."""
        return torch.empty_strided(self.backing.shape, self.strides, dtype=self.backing.dtype, device=self.device)

    def drop(self) -> None:
        """It is gone: whoever still has a handle is told, and never sees the next gradient of the parameter."""
        self.backing = Dropped(self.backing.name, self.backing.shape, self.backing.dtype)
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
        """The operations as numbers to multiply by, or None; see GradientHandle.factors()."""
        return factors_of(self.operations, self.backing.dtype, len(self.backing.shape), self.device)

    def materialize(self) -> Tensor:
        """The gradient as it is now, in new memory."""
        if self.backing.fused:
            raise UsageError(
                f"the gradient of {self.backing.name} is gone, the update already used it: "
                "pass gradients='ssd' to offload() to read gradients before step()"
            )
        if self.operations and self.operations[0].overwrites:
            return self.replay(self.empty())
        return self.replay(self.backing.read().to(self.device))

    def read(self, what: Notice = "read") -> Tensor:
        """Materialize it for somebody, which is worth a notice."""
        self.backing.noticed(what)
        return self.materialize()

    def norm(self, operation: Operation) -> Tensor:
        """A norm, by torch; the 2-norm also once the gradient is used."""
        self.backing.noticed("norm")
        if not self.backing.fused:
            result: Tensor = operation.apply(self.materialize())
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

    # --- what changes it ----------------------------------------------------------

    def assign(self, tensor: Tensor) -> None:
        """Replace it by a tensor that nobody else writes to."""
        self.backing.assign(self.laid_out(tensor))
        self.operations.clear()

    def overwrite(self, source: Tensor, name: str) -> None:
        """Replace it by what copy_ makes of the source."""
        self.backing.noticed("change")
        if self.backing.fused:
            self._refuse_change(name)
        self.assign(self.empty().copy_(source))

    def accumulate(self, operation: Operation, gradient: Tensor) -> None:
        """Add a gradient of the same shape and dtype; `operation` is the addition as torch was asked for it."""
        self.backing.noticed("add")
        if self.backing.fused:
            raise UsageError(
                f"a second gradient for {self.backing.name}, whose update already used the first: call step() and "
                "zero_grad() after each backward, or pass accumulation_steps= or gradients='ssd' to offload()"
            )
        if self.operations:
            total = self.materialize()
            operation.apply(total)
            self.assign(total)
            return
        self.backing.add(self.laid_out(gradient.clone() if is_shared(gradient) else gradient))

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
        # The replay finds again, for nobody.
        own = (torch.zeros_like(found), *operation.arguments[1:])
        self._append(Operation(operation.function, UNSCALE, own, operation.options, listed=True))

    def _append(self, operation: Operation) -> None:
        # Asking a GPU for the number would make every clip wait for it; only what is refused otherwise is worth that.
        if (self.backing.fused or not operation.is_on_gpu) and operation.changes_nothing():
            return
        if self.backing.fused:
            self._refuse_change(operation.name)
        if operation.overwrites:
            self.operations.clear()
        self.operations.append(operation.owned())
        if len(self.operations) > OPERATIONS_MAX:
            self.assign(self.materialize())

    # --- what cannot be -----------------------------------------------------------

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
