"""Trains in RAM with torch's own optimizers: the reference for offloaded training.

A 16-bit parameter has an fp32 master weight. Each step converts the gradient to float32, updates the master weight, and
rounds the master weight to the parameter. The option `state` stores the moments in 16 or 8 bits (`support.moments`).
The option `master_dtype=None` trains 16-bit parameters without master weights.

torch's fused AdamW computes the last `numel % 16` elements of a tensor by a different formula. If a parameter has such
elements, the reference updates a copy of the parameter. The copy is padded to a multiple of 16 elements, so that torch
computes all elements of the parameter by the same formula.
"""

from __future__ import annotations

import contextlib
import math

import torch
import xxhash
from support.moments import VALUES, MomentsInRam, drawn, rounded

from memascend import kernels, tensors

# torch.amp.GradScaler's constants.
SCALE_FIRST, SCALE_GROWTH, SCALE_BACKOFF, SCALE_WINDOW = 65536.0, 2.0, 0.5, 2000
LANES = 16
ADAMS = (torch.optim.AdamW, torch.optim.Adam)


@contextlib.contextmanager
def threads_of_torch(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def padded(values):
    """Returns the elements in their logical order, in float32, padded with zeros to a multiple of `LANES`."""
    flat = values.detach().reshape(-1).float()
    return torch.cat([flat, flat.new_zeros(-flat.numel() % LANES)])


class Reference(torch.optim.Optimizer):
    """An optimizer in RAM with the options of `memascend.offload` that change the update, except `nonfinite`."""

    def __init__(  # noqa: PLR0913 - options are keywords
        self,
        original,
        *,
        max_grad_norm=None,
        accumulation_steps=1,
        loss_scale=None,
        master_dtype=torch.float32,
        state=None,
        rounding="nearest",
        seed=0,
        model=None,
    ):
        """Wraps the optimizer `original`. With 16- or 8-bit `state`, or stochastic rounding, `model` is required.

        The random bits depend on the names of the model's parameters. With 8-bit state, the embeddings of the model
        keep 32-bit state.
        """
        super().__init__(original.param_groups, original.defaults)
        self.param_groups = original.param_groups
        self.original = original
        self.accumulation_steps = accumulation_steps  # does not change the result of a step
        self.max_grad_norm = max_grad_norm
        self.stochastic = rounding == "stochastic"
        self.formats = state in ("bf16", "8bit") or self.stochastic
        self.state_format, self.seed, self.model = state, seed, model
        self.adam = (type(original) in ADAMS and master_dtype is not None) or self.formats
        self.master_dtype = master_dtype
        half = any(p.dtype == torch.float16 for group in self.param_groups for p in group["params"])
        self.dynamic = loss_scale == "dynamic" or (loss_scale is None and half)
        self.loss_scale = SCALE_FIRST if self.dynamic else loss_scale
        self.steps_since_overflow = 0
        self.overflowed = False
        self.grad_norm = None
        self.masters = {p: self._master(p) for group in self.param_groups for p in group["params"]}
        self.inner = self._inner()

    def _master(self, p):
        if self.master_dtype is None and not self.formats:
            return p
        if p.dtype == torch.float32 and (not self.adam or p.numel() % LANES == 0):
            return p
        return torch.nn.Parameter(padded(p) if self.adam else p.detach().float())

    def _inner(self):
        groups = [{**group, "params": [self.masters[p] for p in group["params"]]} for group in self.param_groups]
        if self.formats:
            return self._in_formats(groups)
        if self.adam:
            groups = [{**group, "fused": True, "foreach": False} for group in groups]
        return type(self.original)(groups)

    def _in_formats(self, groups):
        names = {p: name for name, p in self.model.named_parameters()}
        embeddings = {one.weight for one in self.model.modules() if isinstance(one, torch.nn.Embedding)}
        widths, keys = {}, {}
        for p, master in self.masters.items():
            small = p.numel() < 4096 or p in embeddings
            widths[master] = "fp32" if self.state_format == "8bit" and small else self.state_format or "fp32"
            keys[master] = xxhash.xxh3_64_intdigest(names[p].encode(), self.seed)
        rule = {torch.optim.AdamW: "adamw", torch.optim.Adam: "adam", torch.optim.SGD: "momentum"}
        return MomentsInRam(groups, widths=widths, keys=keys, rule=rule[type(self.original)])

    def backward(self, loss):
        (loss if self.loss_scale is None else loss * self.loss_scale).backward()

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradients = {p: p.grad for p in self.masters if p.grad is not None}
        if not gradients:
            return loss
        # Prevents a scheduler of `original` from warning that `original.step()` was not called.
        self.original._opt_called = True
        self.overflowed = self.loss_scale is not None and not all(bool(g.isfinite().all()) for g in gradients.values())
        if not self.overflowed:
            self._update(gradients, self._factor(gradients))
        self._rescale()
        return loss

    def _factor(self, gradients):
        factor = 1.0 if self.loss_scale is None else 1.0 / self.loss_scale
        if self.max_grad_norm is not None:
            # The kernel sums exactly and rounds the sum once. The sum of torch in float64 must be close to the kernel's
            # sum.
            summed = self._squares(gradients)
            close = sum(float(g.double().square().sum()) for g in gradients.values())
            assert math.isclose(summed, close, rel_tol=1e-12), "the kernel's norm is wrong"
            self.grad_norm = math.sqrt(summed) * factor
            factor *= min(1.0, self.max_grad_norm / (self.grad_norm + 1e-6))
        return torch.tensor(factor, dtype=torch.float32)

    def _squares(self, gradients):
        # Copies gradients on a GPU to the CPU before summing, so that the sum has the same bits on every device.
        return tensors.rounded(tensors.total(kernels.checked(g.cpu().reshape(-1))[1] for g in gradients.values()))

    def _rescale(self):
        if not self.dynamic:
            return
        self.steps_since_overflow = 0 if self.overflowed else self.steps_since_overflow + 1
        if self.overflowed:
            self.loss_scale *= SCALE_BACKOFF
        elif self.steps_since_overflow == SCALE_WINDOW:
            self.loss_scale, self.steps_since_overflow = self.loss_scale * SCALE_GROWTH, 0

    def _update(self, gradients, factor):
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update({key: group[key] for key in group if key not in ("params", "fused", "foreach")})
        for p, master in self.masters.items():
            gradient = gradients.get(p)
            if self.stochastic and p.dtype != torch.float32:
                master.copy_(padded(p))
            master.grad = None if gradient is None else self._for_master(p, gradient, factor)
        # With several threads, each thread would compute one part of a tensor. torch computes the last elements of each
        # part by a different formula.
        with threads_of_torch(1):
            self.inner.step()
        for p, master in self.masters.items():
            if self.stochastic and p.dtype != torch.float32:
                self._draw(p, master)
            elif master is not p:
                p.copy_(self._shaped(p, master))
                master.grad = None
            else:
                p.grad = gradients.get(p)

    def _draw(self, p, master):
        """Rounds the updated master weight by random bits, and writes the result to `p`.

        Does nothing if `p` had no gradient.
        """
        if master.grad is not None:
            bits = drawn(self.inner.keys[master], self.inner.state[master]["step"], p.numel(), VALUES)
            p.copy_(rounded(master.detach()[: p.numel()], bits, p.dtype).view(p.shape))
            master.grad = None

    def _for_master(self, p, gradient, factor):
        if gradient.is_sparse or (self.master_dtype is None and not self.formats):
            return gradient
        gradient = gradient.float() * factor
        if self.masters[p] is p or not self.adam:
            # torch's fused kernel assumes that a gradient has the strides of its parameter.
            return torch.empty_like(self.masters[p]).copy_(gradient)
        return padded(gradient)

    @staticmethod
    def _shaped(p, values):
        return values.detach().reshape(-1)[: p.numel()].view(p.shape)

    def state_of(self, p):
        """Returns the optimizer state of `p` under torch's names.

        Adds "master" if `p` has 16 bits and a master weight. With stochastic rounding, "master" is `p` in float32.
        """
        master = self.masters[p]
        if self.formats:
            return self._state_in_formats(p, master)
        state = {
            name: self._shaped(p, value).clone() if name != "step" and value.numel() == master.numel() else value
            for name, value in self.inner.state.get(master, {}).items()
        }
        if master is not p and p.dtype != torch.float32:
            state["master"] = self._shaped(p, master).clone()
        return state

    def _state_in_formats(self, p, master):
        state = {name: self._shaped(p, value) for name, value in self.inner.moments_by_name(master).items()}
        if state and self.inner.rule != "momentum":
            state["step"] = torch.tensor(float(self.inner.state[master]["step"]))
        if p.dtype != torch.float32:
            state["master"] = p.detach().float() if self.stochastic else self._shaped(p, master).clone()
        return state
