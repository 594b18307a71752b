"""Runs any torch optimizer with per-parameter state on streamed state, with torch's own arithmetic.

For each parameter::

    kept = generic.describe(optimizer, parameter, master_dtype)          # the state tensors of its entry
    state, updates = generic.import_state(optimizer, parameter, kept)    # what the optimizer has already
    function = generic.update(optimizer, group, kept, first=updates == 0)
    engine.apply(name, function, step=updates + 1, gradient=gradient, whole=kept.whole)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from memascend.engine.chunk import Chunk
from memascend.errors import ConfigError, UsageError
from memascend.optimizers.clone import attributes_of, group_options, named, stand_in, stepped
from memascend.optimizers.state_layout import Kept, describe, in_order
from memascend.optimizers.support import elementwise, require_streamable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = [
    "Chunk",
    "Kept",
    "describe",
    "elementwise",
    "export_state",
    "import_state",
    "require_streamable",
    "rust_options",
    "update",
]


def rust_options(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    master_dtype: torch.dtype | None = torch.float32,
) -> dict[str, Any] | None:
    """The numbers of `Engine.update` for a parameter of `dtype` in `group`; None where its update is torch's own code.

    AdamW and Adam run on our kernel, by their exact type, where master and moments are float32. The kernel keeps no
    maximum (amsgrad). A change between the two during a run is the caller's to refuse: they keep different state.
    """
    if type(optimizer) not in {torch.optim.AdamW, torch.optim.Adam} or group.get("amsgrad"):
        return None
    if dtype != torch.float32 and (master_dtype != torch.float32 or dtype not in {torch.bfloat16, torch.float16}):
        return None
    beta1, beta2 = group["betas"]
    return {
        "lr": float(group["lr"]),
        "betas": (float(beta1), float(beta2)),
        "eps": float(group["eps"]),
        "weight_decay": float(group["weight_decay"]),
        "decoupled": type(optimizer) is torch.optim.AdamW or bool(group.get("decoupled_weight_decay")),
        "maximize": bool(group.get("maximize")),
    }


def update(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    kept: Kept,
    *,
    first: bool,
    gradient: torch.Tensor | None = None,
    factors: Sequence[float] = (),
    grad_scale: float = 1.0,
) -> Callable[[Chunk], None]:
    """One update of one parameter, as the options stand now, for `Engine.apply` with `whole=kept.whole`.

    It runs the optimizer's own step on the memory of the chunks, and writes state that the step makes anew into theirs.

    Args:
        optimizer: the original; nothing is done to it.
        group: the group of the parameter, one of the optimizer's own.
        kept: what `describe` said of the parameter.
        first: whether the parameter has no state yet; what its chunks hold of it is then not read.
        gradient: in place of the chunks': all of the parameter's. A sparse one needs `whole=True`.
        factors: each multiplies the gradient in the gradient's own type, in this order.
        grad_scale: multiplies the gradient after that, in the type that the update computes in.
    """
    return _Update(optimizer, group, kept, first, gradient, tuple(factors), grad_scale)


class _Update:
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        group: Mapping[str, Any],
        kept: Kept,
        first: bool,
        gradient: torch.Tensor | None,
        factors: tuple[float, ...],
        grad_scale: float,
    ) -> None:
        self._optimizer = optimizer
        self._kept = kept
        self._first = first
        self._gradient = gradient
        self._factors = factors
        self._grad_scale = grad_scale
        # Taken now: the chunks come on the engine's thread, while a scheduler may already be at the next step's.
        self._attributes = attributes_of(optimizer)
        self._place = next(index for index, other in enumerate(optimizer.param_groups) if other is group)
        # A class that we do not know may read its first group, whichever the parameter is in.
        self._groups = [group_options(other) for other in optimizer.param_groups]
        if elementwise(optimizer):
            self._groups, self._place = [self._groups[self._place]], 0
        # The scalars as they were before the update: each chunk advances a copy.
        self._scalars: dict[str, torch.Tensor] = {}

    def __call__(self, chunk: Chunk) -> None:
        kept = self._kept
        whole = chunk.start == 0 and chunk.last
        if not whole and (kept.whole or (self._gradient is not None and self._gradient.layout != torch.strided)):
            raise UsageError(
                f"an update by {named(self._optimizer)} needs the whole parameter at once: apply whole=True"
            )
        values = self._laid(chunk.values, whole)
        target = self._laid(chunk.state["master"], whole) if kept.master else values
        parameter = stand_in(target, kept.attributes)
        parameter.grad = self._gradient_of(chunk, target, whole)
        state = {} if self._first else self._state_of(chunk, whole)
        groups: list[dict[str, Any]] = [{**group, "params": []} for group in self._groups]
        groups[self._place]["params"] = [parameter]
        copy = stepped(self._optimizer, self._attributes, groups, {parameter: state} if state else {})
        with torch.no_grad():
            if parameter.data_ptr() != target.data_ptr():
                target.copy_(parameter)
            if kept.master:
                values.copy_(target)
            self._keep(chunk, copy.state.get(parameter, {}), whole)

    def _laid(self, tensor: torch.Tensor, whole: bool) -> torch.Tensor:
        """A tensor of the parameter's shape, laid out as the parameter is; a part of it has no shape."""
        if not whole:
            return tensor.reshape(-1)
        return tensor if tensor.shape == self._kept.shape else tensor.as_strided(self._kept.shape, self._kept.stride)

    def _gradient_of(self, chunk: Chunk, target: torch.Tensor, whole: bool) -> torch.Tensor:
        gradient = chunk.gradient if self._gradient is None else self._gradient
        if gradient is None:
            raise UsageError(f"an update by {named(self._optimizer)} was begun without a gradient")
        if gradient.layout == torch.strided:
            if self._gradient is not None and not whole:
                self._gradient = in_order(gradient, self._kept)
                flat = self._gradient.as_strided((gradient.numel(),), (1,))
                gradient = flat[chunk.start : chunk.start + chunk.count]
            gradient = self._laid(gradient, whole)
        for factor in self._factors:
            gradient = gradient * factor
        gradient = gradient.to(target.dtype)
        return gradient if self._grad_scale == 1.0 else gradient * self._grad_scale

    def _shared(self, name: str) -> bool:
        """Whether every chunk has the same tensor under that name."""
        return self._kept.tensors[name].shape != self._kept.shape

    def _state_of(self, chunk: Chunk, whole: bool) -> dict[str, Any]:
        if chunk.start == 0:
            self._scalars = {}
        state: dict[str, Any] = {}
        for name, described in self._kept.tensors.items():
            if name == "master":
                continue
            tensor = chunk.state[name]
            if not self._shared(name):
                state[name] = self._laid(tensor, whole)
                continue
            if not whole:
                tensor = self._scalars.setdefault(name, tensor.clone()).clone()
            tensor = tensor.reshape(described.shape)
            state[name] = self._kept.numbers[name](tensor.item()) if name in self._kept.numbers else tensor
        return state

    def _keep(self, chunk: Chunk, state: Mapping[str, Any], whole: bool) -> None:
        """Write what the step made anew, and scalars with the last chunk, into the chunk's tensors."""
        made = {name: value for name, value in state.items() if value is not None}
        wanted = [name for name in self._kept.tensors if name != "master"]
        if made.keys() != set(wanted):
            raise UsageError(
                f"{named(self._optimizer)} now keeps {sorted(made)} for a parameter and kept {sorted(wanted)} when "
                "offload() looked: options that decide what it keeps (momentum, amsgrad, ...) must not change"
            )
        for name, value in made.items():
            shared = self._shared(name)
            if shared and not chunk.last:
                continue
            into = chunk.state[name]
            if name in self._kept.numbers:
                into.fill_(value)
                continue
            if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.dtype != into.dtype:
                raise self._unfit(name, value)
            into = into.reshape(self._kept.tensors[name].shape) if shared else self._laid(into, whole)
            if value.shape != into.shape:
                raise self._unfit(name, value)
            if value.data_ptr() != into.data_ptr():
                into.copy_(value)

    def _unfit(self, name: str, value: Any) -> UsageError:
        described = self._kept.tensors[name]
        got = type(value).__qualname__
        if isinstance(value, torch.Tensor):
            got = f"a tensor of {value.dtype}, {value.layout} and shape {list(value.shape)}"
        return UsageError(
            f"{named(self._optimizer)} made {got} of its state {name!r}; the store has {described.dtype} of "
            f"shape {list(described.shape)}"
        )


