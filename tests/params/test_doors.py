"""Tests writes to weights between forwards that go through no door: each is refused, and leaves all as it was."""

import zlib

import pytest
import torch
from support.bits import same_bits
from support.chains import WIDTH, batch, chain, step
from support.reached import OPTIMIZERS, taken
from torch import nn

import memascend
from memascend import UsageError

DOORS = r"optimizer\.edit\(parameter\) or memascend\.materialized\(model, modify=True\), or by model\.load_state_dict"


def ungraded(write):
    def without_gradients(p):
        with torch.no_grad():
            write(p)

    return without_gradients


def by_numpy(p):
    p.detach().view(torch.uint8).numpy().reshape(-1)[:32] = 0


def by_dlpack(p):
    torch.from_dlpack(p.detach())[..., :3] = 0.25


def by_out(p):
    torch.mul(p.detach().clone(), 0.5, out=p)


def by_vector(p):
    vector = nn.utils.parameters_to_vector([p])
    nn.utils.vector_to_parameters(vector * 0.5, [p])


def by_pointer(p):
    p.data = torch.full(p.shape, 0.0125, dtype=p.dtype)


def by_iteration(p):
    for row in p:
        row.mul_(0.5)
        break


def by_storage(p):
    storage = p.data.untyped_storage()
    storage[1] ^= 1


@torch.no_grad()
def halved(view):
    view.mul_(0.5)


# torch asks the placeholder: there is an error at once.
AT_ONCE = {
    "data =": by_pointer,
    "setitem": ungraded(lambda p: p.__setitem__(0, 0.5)),
    "in place": ungraded(lambda p: p.mul_(0.5)),
    "operator": ungraded(lambda p: p.__imul__(0.5)),
    "clamp": ungraded(lambda p: p.clamp_(-0.05, 0.05)),
    "copy_": ungraded(lambda p: p.copy_(torch.full_like(p, 0.0125))),
    "foreach": ungraded(lambda p: torch._foreach_mul_([p], 0.5)),
    "foreach copy": ungraded(lambda p: torch._foreach_copy_([p], [torch.zeros(p.shape, dtype=p.dtype)])),
    "out": ungraded(by_out),
    "init": lambda p: nn.init.constant_(p, 0.0125),
    "vector": by_vector,
    "lerp": ungraded(lambda p: p.lerp_(torch.zeros_like(p), 0.25)),
    "index_fill": ungraded(lambda p: p.index_fill_(0, torch.tensor([0]), 0.5)),
    # No name shows these.
    "relu": ungraded(lambda p: nn.functional.relu(p, inplace=True)),
    "hardtanh": ungraded(lambda p: nn.functional.hardtanh(p, -0.01, 0.01, inplace=True)),
    "aten": ungraded(lambda p: torch.ops.aten.mul_.Tensor(p, torch.tensor(2.0))),
}
# It gives a copy, which is compared.
COPIES = {
    "detach": lambda p: p.detach().zero_(),
    "detach of detach": lambda p: p.detach().detach()[:1].zero_(),
    "data": lambda p: p.data.mul_(0.5),
    "data of a view": ungraded(lambda p: p.view(-1).data[:5].fill_(0.5)),
    "data item": lambda p: p.data.__setitem__(0, 0.25),
    "copy to data": lambda p: p.data.copy_(p.data.clone().mul_(0.5)),
    "index": ungraded(lambda p: p[0].fill_(0.25)),
    "slice": ungraded(lambda p: p[..., 1:3].zero_()),
    "view": ungraded(lambda p: p.view(-1).zero_()),
    "reshape": ungraded(lambda p: p.reshape(-1)[:7].zero_()),
    "flatten": ungraded(lambda p: p.flatten().mul_(0.5)),
    "transpose": ungraded(lambda p: p.t()[0].zero_()),
    "mT": ungraded(lambda p: p.view(1, -1).mT.mul_(0.5)),
    "split": ungraded(lambda p: p.split(1)[0].zero_()),
    "chunk": ungraded(lambda p: p.chunk(2)[1].mul_(0.5)),
    "unbind": ungraded(lambda p: p.unbind()[0].zero_()),
    "iteration": ungraded(by_iteration),
    "select": ungraded(lambda p: p.select(0, 0).zero_()),
    "narrow": ungraded(lambda p: p.narrow(0, 0, 1).zero_()),
    "strided": ungraded(lambda p: p.as_strided((4,), (1,)).zero_()),
    "expand_as": ungraded(lambda p: p.expand_as(p)[0].zero_()),
    "view as another dtype": ungraded(lambda p: p.view(torch.int16 if p.element_size() == 2 else torch.int32).zero_()),
    "squeeze": ungraded(lambda p: p.unsqueeze(0).squeeze(0)[0].zero_()),
    "numpy": by_numpy,
    "dlpack": by_dlpack,
    "storage": by_storage,
    "graph's view": lambda p: p.view(-1).data.mul_(0.5),
    "graph's view in place": lambda p: halved(p.view(-1)),
}


