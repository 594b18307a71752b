"""Tests state that is a tensor of a subclass, as quantised state is: stored in parts, and rebuilt bit for bit."""

import functools

import pytest
import torch
from support import chains
from support.bits import same_bits
from torch.utils._python_dispatch import return_and_correct_aliasing

import memascend


class Quantised(torch.Tensor):
    """Codes and a scale for each row of blocks; computes as what they stand for."""

    @staticmethod
    def __new__(cls, codes, scale, block, dtype):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)

    def __init__(self, codes, scale, block, dtype):
        self.codes, self.scale, self.block = codes, scale, block

    def __tensor_flatten__(self):
        return ["codes", "scale"], [self.block, self.dtype]

    @classmethod
    def __tensor_unflatten__(cls, parts, context, size, stride):
        return cls(parts["codes"], parts["scale"], *context)

    @classmethod
    def zeros(cls, like, block):
        codes = torch.zeros(like.shape, dtype=torch.int8, device=like.device)
        return cls(codes, torch.zeros(like.numel() // block, device=like.device), block, like.dtype)

    def plain(self):
        blocks = self.codes.view(-1, self.block).float() / 127 * self.scale[:, None]
        return blocks.view(self.codes.shape).to(self.dtype)

    def fill(self, values):
        blocks = values.contiguous().view(-1, self.block)
        self.scale.copy_(blocks.abs().amax(1))
        self.codes.copy_((blocks / self.scale[:, None].clamp_min(1e-12) * 127).round().view(self.codes.shape))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default and isinstance(args[0], Quantised):
            source = args[1].plain() if isinstance(args[1], Quantised) else args[1]
            args[0].fill(source)
            return args[0]
        if func is torch.ops.aten.detach.default:
            made = Quantised(args[0].codes, args[0].scale, args[0].block, args[0].dtype)
            return return_and_correct_aliasing(func, args, kwargs or {}, made)
        plain = [arg.plain() if isinstance(arg, Quantised) else arg for arg in args]
        return func(*plain, **(kwargs or {}))


class QuantisedMomentum(torch.optim.Optimizer):
    """Its state is quantised from 1,024 elements on, and plain below."""

    def __init__(self, parameters, *, anew=False):
        super().__init__(parameters, {"lr": 0.1})
        self.anew = anew

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    large = parameter.numel() >= 1024
                    state["mean"] = Quantised.zeros(parameter, 64) if large else torch.zeros_like(parameter)
                state["step"] += 1
                mean = state["mean"] * 0.9 + parameter.grad
                if self.anew and isinstance(state["mean"], Quantised):
                    state["mean"] = Quantised.zeros(parameter, 64)
                state["mean"].copy_(mean)
                parameter.sub_(state["mean"] * group["lr"])


def model(dtype=torch.float32):
    torch.manual_seed(2)
    made = torch.nn.Sequential(
        torch.nn.Conv2d(16, 16, 3, padding=1), torch.nn.Flatten(), torch.nn.Linear(16 * 9, 32), torch.nn.Linear(32, 5)
    )
    return made.to(dtype).to(memory_format=torch.channels_last)


def loss_of(trained, seed):
    inputs = torch.randn(4, 16, 3, 3, generator=torch.Generator().manual_seed(seed))
    return trained(inputs.to(trained[0].weight.dtype)).square().mean()


train = functools.partial(chains.train, of=loss_of)


def same(one, other):
    if isinstance(one, Quantised):
        assert isinstance(other, Quantised)
        assert one.block == other.block
        return same_bits(one.codes, other.codes) and same_bits(one.scale, other.scale)
    return same_bits(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("anew", [False, True])
def test_quantised_state_moves_in_streams_and_is_in_stores_and_checkpoints_bit_for_bit(tmp_path, dtype, anew):
    plain, trained = model(dtype), model(dtype)
    reference, optimizer = (QuantisedMomentum(of.parameters(), anew=anew) for of in (plain, trained))
    train(plain, reference, range(8))
    train(trained, optimizer, range(2))
    for begin, options in (
        (2, {"storage": tmp_path / "store"}),
        (4, {"storage": tmp_path / "store", "existing": "resume"}),
        (6, {"storage": tmp_path / "other", "checkpoint": tmp_path / "saved"}),
    ):
        if begin > 2:
            trained = model(dtype)
            optimizer = QuantisedMomentum(trained.parameters(), anew=anew)
        trained, optimizer = memascend.offload(trained, optimizer, master_dtype=None, **options)
        train(trained, optimizer, range(begin, begin + 2))
        optimizer.save(tmp_path / "saved")
        if begin < 6:
            optimizer.close()
    with optimizer:
        for parameter, twin in zip(trained.parameters(), plain.parameters(), strict=True):
            state = optimizer.state_of(parameter)
            state.pop("master")
            assert state.keys() == reference.state[twin].keys()
            assert all(same(state[name], reference.state[twin][name]) for name in state)
        chains.require_same(plain, trained)
