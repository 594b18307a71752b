"""Counts what torch itself computes and holds in one forward and backward, on tensors without memory."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass
class Pass:
    """What a forward or a backward computes."""

    flops: int = 0  # floating-point operations of matrix products and attention; of causal attention what is not masked


@dataclass(frozen=True)
class Trace:
    """What one backward takes of torch, beside the parameters."""

    tokens: int  # of the batch
    forward: Pass  # what it computes
    backward: Pass  # likewise, with what is recomputed
    peak: int  # bytes of torch's own memory at its highest, gradients being gone as soon as they are whole
    held: dict[str, int]  # of these, by what they are: logits, gradients, activations
    recomputes: bool  # whether blocks are computed again in the backward

    @property
    def flops(self) -> int:
        """Of both passes."""
        return self.forward.flops + self.backward.flops


class _Watch(TorchDispatchMode):
    """Counts every operator below autograd, and every storage from its first tensor to its end."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = Pass()
        self.peak = 0
        self.at_peak: list[tuple[int, tuple[int, ...]]] = []
        self._bytes = 0
        own = (*model.parameters(), *model.buffers())
        # Views of parameters share their storages, which are counted elsewhere.
        self._own = {tensor.untyped_storage()._cdata for tensor in own}  # noqa: SLF001
        self._living: dict[int, tuple[int, tuple[int, ...]]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        for tensor in made:
            self._count(tensor)
        if function.is_view or not made:
            return out
        args, kwargs = _unmasked(function, args, kwargs or {})
        self.now.flops += _flops(function, args, kwargs, out)
        return out

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata  # noqa: SLF001
        if key in self._living or key in self._own or _is_mask(tensor):
            return
        nbytes = storage.nbytes()
        self._living[key] = nbytes, tuple(tensor.shape)
        self._bytes += nbytes
        weakref.finalize(storage, self._gone, key)
        if self._bytes > self.peak:
            self.peak = self._bytes
            # A tenth more than the last look, or large ones: copying the list at every small tensor would take long.
            self.at_peak = list(self._living.values())

    def _gone(self, key: int) -> None:
        nbytes, _ = self._living.pop(key, (0, ()))
        self._bytes -= nbytes


def _is_mask(tensor: torch.Tensor) -> bool:
    """Whether it is one of those that transformers makes while it is traced: else attention is told to be causal."""
    return tensor.dim() == 4 and tensor.shape[1] == 1 and tensor.shape[2] == tensor.shape[3]


def _unmasked(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call of attention as it is made without such a mask."""
    mask = kwargs.get("attn_mask")
    names = [argument.name for argument in function._schema.arguments]  # noqa: SLF001
    if not isinstance(mask, torch.Tensor) or not _is_mask(mask) or "is_causal" not in names:
        return args, kwargs
    at = names.index("is_causal")
    given = {**kwargs, "attn_mask": None}
    if at < len(args):
        return (*args[:at], True, *args[at + 1 :]), given
    return args, {**given, "is_causal": True}


def _flops(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    packet = function.overloadpacket
    # Attention on a CPU has no formula in torch 2.11; others' is the same.
    alike = getattr(torch.ops.aten, packet.__name__.replace("_for_cpu", ""), None)
    count = flop_registry.get(packet) or flop_registry.get(alike)
    if count is None:
        return 0
    flops = int(count(*args, **kwargs, out_val=out))
    names = [argument.name for argument in function._schema.arguments]  # noqa: SLF001
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    # Kernels skip what the mask of a causal attention leaves out, which is half of it.
    return flops // 2 if given.get("is_causal") is True else flops


def trace(model: nn.Module, batch: int, length: int, *, recomputes: bool) -> Trace | str:
    """Run one forward and backward of a language model, on tensors that have shapes and no memory.

    Args:
        model: as transformers makes it, on "meta".
        batch: sequences.
        length: tokens of each.
        recomputes: whether its blocks keep their inputs alone, and are computed again in the backward.

    Returns:
        What it took, or why that cannot be said.
    """
    if getattr(model, "main_input_name", None) != "input_ids":
        return "tokens are counted for language models of transformers"
    model = copy.deepcopy(model)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        settle(model)
    model.train()
    config: Any = getattr(model, "config", None)
    if config is not None:
        config.use_cache = False
    if recomputes:
        recompute(model)
    watch = _Watch(model)
    forward, backward = Pass(), Pass()
    failed = ""
    with fake, without_gradients_kept(model), watch, _without_torchs_log():
        watch.now = forward
        try:
            tokens = torch.zeros(batch, length, dtype=torch.long)
            loss = model(input_ids=tokens, labels=tokens).loss
            watch.now = backward
            loss.backward()
            del loss
        except Exception as error:  # noqa: BLE001
            # Whatever a model's code does that depends on values (the routes of some mixtures of experts).
            failed = f"{type(model).__name__} cannot be traced without values ({type(error).__name__})"
    if failed:
        # A checkpoint in which it ended leaves its hooks to all that is saved later, until it is collected.
        gc.collect()
        return failed
    return Trace(
        tokens=batch * length,
        forward=forward,
        backward=backward,
        peak=watch.peak,
        held=_kinds(model, watch.at_peak),
        recomputes=recomputes,
    )


@contextlib.contextmanager
def _without_torchs_log() -> Iterator[None]:
    """What cannot be traced is told in one line. Who keeps the stack that torch logs keeps a checkpoint's hooks."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def grown(one: Trace, two: Trace, times: int) -> Trace:
    """What a larger batch takes: `one` and so many times what `two` takes more."""

    def line(first: int, second: int) -> int:
        return first + times * (second - first)

    return Trace(
        tokens=line(one.tokens, two.tokens),
        forward=Pass(line(one.forward.flops, two.forward.flops)),
        backward=Pass(line(one.backward.flops, two.backward.flops)),
        peak=line(one.peak, two.peak),
        held={kind: line(nbytes, two.held[kind]) for kind, nbytes in one.held.items()},
        recomputes=one.recomputes,
    )


def settle(model: nn.Module) -> None:
    """Give it parameters and buffers that count as the CPU's; tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():  # noqa: SLF001
            if parameter is not None:
                if id(parameter) not in made:
                    empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
                    made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]  # noqa: SLF001
        for name, buffer in module._buffers.items():  # noqa: SLF001
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")  # noqa: SLF001


def recompute(model: nn.Module) -> None:
    """Have the blocks computed again in the backward, as far as the model can."""
    name = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    change = getattr(model, f"{name}_checkpointing_enable", None)
    if change is not None:
        with contextlib.suppress(ValueError):
            change()


@contextlib.contextmanager
def without_gradients_kept(model: nn.Module) -> Iterator[None]:
    """Gradients are gone as soon as they are whole, as they are in training."""

    def gone(parameter: torch.Tensor) -> None:
        parameter.grad = None

    hooks = [
        parameter.register_post_accumulate_grad_hook(gone)
        for parameter in model.parameters()
        if parameter.requires_grad
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _kinds(model: nn.Module, living: list[tuple[int, tuple[int, ...]]]) -> dict[str, int]:
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
    shapes = {tuple(parameter.shape) for parameter in model.parameters()}
    shapes |= {shape[::-1] for shape in shapes if len(shape) == 2}
    held = {"logits and their gradients": 0, "gradients of parameters": 0, "activations": 0}
    for nbytes, shape in living:
        if shape in shapes:
            held["gradients of parameters"] += nbytes
        elif vocabulary is not None and vocabulary in shape:
            held["logits and their gradients"] += nbytes
        else:
            held["activations"] += nbytes
    return held
