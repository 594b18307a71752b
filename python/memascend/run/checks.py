"""Finds the parameters of a model and its optimizer; refuses what cannot be offloaded before anything changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from memascend.errors import ConfigError
from memascend.residency.gates import gated
from memascend.run.materialized import is_materialized
from memascend.run.optimizer import OffloadedOptimizer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from memascend.planning.units import Unit

_TRAINED = {torch.float32, torch.float64, torch.bfloat16, torch.float16}


@dataclass(frozen=True)
class Owned:
    """A parameter of the model, as the optimizer sees it."""

    name: str
    parameter: torch.nn.Parameter
    # Its group; None where the optimizer does not own it.
    group: int | None


def find_owned(
    model: torch.nn.Module,
    named: Mapping[str, torch.nn.Parameter] | None,
    optimizer: torch.optim.Optimizer,
    device: torch.device | None = None,
) -> dict[str, Owned]:
    """The parameters of a model, with their groups; raises `ConfigError` where they cannot be offloaded.

    They are on the CPU, on meta, or on the `device` that is going to compute. `named` are those that a rank has of a
    model that others share; None: the model's own.
    """
    _refuse_kinds(model, optimizer)
    if named is None:
        named = dict(model.named_parameters())
    if not named:
        raise ConfigError("the model has no parameters: there is nothing to offload")
    groups = {
        id(parameter): number for number, group in enumerate(optimizer.param_groups) for parameter in group["params"]
    }
    _refuse_owners(named, groups)
    for name, parameter in named.items():
        if parameter.device.type not in ("cpu", "meta") and parameter.device != device:
            raise ConfigError(
                f"{name} is on {parameter.device}; offload() takes models on the CPU, on meta, or on the device= that "
                "computes"
            )
        if torch.nn.parameter.is_lazy(parameter):
            raise ConfigError(f"{name} is not initialised yet: run the model once before offload()")
    _refuse_shared(model, named)
    owned = {}
    for name, parameter in named.items():
        # Of whole numbers there is no gradient: torch's optimizers leave them alone.
        number = groups.get(id(parameter)) if parameter.is_floating_point() or parameter.is_complex() else None
        if number is not None and parameter.dtype not in _TRAINED:
            raise ConfigError(
                f"{name} is {parameter.dtype}, and parameters of float32, float64, bfloat16 and float16 are trained: "
                "give the optimizer the others alone, and freeze this one with requires_grad_(False)"
            )
        owned[name] = Owned(name, parameter, number)
    return owned


def _refuse_kinds(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
    if _has_own_step(optimizer):
        raise ConfigError(
            f"step() of this {type(optimizer).__name__} was replaced on the object, and offload() runs that of its "
            "class: register_step_pre_hook() and register_step_post_hook() are heard, or make it a subclass"
        )
    if isinstance(optimizer, OffloadedOptimizer) or gated(model) or is_materialized(model):
        raise ConfigError("this model or optimizer is offloaded already; close() it first")
    wrappers = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
    if isinstance(model, wrappers) or type(model).__name__ == "FullyShardedDataParallel":
        raise ConfigError(
            f"{type(model).__name__} does not work with offload(); give the module inside it, on several processes "
            "after torch.distributed.fsdp.fully_shard() on each block and on the model"
        )


def _has_own_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether somebody replaced `step` of an object; a scheduler puts a function there that counts and goes on."""
    step = vars(optimizer).get("step")
    if step is not None and hasattr(step, "_wrapped_by_lr_sched"):
        step = getattr(step, "__wrapped__", None)
    return (
        step is not None
        and step is not type(optimizer).step
        and getattr(step, "__func__", None) is not type(optimizer).step
    )


def _refuse_owners(named: Mapping[str, torch.nn.Parameter], groups: Mapping[int, int]) -> None:
    known = {id(parameter) for parameter in named.values()}
    if not groups.keys() <= known:
        count = len(groups.keys() - known)
        raise ConfigError(
            f"the optimizer owns {count} parameters that are not this model's; make it from model.parameters()"
        )
    orphans = [name for name, parameter in named.items() if parameter.requires_grad and id(parameter) not in groups]
    if orphans:
        raise ConfigError(
            f"the optimizer does not own {len(orphans)} trainable parameters ({', '.join(orphans[:3])}...): freeze "
            "them with requires_grad_(False), or give them to it"
        )
    if not groups:
        raise ConfigError("the optimizer owns no parameters of this model")


def _refuse_shared(model: torch.nn.Module, named: Mapping[str, torch.nn.Parameter]) -> None:
    """Tensors that lie in each other's memory change together in torch; on storage they would go apart in silence."""
    spans = []
    for name, tensor in [*named.items(), *model.named_buffers()]:
        if tensor.is_meta or tensor.layout != torch.strided or tensor.numel() == 0:
            continue
        # Of what has gaps, others may lie in these.
        if torch.ops.aten.is_non_overlapping_and_dense(tensor):
            begin = tensor.data_ptr()
            spans.append((begin, begin + tensor.nbytes, name, isinstance(tensor, torch.nn.Parameter)))
    spans.sort()
    parameter: tuple[int, str] = (0, "")
    other: tuple[int, str] = (0, "")
    for begin, end, name, owned in spans:
        for before in (parameter, other if owned else (0, "")):
            if begin < before[0]:
                raise ConfigError(
                    f"{before[1]} and {name} share memory, so that each changes with the other, which storage cannot: "
                    "tie them as one Parameter (head.weight = embedding.weight), or clone one"
                )
        if owned:
            parameter = max(parameter, (end, name))
        else:
            other = max(other, (end, name))


def refuse_sizes(unit_bytes: Mapping[str, int], units: Iterable[Unit]) -> None:
    """What is brought into memory together must have bytes."""
    for unit in units:
        if unit_bytes[unit.name] == 0:
            raise ConfigError(
                f"{', '.join(unit.parameters)} has no elements, and stands alone: leave it out of the model, or put it "
                "into a module that has other parameters"
            )


def sparse_weights(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Parameters whose gradients are sparse."""
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse:
            yield module.weight


def embeddings(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The weights of embeddings, also where a head is tied to them."""
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag):
            yield module.weight