WAYS = [
    (units, dtype, optimizer, gradients)
    for units in (2, 16)
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    for optimizer in OPTIMIZERS
    for gradients in ("fused", "ssd", "ram")
]


def values(model):
    return [p.detach().clone() for p in model.parameters()]


def compare(folder, write, way, *, at_once):
    """Each write is refused with the name and the door, at once or by the next forward, and nothing has changed."""
    units, dtype, kind, gradients = way
    plain = chain(units, bias=True, dtype=dtype)
    theirs = OPTIMIZERS[kind](plain.parameters())
    model = chain(units, bias=True, dtype=dtype)
    model, offloaded = taken(model, OPTIMIZERS[kind](model.parameters()), folder, gradients=gradients)
    with offloaded:
        for of, optimizer in ((plain, theirs), (model, offloaded)):
            step(of, optimizer)
        for name, parameter in (("0.weight", model[0].weight), (f"{units - 1}.bias", model[-1].bias)):
            if parameter.dim() == 1 and write in (COPIES["transpose"], COPIES["mT"], COPIES["flatten"]):
                continue
            if at_once:
                with pytest.raises(UsageError, match=f"{name!r} is offloaded, and is not .*{DOORS}"):
                    write(parameter)
            else:
                write(parameter)
                with pytest.raises(UsageError, match=f"^{name} of an offloaded model was written to .*{DOORS}"):
                    model(batch(dtype=dtype))
            assert all(map(same_bits, values(model), values(plain)))
        for _ in range(2):
            losses = [step(of, optimizer) for of, optimizer in ((plain, theirs), (model, offloaded))]
            assert same_bits(*losses)
    model = chain(units, bias=True, dtype=dtype)
    model, offloaded = taken(model, OPTIMIZERS[kind](model.parameters()), folder, existing="resume")
    with offloaded:
        assert offloaded.steps == 3
        assert all(map(same_bits, values(model), values(plain)))


def way_of(name):
    return WAYS[zlib.crc32(name.encode()) % len(WAYS)]


@pytest.mark.parametrize("write", AT_ONCE)
def test_a_write_that_torch_shows_is_refused_at_the_call(tmp_path, write):
    compare(tmp_path, AT_ONCE[write], way_of(write), at_once=True)


@pytest.mark.parametrize("write", COPIES)
def test_a_write_to_a_copy_is_refused_by_the_next_forward(tmp_path, write):
    compare(tmp_path, COPIES[write], way_of(write), at_once=False)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(str(part) for part in way))
def test_they_are_in_every_mode(tmp_path, way):
    for at_once, writes in ((True, AT_ONCE), (False, COPIES)):
        for name, write in writes.items():
            (tmp_path / name).mkdir()
            compare(tmp_path / name, write, way, at_once=at_once)