def import_state(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, kept: Kept
) -> tuple[dict[str, torch.Tensor], int]:
    """The state that the optimizer already has for `parameter`, as tensors for the store, and how many updates made it.

    The optimizer's own tensors where they fit; no master. State that torch does not count counts as one update, so that
    0 means none.

    Raises:
        ConfigError: some of it is missing.
    """
    existing = optimizer.state.get(parameter, {})
    existing = {name: value for name, value in existing.items() if value is not None}
    # State on "meta" was made with the parameter and holds nothing yet.
    if not existing or any(isinstance(value, torch.Tensor) and value.is_meta for value in existing.values()):
        return {}, 0
    missing = [name for name in kept.tensors if name not in existing and name != "master"]
    if missing:
        raise ConfigError(
            f"{named(optimizer)} has state for a parameter, but no {missing[0]!r}, which it keeps with the options it "
            "has now; set them back, or start without its state"
        )
    state = {}
    for name, described in kept.tensors.items():
        if name != "master":
            value = torch.as_tensor(existing[name]).detach()
            state[name] = in_order(value.to("cpu", described.dtype), kept)
    return state, max(1, int(existing.get("step", 1)))


def export_state(kept: Kept, state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """What torch's optimizer would have in `optimizer.state[parameter]`: the store's tensors under torch's names."""
    return {
        name: kept.numbers[name](state[name].item()) if name in kept.numbers else state[name]
        for name in kept.tensors
        if name != "master"
    }
