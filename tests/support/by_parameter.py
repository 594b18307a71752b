"""Defines a base class for optimizers that update one parameter at a time, like many optimizers that users write."""

import torch


class ByParameter(torch.optim.Optimizer):
    """A base class whose `step` calls `one(group, parameter, state)` for each parameter with a gradient.

    A subclass defines `one`.
    """

    @torch.no_grad()
    def step(self, closure=None):  # noqa: ARG002
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.one(group, parameter, self.state[parameter])