EVENTS = {
    "hand-out": lambda model, _, __: model[1].weight.data,
    "reading anew": lambda model, _, __: model[0].weight.detach(),
    "forward": lambda model, _, __: model(batch()),
    "part of the model": lambda model, _, __: model[1](batch()),
    "step": lambda _, offloaded, __: offloaded.step(),
    "save": lambda _, offloaded, folder: offloaded.save(folder / "saved"),
    "close": lambda _, offloaded, __: offloaded.close(),
    "load": lambda model, _, __: model.load_state_dict(model.state_dict()),
    "edit": lambda model, offloaded, _: offloaded.edit(model[0].weight).__enter__(),
    "materialized": lambda model, _, __: memascend.materialized(model).__enter__(),
    "schedule": lambda _, offloaded, __: offloaded.schedule(torch.optim.lr_scheduler.StepLR(offloaded, 2)),
}


@pytest.mark.parametrize(
    ("event", "is_kept"),
    # A copy that somebody has is looked at by the next forward, and not whenever another weight is read.
    [(event, is_kept) for event in EVENTS for is_kept in (False, True) if (event, is_kept) != ("hand-out", True)],
)
def test_a_write_to_a_copy_is_refused_by_whatever_comes_next(training, tmp_path, event, is_kept):
    model, offloaded = training(units=2)
    expected = values(model)
    if event == "step":
        model(batch()).square().mean().backward()
    view = model[0].weight.detach()
    view.mul_(0.5)
    if not is_kept:
        del view
    with pytest.raises(UsageError, match=rf"^0\.weight of an offloaded model was written to .*{DOORS}"):
        EVENTS[event](model, offloaded, tmp_path)
    if is_kept:
        del view
    if event != "close":
        offloaded.zero_grad()
        assert all(map(same_bits, values(model), expected))
        step(model, offloaded)
        assert offloaded.steps == 2


def test_every_weight_that_was_written_to_is_named(training):
    model, offloaded = training(units=3)
    views = [p.data for p in model.parameters()]
    for view in views[:4]:
        view.add_(1)
    with pytest.raises(UsageError, match=r"^0\.bias, 0\.weight, 1\.bias, 1\.weight of an offloaded model"):
        model(batch())
    del view, views
    step(model, offloaded)


KEPT = {
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "slice": lambda p: p.detach()[:1],
    "view": torch.no_grad()(lambda p: p.view(-1)),
    "view in a graph": lambda p: p.view(-1),
    "a graph that saved a view": lambda p: (p.view(-1) * torch.ones(p.numel(), requires_grad=True)).sum(),
    "numpy": lambda p: p.detach().view(torch.uint8).numpy(),
    "memoryview": lambda p: memoryview(p.data.numpy()),
    "dlpack": lambda p: torch.from_dlpack(p.detach()),
    "storage": lambda p: p.data.untyped_storage(),
}


@pytest.mark.parametrize("way", KEPT)
@pytest.mark.parametrize("gradients", ["fused", "ssd"])
def test_a_view_that_is_kept_over_a_step_is_refused_before_it(training, way, gradients):
    """In memory it would follow the weight. Released, the same step is made."""
    plain = chain(3, bias=True)
    theirs = OPTIMIZERS["adamw"](plain.parameters())
    for _ in range(2):
        step(plain, theirs)
    model, offloaded = training(units=3, gradients=gradients)
    kept = KEPT[way](model[1].weight)
    model(batch()).pow(2).mean().backward()
    for _ in range(2):
        with pytest.raises(UsageError, match=r"^1\.weight is about to change, .*p\.detach\(\)\.clone\(\)"):
            offloaded.step()
        assert offloaded.steps == 1
    del kept
    offloaded.step()
    offloaded.zero_grad()
    assert offloaded.steps == 2
    assert all(map(same_bits, values(model), values(plain)))


