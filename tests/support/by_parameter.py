"""An optimizer whose children say what becomes of one parameter, as those of users are built."""

import torch


class ByParameter(torch.optim.Optimizer):
    """Calls `one(group, parameter, state)` for each parameter with a gradient."""

    @torch.no_grad()
    def step(self, closure=None):  # noqa: ARG002
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.one(group, parameter, self.state[parameter])
