"""Defines a base class for optimizers that update one parameter at a time, as users write them."""

import torch


class ByParameter(torch.optim.Optimizer):
    """A base class: `step` calls the subclass's `one(group, parameter, state)` for each parameter with a gradient."""

    @torch.no_grad()
    def step(self, closure=None):  # noqa: ARG002
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.one(group, parameter, self.state[parameter])
