"""Trains in RAM with optimizer moments of 16 or 8 bits, in plain torch.

Tests compare `memascend.offload(state=...)` with this reference. `docs/budget.md` and `docs/store-format.md` describe
the formats; this file uses no code of memascend.
"""

from __future__ import annotations

import math

import torch
from support.blockwise import BLOCK, dequantized, quantized

__all__ = ["SECOND_MOMENT", "VALUES", "MomentsInRam", "drawn", "exact_root", "rounded"]


# -- moments of 16 bits: values are rounded to nearest, or up or down by random bits (see `drawn`)

_WORD = 0xFFFFFFFF
_LANES = BLOCK // 8
SECOND_MOMENT, VALUES = 0, 1


def _philox(counters, key):
    """Returns the four output words of Philox4x32-10 for four counter words.

    Each word is an int64 tensor whose elements have 32 significant bits.
    """
    a, b, c, d = counters
    low, high = key & _WORD, key >> 32
    for _ in range(10):
        one, two = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (two >> 32 & _WORD) ^ b ^ low, two & _WORD, (one >> 32 & _WORD) ^ d ^ high, one & _WORD
        low, high = low + 0x9E3779B9 & _WORD, high + 0xBB67AE85 & _WORD
    return a, b, c, d


def drawn(key, step, count, purpose):
    """Returns 16 random bits for each of the first `count` elements of a parameter, as int32.

    `key` is the XXH3-64 of the parameter's name, seeded with the run's seed. `step` is the number of this parameter's
    update, counted from 1. `purpose` is `SECOND_MOMENT` or `VALUES`.
    """
    blocks = -(-count // BLOCK)
    counter = torch.arange(blocks * _LANES)
    same = torch.ones_like(counter)
    words = _philox((counter & _WORD, counter >> 32 | purpose << 28, same * (step & _WORD), same * (step >> 32)), key)
    halves = [half.view(blocks, _LANES) for word in words for half in (word & 0xFFFF, word >> 16)]
    return torch.stack(halves, 1).view(-1)[:count].to(torch.int32)


def rounded(values, bits, dtype=torch.bfloat16):
    """Rounds float32 values to 16 bits.

    `bits` has a random 16-bit number for each value. This number decides whether the magnitude of the value is rounded
    up or down.
    """
    nearest = values.to(dtype)
    magnitude = values.abs()
    if dtype == torch.bfloat16:
        up = ((magnitude.view(torch.int32) + bits) >> 16).to(torch.int16).view(dtype)
    else:
        normal = (magnitude.view(torch.int32) - (112 << 23) + (bits >> 3)) >> 13
        # Below 2**-14, float16 numbers are multiples of 2**-24. The sum counts units of 2**-40, so `>> 16` converts the
        # sum to multiples of 2**-24.
        small = ((torch.where(magnitude < 2.0**-14, magnitude, 0.0) * 2.0**40).to(torch.int32) + bits) >> 16
        up = torch.where(magnitude < 2.0**-14, small, normal).to(torch.int16).view(dtype)
    # Where rounding to nearest gives a finite value, random rounding must not give infinity. Replace infinity with the
    # largest finite value.
    up = torch.where(up.isfinite(), up, torch.finfo(dtype).max)
    return torch.where(nearest.isfinite(), torch.where(values.signbit(), -up, up), nearest)


# -- one update of a parameter


def exact_root(values):
    # On float32, torch.sqrt may call a library whose results are off by one unit in the last place. Rounding the
    # float64 root to float32 gives the correctly rounded root.
    return torch.sqrt(values.double()).float()


def adam_of_bitsandbytes(p, g, m, v, group, step):
    """Updates float32 tensors in place with the formulas of bitsandbytes' Adam with moments of 8 bits."""
    beta1, beta2 = group["betas"]
    m.mul_(beta1).add_(g, alpha=1.0 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1.0 - beta2)
    first, root = 1.0 - beta1**step, math.sqrt(1.0 - beta2**step)
    denominator = (exact_root(v) / root).add_(group["eps"])
    lr = float(group["lr"])
    if group["weight_decay"] > 0.0:
        p.mul_(1.0 - lr * group["weight_decay"])
    p.addcdiv_(m, denominator, value=-lr / first)


def adam_of_torch(p, g, m, v, group, step, *, decoupled):
    """Updates float32 tensors in place with torch's fused kernel.

    The size of each tensor must be a multiple of 16, and torch must use one thread.
    """
    update = torch._fused_adamw_ if decoupled else torch._fused_adam_
    update(
        [p], [g], [m], [v], [], [torch.tensor(float(step - 1)).add_(1)],
        lr=float(group["lr"]), beta1=group["betas"][0], beta2=group["betas"][1], weight_decay=group["weight_decay"],
        eps=group["eps"], amsgrad=False, maximize=group.get("maximize", False), grad_scale=None, found_inf=None,
    )  # fmt: skip


def momentum_of_torch(p, g, buffer, group, step):
    """Updates the float32 tensors `p` and `buffer` in place as torch's SGD with momentum does."""
    if group["weight_decay"]:
        g = g.add(p, alpha=group["weight_decay"])
    if step == 1:
        buffer.copy_(g)
    else:
        buffer.mul_(group["momentum"]).add_(g, alpha=1 - group["dampening"])
    p.add_(g.add(buffer, alpha=group["momentum"]) if group["nesterov"] else buffer, alpha=-float(group["lr"]))


_NAMES = {"adamw": ("exp_avg", "exp_avg_sq"), "adam": ("exp_avg", "exp_avg_sq"), "momentum": ("momentum_buffer",)}


class MomentsInRam(torch.optim.Optimizer):
    """Adam, AdamW or SGD for contiguous float32 parameters.

    Between steps, the moments are stored in the formats that `widths` names.
    """

    def __init__(self, groups, *, widths, keys, rule="adamw", second="stochastic"):
        """Stores the formats, keys and rule.

        Args:
            groups: parameter groups, with all options of torch's optimizer.
            widths: the format of each parameter's moments: "fp32", "bf16" or "8bit".
            keys: the key of each parameter's random bits, see `drawn`.
            rule: "adamw", "adam" or "momentum".
            second: how a bf16 second moment is rounded: "stochastic", or "nearest" like the first moment.
        """
        super().__init__(groups, {})
        self.widths, self.keys, self.rule, self.second = widths, keys, rule, second

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group)

    def _update(self, p, group):
        state = self.state[p]
        step = state["step"] = state.get("step", 0) + 1
        flat, g = p.detach().view(-1), p.grad.reshape(-1)
        moments = self.moments(p)
        if self.rule == "momentum" or self.widths[p] == "8bit":
            g = -g if group.get("maximize") else g
        if self.rule == "momentum":
            momentum_of_torch(flat, g, *moments, group, step)
        elif self.widths[p] == "8bit":
            if self.rule == "adam" and group["weight_decay"]:
                g, group = g.add(flat, alpha=group["weight_decay"]), {**group, "weight_decay": 0.0}
            adam_of_bitsandbytes(flat, g, *moments, group, step)
        else:
            adam_of_torch(flat, g, *moments, group, step, decoupled=self.rule == "adamw")
        for name, moment in zip(_NAMES[self.rule], moments, strict=True):
            self._keep(p, name, moment, step)

    def _keep(self, p, name, moment, step):
        state, second = self.state[p], name == "exp_avg_sq"
        if self.widths[p] == "8bit":
            state[name], state[f"{name}_absmax"] = quantized(moment, signed=not second)
        elif self.widths[p] == "bf16" and second and self.second == "stochastic":
            state[name] = rounded(moment, drawn(self.keys[p], step, moment.numel(), SECOND_MOMENT))
        else:
            state[name] = moment.to(torch.bfloat16 if self.widths[p] == "bf16" else torch.float32)

    def moments(self, p):
        """Returns the moments of `p` in float32; zeros before the first step."""
        state = self.state[p]
        return [self._moment(p, state, name) for name in _NAMES[self.rule]]

    def _moment(self, p, state, name):
        if name not in state:
            return torch.zeros(p.numel())
        if f"{name}_absmax" in state:
            return dequantized(state[name], state[f"{name}_absmax"], signed=name != "exp_avg_sq")
        return state[name].float()

    def moments_by_name(self, p):
        """Returns the moments of `p` in float32 by torch's names. Before the first step, the dict is empty."""
        if "step" not in self.state.get(p, {}):
            return {}
        return dict(zip(_NAMES[self.rule], self.moments(p), strict=True))