@pytest.mark.parametrize("door", ["edit", "load", "materialized"])
def test_a_view_that_is_kept_over_another_change_is_refused_before_it(training, door):
    model, offloaded = training(units=2)
    before, other = values(model), {name: p + 1 for name, p in model.state_dict().items()}
    view = model[1].weight.detach()

    def change():
        if door == "load":
            model.load_state_dict(other)
        elif door == "edit":
            with offloaded.edit(model[1].weight) as weight:
                weight.add_(1)
        else:
            with memascend.materialized(model, modify=True), torch.no_grad():
                model[1].weight.add_(1)

    with pytest.raises(UsageError, match=r"^1\.weight is about to change"):
        change()
    assert all(map(same_bits, values(model), before))
    if door == "edit":
        with offloaded.edit(model[0].weight) as weight:
            weight.add_(1)
    del view
    change()
    assert torch.equal(model[1].weight, other["1.weight"])
    step(model, offloaded)


@pytest.mark.parametrize("budget", [None, "64MiB"])
@pytest.mark.parametrize("door", ["edit", "load"])
def test_a_graph_from_before_a_change_is_refused(training, budget, door):
    """As in memory, where the graph has saved what was written to."""
    model, offloaded = training(units=2, host_memory=budget)
    loss = model(batch()).square().mean()
    if door == "edit":
        with offloaded.edit(model[1].weight) as weight:
            weight.mul_(0.5)
    else:
        model.load_state_dict({name: p * 0.5 for name, p in model.state_dict().items()})
    with pytest.raises(RuntimeError, match=r"unit '1'.*run the forward again|modified by an inplace operation"):
        loss.backward()
    offloaded.zero_grad()
    step(model, offloaded)
    assert offloaded.steps == 2


class Holder:
    """An object that is no module."""


class Keeps(nn.Module):
    """Computes with what it takes of its weight in its first forward, or in each."""

    def __init__(self, take, *, anew=False):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH) * 0.1)
        self.take, self.anew, self.held = take, anew, Holder()
        self.held.views = {}

    def forward(self, x):
        if self.anew or not self.held.views:
            self.held.views["weight"] = [self.take(self.weight)]
        return x @ self.held.views["weight"][0] + x @ self.weight


