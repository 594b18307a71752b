"""Makes the optimizer that --optimizer names, over the parameters that learn."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch.optim._muon import muon
from torch.optim.adam import adam

from memascend.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from memascend.cli.train.model import Described
    from memascend.cli.train.settings import Settings

# What is no option of a class that a run may choose: these belong to the loop or to where it computes.
_ADAMW_BETAS, _ADAMW_EPS = (0.9, 0.999), 1e-8
_MUON_COEFFICIENTS = (3.4445, -4.775, 2.0315)


def make_optimizer(settings: Settings, described: Described) -> torch.optim.Optimizer:
    """The optimizer, with the options that were given; biases and norms do not decay.

    Raises:
        ConfigError: torch has none of that name, or it does not have such an option.
    """
    given: dict[str, Any] = {"lr": settings.lr, "weight_decay": settings.weight_decay}
    for name in ("betas", "eps", "momentum"):
        value = settings.numbers(name) if name == "betas" else getattr(settings, name)
        if value is not None:
            given[name] = value
    if settings.optimizer.lower() == "muon":
        kind: Any = Muon
        groups = _muon_groups(described)
    else:
        kind = _class_of(settings.optimizer)
        groups = _groups(described, settings.weight_decay)
    known = inspect.signature(kind).parameters
    unknown = [name for name in given if name not in known]
    if unknown == ["weight_decay"] and not settings.weight_decay:
        del given["weight_decay"]
    elif unknown:
        raise ConfigError(f"--{unknown[0].replace('_', '-')} is no option of {kind.__name__}: leave it out")
    try:
        made: torch.optim.Optimizer = kind(groups, **given)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{kind.__name__} refuses its options: {error}") from error
    for group in made.param_groups:
        # The stored rate is the schedule's, made from this: no surprise to warn of.
        group["initial_lr"] = settings.lr
    return made


def _class_of(name: str) -> type[torch.optim.Optimizer]:
    kinds = {
        kind.__name__.lower(): kind
        for kind in vars(torch.optim).values()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }
    kind = kinds.get(name.lower())
    if kind is None:
        raise ConfigError(f"--optimizer is muon or a class of torch.optim ({', '.join(sorted(kinds))}), not {name!r}")
    return kind


def _groups(described: Described, decay: float) -> Any:
    if not decay:
        return described.trained
    matrices = [parameter for parameter in described.trained if parameter.dim() > 1]
    others = [parameter for parameter in described.trained if parameter.dim() <= 1]
    # A group of its own for what does not decay.
    return [group for group in ({"params": matrices}, {"params": others, "weight_decay": 0.0}) if group["params"]]


def _muon_groups(described: Described) -> list[dict[str, Any]]:
    """Matrices of hidden layers, which are made orthogonal; and the others, as Muon's author has it, with AdamW."""
    model = described.model
    ends = {
        id(parameter)
        for module in (model.get_input_embeddings(), model.get_output_embeddings())
        if module is not None
        for parameter in module.parameters()
    }
    hidden = [one for one in described.trained if one.dim() == 2 and id(one) not in ends]
    orthogonal = {id(one) for one in hidden}
    others = [one for one in described.trained if id(one) not in orthogonal]
    matrices = [one for one in others if one.dim() > 1]
    vectors = [one for one in others if one.dim() <= 1]
    groups: list[dict[str, Any]] = [
        {"params": hidden, "orthogonal": True},
        {"params": matrices, "orthogonal": False},
        {"params": vectors, "orthogonal": False, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


class Muon(torch.optim.Optimizer):
    """Muon for groups of matrices that are `orthogonal`, AdamW for the others, both at AdamW's rates.

    One optimizer, since a run has one; its updates are those of torch.optim.Muon with
    `adjust_lr_fn="match_rms_adamw"`, and of torch.optim.AdamW.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        betas: tuple[float, float] = _ADAMW_BETAS,
        eps: float = _ADAMW_EPS,
    ) -> None:
        """Take groups of parameters, each `orthogonal` or not."""
        options = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "betas": betas, "eps": eps}
        super().__init__(params, {**options, "orthogonal": False})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update what has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    (self._orthogonal if group["orthogonal"] else self._elementwise)(parameter, group)
        return loss

    def _orthogonal(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad, memory_format=torch.preserve_format)
        muon(
            [parameter],
            [parameter.grad],
            [state["momentum_buffer"]],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            nesterov=True,
            ns_coefficients=_MUON_COEFFICIENTS,
            eps=1e-7,
            ns_steps=5,
            adjust_lr_fn="match_rms_adamw",
            has_complex=False,
        )

    def _elementwise(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        adam(
            [parameter],
            [parameter.grad],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [],
            [state["step"]],
            foreach=False,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
            decoupled_weight_decay=True,
        )
