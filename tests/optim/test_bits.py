"""Tests that each optimizer of torch.optim but LBFGS has the bits of training in memory, also on unusual parameters."""

import copy
import functools
import inspect
import itertools

import pytest
import torch
from optim.conftest import Streamed
from support.bits import same_bits
from support.by_parameter import ByParameter
from support.chains import batch, chain, require_same, step, twins

import memascend
from memascend.errors import ConfigError
from memascend.optim import trial
from memascend.optim.trial import require_streamable

# Options to try with each class. A test fails if a class of torch.optim is neither listed here nor rejected.
CASES = {
    "SGD": [
        {"lr": 0.1},
        {"lr": 0.1, "weight_decay": 0.1, "maximize": True},
        {"lr": 0.1, "momentum": 0.9},
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
        {"lr": 0.1, "momentum": 0.9, "nesterov": True},
        {"lr": 0.1, "momentum": 0.9, "fused": True},
        {"lr": 0.1, "momentum": 0.9, "foreach": True},
    ],
    "Adam": [{"amsgrad": True, "weight_decay": 0.1}, {"maximize": True}, {"lr": torch.tensor(0.01), "fused": True}],
    "AdamW": [{}, {"amsgrad": True}, {"lr": torch.tensor(0.01)}, {"foreach": True}],
    "Adagrad": [{}, {"lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.5}, {"fused": True}],
    "Adadelta": [{}, {"weight_decay": 0.1, "maximize": True}],
    "Adamax": [{}, {"weight_decay": 0.1}],
    "ASGD": [{"t0": 2}, {"weight_decay": 0.1, "t0": 3, "alpha": 0.6}],
    "NAdam": [{}, {"weight_decay": 0.1}, {"weight_decay": 0.1, "decoupled_weight_decay": True}],
    "RAdam": [{}, {"weight_decay": 0.1, "betas": (0.8, 0.9)}, {"weight_decay": 0.1, "decoupled_weight_decay": True}],
    "RMSprop": [{}, {"momentum": 0.9, "centered": True, "weight_decay": 0.1}],
    "Rprop": [{}, {"maximize": True}],
    "Adafactor": [{}, {"weight_decay": 0.1, "maximize": True, "d": 2.0}],
    "Muon": [{}, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw"}],
    "SparseAdam": [{}, {"maximize": True}],
}
WHOLE = {"Adafactor", "Muon", "SparseAdam"}
# For each name: the dtype of the parameters, and `master_dtype`, the dtype of master weights of 16-bit parameters
# (None: no master weights).
DTYPES = {
    "fp32": (torch.float32, torch.float32),
    "bf16+master": (torch.bfloat16, torch.float32),
    "bf16": (torch.bfloat16, None),
    "fp16": (torch.float16, None),
    "fp64": (torch.float64, torch.float32),
}


def parameters(name, dtype):
    generator = torch.Generator().manual_seed(5)
    # torch's Adafactor divides by the number of elements, so Adafactor gets no empty parameter.
    shapes = [[(4097,), (3, 1741)], [(1,), (), (7, 5, 3), (3,) if name == "Adafactor" else (0, 5)]]
    if name == "Muon":
        shapes = [[(130, 33), (3, 1741)], [(7, 5)]]
    if name == "SparseAdam":
        shapes = [[(50, 9), (700, 3)], [(7,)]]
    made = [[torch.randn(shape, generator=generator).to(dtype) for shape in group] for group in shapes]
    return [[torch.nn.Parameter(values) for values in group] for group in made]


def grouped(groups, dtype=None):
    """Returns two groups for an optimizer, with different options and with copies of the parameters of `groups`.

    If `dtype` is given, the copies have this dtype.
    """
    options = [{}, {"lr": 0.003}]
    return [
        {**option, "params": [torch.nn.Parameter(one.detach().to(dtype or one.dtype, copy=True)) for one in group]}
        for option, group in zip(options, groups, strict=True)
    ]


def gradient_of(name, parameter, generator):
    drawn = torch.randn(parameter.shape, generator=generator)
    if parameter.dim() and name == "SparseAdam":
        rows = torch.randint(len(drawn), (2 * len(drawn) // 3,), generator=generator)
        return torch.sparse_coo_tensor(rows[None], drawn[rows].to(parameter.dtype), drawn.shape, check_invariants=False)
    # Like autograd, gives the gradient the strides of its parameter.
    return torch.empty_like(parameter).copy_(drawn).detach()


def members(optimizer):
    return [(group, parameter) for group in optimizer.param_groups for parameter in group["params"]]


def classes():
    return {name: kind for name, kind in vars(torch.optim).items() if inspect.isclass(kind) and name[0].isupper()}


def test_cases_cover_every_torch_optimizer_class_except_lbfgs():
    found = {name for name, kind in classes().items() if issubclass(kind, torch.optim.Optimizer)}
    assert found == {*CASES, "Optimizer", "LBFGS"}


def run_and_compare(name, groups, options, master_dtype, steps=6, threads=1, chunk=2048):
    """Trains in memory and with `Streamed`, and requires that the bits are equal; returns the `Streamed` parameters.

    Some gradients are missing, except for torch's fused SGD. lr changes in each step.
    """
    torch.set_num_threads(threads)
    kind = name if inspect.isclass(name) else classes()[name]
    original = kind(grouped(groups), **copy.deepcopy(options))
    dtype = groups[0][0].dtype
    wide = master_dtype if dtype.itemsize == 2 else None
    reference = kind(grouped(groups, wide), **copy.deepcopy(options))
    require_streamable(original, master_dtype)
    streamed = [Streamed(original, parameter, master_dtype, chunk) for _, parameter in members(original)]
    original.state.clear()
    generator = torch.Generator().manual_seed(9)
    for turn in range(steps):
        for group, other in zip(original.param_groups, reference.param_groups, strict=True):
            group["lr"] = other["lr"] = group["lr"] * 0.9
        for index, ((group, parameter), (_, twin)) in enumerate(
            zip(members(original), members(reference), strict=True)
        ):
            twin.grad = None
            # Skips the gradient, as for an expert without tokens. torch's fused SGD gets every gradient: it fails if
            # only some parameters have a momentum buffer.
            if (turn + index) % 4 == 1 and not (name == "SGD" and "fused" in options):
                continue
            gradient = gradient_of(name, parameter, generator)
            twin.grad = gradient.to(twin.dtype)
            streamed[index].step(original, group, gradient)
        reference.step()
    assert not original.state
    for part, (_, twin) in zip(streamed, members(reference), strict=True):
        assert same_bits(part.shaped(part.values), twin.detach().to(dtype)), part.layout.shape
        if wide:
            assert same_bits(part.shaped(part.state["master"]), twin.detach())
        wanted = reference.state.get(twin, {})
        exported = part.layout.state_from(part.state)
        assert list(exported) == list(wanted)
        for of, value in wanted.items():
            if isinstance(value, torch.Tensor):
                assert same_bits(exported[of].reshape(-1), part.flat(value).reshape(-1)), of
            else:
                assert type(exported[of]) is type(value)
                assert exported[of] == value
    return streamed


@pytest.mark.parametrize(
    ("name", "options", "dtype"),
    [
        (name, options, dtype)
        for name in CASES
        for options in CASES[name]
        for dtype in DTYPES
        if dtype not in {"fp16", "fp64"} or options is CASES[name][-1]
    ],
)
def test_streamed_parts_get_the_bits_of_torch_in_memory(name, options, dtype):
    dtype, master_dtype = DTYPES[dtype]
    if name == "SGD" and "fused" in options and master_dtype is None and not trial._fused_sgd_updates(dtype):
        with pytest.raises(ConfigError, match="fused=True is rejected for SGD"):
            run_and_compare(name, parameters(name, dtype), options, master_dtype)
        return
    streamed = run_and_compare(name, parameters(name, dtype), options, master_dtype)
    assert {part.layout.whole for part in streamed if part.layout.shape} == {name in WHOLE}


def test_a_fused_sgd_that_skips_whole_vectors_is_refused(monkeypatch):
    # Simulates torch 2.11 on the CPU, whose fused SGD skips whole vectors. All 64 elements of the check are in whole
    # vectors, so the replacement changes no element.
    monkeypatch.setattr(torch, "_fused_sgd_", lambda *_, **__: None)
    monkeypatch.setattr(trial, "_fused_sgd_updates", trial._fused_sgd_updates.__wrapped__)
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    for dtype, master_dtype, fused in itertools.product(dtypes, (None, torch.float32), (False, True)):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(100, dtype=dtype))], lr=0.1, fused=fused)
        if dtype == torch.float32 or master_dtype or not fused:
            require_streamable(optimizer, master_dtype)
            continue
        words = r"fused=True is rejected for SGD on parameters of .* Use fused=False"
        with pytest.raises(ConfigError, match=words):
            require_streamable(optimizer, master_dtype)


@pytest.mark.parametrize(("name", "options"), [(name, CASES[name][-1]) for name in CASES])
def test_two_threads_and_larger_chunks_have_the_same_bits_as_torch(name, options):
    shape = (230, 331) if name in WHOLE else (200_003,)
    groups = [[torch.nn.Parameter(torch.randn(shape))], [torch.nn.Parameter(torch.randn(3, 5))]]
    run_and_compare(name, groups, options, torch.float32, steps=3, threads=2, chunk=65_536)


@pytest.mark.parametrize("name", ["SGD", "Adafactor", "RMSprop"])
def test_channels_last_and_transposed_parameters_have_bits_of_torch(name):
    values = torch.randn(8, 6, 13, 11).to(memory_format=torch.channels_last)
    groups = [[torch.nn.Parameter(values)], [torch.nn.Parameter(torch.randn(9, 5).t())]]
    streamed = run_and_compare(name, groups, CASES[name][-1], torch.float32)
    assert streamed[0].layout.stride == values.stride()
    assert streamed[1].layout.stride == (1, 5)


class Scaled(ByParameter):
    """An optimizer that reads its attributes, the parameter's norm and attributes, and the lr of its first group.

    Some of its state is Python numbers.
    """

    def __init__(self, params, *, base, **options):
        super().__init__(params, {"lr": 0.1, **options})
        self.base = base

    def one(self, group, parameter, state):
        if not state:
            state["count"], state["decay"], state["begun"] = 0, 1.0, False
        state["count"] += 1
        state["decay"] *= 0.9
        state["begun"] = True
        # Every step puts a new tensor into the state, and never writes to the earlier tensor.
        state["mean"] = state.get("mean", 0) * 0.9 + parameter.grad
        rate = self.param_groups[0]["lr"] * state["decay"] * self.base ** state["count"]
        rate = rate * getattr(parameter, "factor", 1.0) / float(parameter.norm() + 1)
        parameter.sub_(state["mean"], alpha=rate)


class Doubled(torch.optim.SGD):
    def step(self, closure=None):
        super().step()
        return super().step()


class Sums(torch.optim.Adagrad):
    pass


@pytest.mark.parametrize("dtype", ["fp32", "bf16+master", "bf16"])
@pytest.mark.parametrize(
    ("kind", "options"), [(Scaled, {"base": 1.1}), (Doubled, {"lr": 0.1, "momentum": 0.9}), (Sums, {})]
)
def test_user_optimizers_get_whole_parameters_and_same_bits_as_torch(kind, options, dtype):
    dtype, master_dtype = DTYPES[dtype]
    groups = parameters("SGD", dtype)
    groups[0][1].factor = 3.0
    streamed = run_and_compare(kind, groups, options, master_dtype)
    assert all(part.layout.whole for part in streamed)


@pytest.mark.parametrize("dtype", ["fp32", "bf16+master", "bf16"])
@pytest.mark.parametrize("name", [name for name in CASES if name != "SparseAdam"])
def test_imported_optimizer_state_continues_with_the_bits_of_torch(name, dtype):
    dtype, master_dtype = DTYPES[dtype]
    options = CASES[name][-1]
    shape = (41, 73)
    begun = classes()[name]([torch.nn.Parameter(torch.randn(shape).to(dtype))], **copy.deepcopy(options))
    (parameter,) = begun.param_groups[0]["params"]
    for _ in range(3):
        parameter.grad = torch.randn(shape).to(dtype)
        begun.step()
    streamed = Streamed(begun, parameter, master_dtype)
    assert streamed.updates == int(begun.state[parameter].get("step", 1))
    twin = torch.nn.Parameter(parameter.detach().to(streamed.layout.dtype))
    reference = classes()[name]([twin], **copy.deepcopy(options))
    for of, value in begun.state[parameter].items():
        widened = isinstance(value, torch.Tensor) and value.dtype == dtype
        reference.state[twin][of] = value.to(streamed.layout.dtype).clone() if widened else copy.deepcopy(value)
    gradient = torch.randn(shape).to(dtype)
    twin.grad = gradient.to(twin.dtype)
    reference.step()
    streamed.step(begun, begun.param_groups[0], gradient)
    assert same_bits(streamed.shaped(streamed.values), twin.detach().to(dtype))


# --- runs with unusual parameters: float64, integers, complex numbers, empty, frozen ----------------------


class Odd(torch.nn.Module):
    """Two layers and a parameter `odd`. The sum of `odd.abs()` scales the input of the second layer."""

    def __init__(self, odd, *, trained):
        super().__init__()
        torch.manual_seed(1)
        self.first = torch.nn.Linear(8, 8)
        self.odd = torch.nn.Parameter(odd, requires_grad=trained)
        self.last = torch.nn.Linear(8, 4)

    def forward(self, inputs):
        odd = self.odd.abs().sum()
        return self.last(self.first(inputs) * (1 + odd.to(inputs.dtype)))


def train(trained, optimizer, *, clipped=False, accumulated=1):
    for number in range(4):
        for part in range(accumulated):
            trained(batch(100 * part + number, 8, trained.last.weight.dtype)).square().mean().backward()
        if clipped:
            torch.nn.utils.clip_grad_norm_(trained.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


def same_run(tmp_path, plain, make, loop=None, **options):
    trained, loop = copy.deepcopy(plain), loop or {}
    train(plain, make(plain.parameters()), **loop)
    trained, optimizer = memascend.offload(trained, make(trained.parameters()), storage=tmp_path / "store", **options)
    with optimizer:
        train(trained, optimizer, **loop)
        require_same(plain, trained)


ADAM, ADAMW = (functools.partial(kind, lr=0.01) for kind in (torch.optim.NAdam, torch.optim.AdamW))
MOMENTUM = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


@pytest.mark.parametrize(("make", "gradients"), [(MOMENTUM, "fused"), (ADAMW, "ram")])
def test_float64_training_has_the_same_bits_as_torch(tmp_path, make, gradients):
    plain = Odd(torch.randn(3, dtype=torch.float64), trained=True).double()
    same_run(tmp_path, plain, make, gradients=gradients)


@pytest.mark.parametrize(("make", "host_memory"), [(MOMENTUM, None), (ADAMW, "64MiB"), (ADAM, "64MiB")])
def test_clipped_and_accumulated_float64_gradients_equal_torch(tmp_path, make, host_memory):
    """Clips and accumulates gradients of float64, also in a model that has float32 parameters.

    With a budget, the gradients wait in memory.
    """
    loop = {"clipped": True, "accumulated": 3}
    plain = Odd(torch.randn(5000, dtype=torch.float64).mul(1e-4), trained=True)
    # The engine updates float32 parameters with the bits of the fused AdamW, which differ from the bits
    # of plain AdamW. With AdamW, all parameters are therefore float64.
    plain = plain if host_memory and make is not ADAMW else plain.double()
    same_run(tmp_path, plain, make, loop, gradients="ssd", host_memory=host_memory)


def test_grad_norm_of_float64_gradients_is_computed_in_float64(tmp_path):
    """The squares of the gradients exceed the range of float32, so the norm must be computed in float64."""
    plain = Odd(torch.randn(3, dtype=torch.float64), trained=True).double()
    _, optimizer = memascend.offload(
        plain, MOMENTUM(plain.parameters()), storage=tmp_path / "store", gradients="ssd", max_grad_norm=1e-3
    )
    loss = plain(torch.ones(3, 8, dtype=torch.float64)).square().mean() * 1e60
    wanted = torch.nn.utils.get_total_norm(
        torch.autograd.grad(loss, list(plain.parameters()), retain_graph=True)
    ).item()
    assert wanted > 1e50
    loss.backward()
    optimizer.step()
    assert optimizer.grad_norm == pytest.approx(wanted, rel=1e-12)
    optimizer.close()


# `Doubled` stands for a class that a user wrote. offload() runs a trial of such a class before it streams the state.
@pytest.mark.parametrize("make", [ADAM, MOMENTUM, functools.partial(Doubled, lr=0.01)])
def test_training_with_a_frozen_integer_parameter_equals_torch(tmp_path, make):
    same_run(tmp_path, Odd(torch.arange(5), trained=False), make)


@pytest.mark.parametrize(
    ("odd", "says"),
    [
        (torch.zeros(5, dtype=torch.complex64), "odd is torch.complex64, but only parameters of float32"),
        (torch.zeros(5, dtype=torch.float8_e4m3fn), "odd is torch.float8_e4m3fn, but only parameters of float32"),
        (torch.empty(0, 4), "these parameters have no elements, and share no module with others: odd"),
    ],
)
def test_offload_error_names_complex_float8_or_empty_parameters(tmp_path, odd, says):
    trained = Odd(odd, trained=True)
    with pytest.raises(ConfigError, match=says):
        memascend.offload(trained, ADAM(trained.parameters()), storage=tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_empty_parameter_in_a_module_with_others_trains_as_in_torch(tmp_path):
    plain = Odd(torch.randn(3), trained=True)
    plain.first.extra = torch.nn.Parameter(torch.empty(0, 4))
    same_run(tmp_path, plain, ADAM)


@pytest.mark.parametrize("gradients", ["ssd", "fused", "ram", "auto"])
def test_an_optimizer_may_own_frozen_parameters_which_thaw_later(tmp_path, gradients):
    plain, theirs, model, optimizer = twins(tmp_path, gradients, lambda: chain().requires_grad_(False))
    with optimizer:
        for index in range(4):
            for one, own in ((plain, theirs), (model, optimizer)):
                one[0].weight.requires_grad_(index >= 2)
                one[1].weight.requires_grad_(index >= 1)
                if index:
                    step(one, own, index)
                else:
                    own.step()
        assert optimizer.steps == 3
        require_same(plain, model)