def keeping(take):
    torch.manual_seed(0)
    return nn.Sequential(Keeps(take), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize("comes", ["step", "forward"])
@pytest.mark.parametrize("take", [lambda p: p.t(), lambda p: p[:], lambda p: p.detach(), lambda p: p.data])
def test_a_view_that_a_module_keeps_beyond_its_next_forward_is_refused(tmp_path, take, comes):
    """In memory it follows the weight. No step is made that used it."""
    model = keeping(take)
    model, optimizer = taken(model, OPTIMIZERS["adamw"](model.parameters()), tmp_path, host_memory=None)
    words = r"the attribute 'held' of 0 \(Keeps\) is a view of '0\.weight' that an earlier forward took"
    with optimizer:
        step(model, optimizer)
        if comes == "forward":
            with torch.no_grad():
                model(batch())
        for _ in range(2):
            with pytest.raises(UsageError, match=words):
                step(model, optimizer)
            optimizer.zero_grad()
        assert optimizer.steps == 1
        model[0].held.views.clear()
        step(model, optimizer)
        assert optimizer.steps == 2


def test_a_view_that_a_module_keeps_of_a_weight_in_ram_follows_it(tmp_path):
    plain, model = (keeping(lambda p: p.t()) for _ in range(2))
    theirs = OPTIMIZERS["adamw"](plain.parameters())
    model, optimizer = taken(model, OPTIMIZERS["adamw"](model.parameters()), tmp_path, host_memory="64MiB")
    with optimizer:
        for seed in range(3):
            assert same_bits(step(model, optimizer, seed), step(plain, theirs, seed))


class Transposed(torch.autograd.Function):
    """Keeps a view in its context, where no hook on saved tensors sees it."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.x, ctx.transposed = x, weight.t()
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.transposed, ctx.x.t() @ gradient


class ByContext(Keeps):
    def forward(self, x):
        return Transposed.apply(x, self.weight)


class InCycle(Keeps):
    def forward(self, x):
        cycle = [self.weight.t()]
        cycle.append(cycle)
        return x @ cycle[0]


class Checkpointed(Keeps):
    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)


LEGITIMATE = {
    "anew": lambda: Keeps(lambda p: p.t(), anew=True),
    "a detached one anew": lambda: Keeps(lambda p: p.detach().t(), anew=True),
    "context": lambda: ByContext(lambda p: p),
    "cycle": lambda: InCycle(lambda p: p),
    "checkpoint": lambda: Checkpointed(lambda p: p.t(), anew=True),
    "a copy": lambda: Keeps(lambda p: p.detach().clone()),
}


@pytest.mark.parametrize("kind", LEGITIMATE)
def test_other_views_of_a_forward_train_as_in_memory(tmp_path, kind):
    """Though the graphs of all steps, and what hooks have seen, are kept."""

    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), LEGITIMATE[kind](), nn.Linear(WIDTH, WIDTH))

    plain, model = (make() for _ in range(2))
    theirs = OPTIMIZERS["adamw"](plain.parameters())
    model, optimizer = taken(model, OPTIMIZERS["adamw"](model.parameters()), tmp_path, host_memory=None)
    graphs, seen = [], []
    model[1].register_forward_hook(lambda module, *_: seen.append(module.weight.detach()))
    with optimizer:
        for seed in range(4):
            losses = [one(batch(seed)).square().mean() for one in (plain, model)]
            graphs += losses
            for loss, each in zip(losses, (theirs, optimizer), strict=True):
                loss.backward()
                each.step()
                each.zero_grad()
            assert same_bits(losses[0].detach(), losses[1].detach())
        assert optimizer.steps == 4


class Normalised(nn.Module):
    """Writes to its weight in each forward, if it does."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(20, WIDTH))
        self.writes = True

    def write(self, weight, ids):
        del ids
        weight.div_(weight.norm(dim=1, keepdim=True))

    def forward(self, ids):
        if self.writes:
            with torch.no_grad():
                self.write(self.weight, ids)
        return nn.functional.embedding(ids, self.weight)

    def leave_out(self):
        self.writes = False


class Bounded(nn.Embedding):
    """Its forward writes to the rows that it reads."""

    def __init__(self):
        super().__init__(20, WIDTH, max_norm=1.0)

    def write(self, weight, ids):
        torch.embedding_renorm_(weight, ids, 1.0, self.norm_type)

    def leave_out(self):
        self.max_norm = None


@pytest.mark.parametrize("kind", [Normalised, Bounded])
def test_a_forward_that_writes_to_its_weights_is_refused_with_a_way_that_trains_as_in_memory(tmp_path, kind):
    def made():
        torch.manual_seed(0)
        return nn.Sequential(kind(), nn.Linear(WIDTH, WIDTH))

    def loss_of(one, seed):
        return one(torch.randint(20, (6,), generator=torch.Generator().manual_seed(seed))).square().mean()

    plain, model = made(), made()
    theirs = OPTIMIZERS["adamw"](plain.parameters())
    model, optimizer = taken(model, OPTIMIZERS["adamw"](model.parameters()), tmp_path, host_memory=None)
    with optimizer:
        loss_of(model, 0).backward()
        with pytest.raises(
            UsageError, match=rf"{DOORS}.*before the forward, within optimizer\.edit\(\), as docs/limits"
        ):
            optimizer.step()
        optimizer.zero_grad()
        model[0].leave_out()
        for seed in range(3):
            wanted = loss_of(plain, seed)
            with optimizer.edit(model[0].weight) as weight:
                model[0].write(weight, torch.randint(20, (6,), generator=torch.Generator().manual_seed(seed)))
            loss = loss_of(model, seed)
            for one, each in ((wanted, theirs), (loss, optimizer)):
                one.backward()
                each.step()
                each.zero_grad()
            assert same_bits(loss.detach(), wanted.detach())
        assert all(map(same_bits, values(model), values(plain)))
