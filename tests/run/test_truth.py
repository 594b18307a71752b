"""Tests for silent errors: a wrong number, a lost gradient, a skipped or repeated update."""

import gc
import threading

import pytest
import torch
from torch import nn

import memascend

WIDTH = 32


def chain(layers=2, bias=False):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(layers)))


def batch(seed=1):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))


def loss_of(model, seed=1):
    return model(batch(seed)).square().mean()


def twins(tmp_path, gradients="ssd", make=chain, rate=0.1, kind=torch.optim.SGD, **options):
    """The same model twice: in RAM, and offloaded."""
    plain, model = make(), make()
    ours = kind(model.parameters(), lr=rate)
    model, ours = memascend.offload(
        model, ours, storage=tmp_path / "twin.store", gradients=gradients, host_memory="64MiB", **options
    )
    return plain, kind(plain.parameters(), lr=rate), model, ours


class Commits:
    """An engine with a commit of its own."""

    def __init__(self, engine, commit):
        self.engine = engine
        self.commit = commit

    def __getattr__(self, name):
        return getattr(self.engine, name)


def require_same(plain, model):
    with memascend.materialized(model):
        for (name, wanted), got in zip(plain.named_parameters(), model.parameters(), strict=True):
            assert torch.equal(wanted, got), f"{name} differs by {(wanted - got).abs().max()}"


# --- gradients that users hold, assign and use -------------------------------------------


def test_a_gradient_that_was_dropped_never_reads_as_the_next_one(tmp_path):
    plain, _, model, optimizer = twins(tmp_path)
    with optimizer:
        loss_of(plain).backward()
        wanted = plain[0].weight.grad
        loss_of(model).backward()
        saved = model[0].weight.grad
        optimizer.zero_grad()
        loss_of(model, 2).backward()
        with pytest.raises(memascend.UsageError, match="clone"):
            saved.clone()
        with pytest.raises(memascend.UsageError, match="clone"):
            model[0].weight.grad.add_(saved)
        del wanted


@pytest.mark.parametrize("gradients", ["ssd", "ram", "fused"])
def test_gradients_that_are_assigned_again_after_zero_grad_make_a_step(tmp_path, gradients):
    plain, theirs, model, optimizer = twins(tmp_path, gradients, lambda: chain(1))

    def assign(one, opt, seed):
        for p in one.parameters():
            p.grad = torch.full(p.shape, float(seed))
        opt.step()
        opt.zero_grad()

    with optimizer:
        for seed in range(1, 7):
            assign(plain, theirs, seed)
            gc.collect()
            assign(model, optimizer, seed)
            gc.collect()
        assert optimizer.steps == 6
        require_same(plain, model)


@pytest.mark.parametrize("gradients", ["ssd", "fused"])
def test_an_alias_of_a_gradient_is_that_gradient(tmp_path, gradients):
    plain, theirs, model, optimizer = twins(tmp_path, gradients)
    with optimizer:
        for one, opt in ((plain, theirs), (model, optimizer)):
            loss_of(one).backward()
            for p in one.parameters():
                p.grad = p.grad.detach()
            opt.step()
        assert optimizer.steps == 1
        require_same(plain, model)


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("gradients", ["ssd", "fused"])
def test_a_gradient_with_a_graph_is_refused(tmp_path, gradients):
    *_, model, optimizer = twins(tmp_path, gradients)
    with optimizer:
        with pytest.raises(memascend.UsageError, match="create_graph"):
            loss_of(model).backward(create_graph=True)
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_penalty_on_gradients_in_memory_is_exact(tmp_path):
    plain, theirs, model, optimizer = twins(tmp_path, "ram")
    with optimizer:
        for one, opt in ((plain, theirs), (model, optimizer)):
            loss = loss_of(one)
            loss.backward(create_graph=True)
            penalty = sum(p.grad.square().sum() for p in one.parameters())
            penalty.backward()
            opt.step()
            opt.zero_grad()
        require_same(plain, model)


def test_clipping_after_an_accumulated_update_ran_is_refused(tmp_path):
    *_, model, optimizer = twins(tmp_path, "fused", accumulation_steps=2)
    with optimizer:
        loss_of(model).backward()
        loss_of(model, 2).backward()
        with pytest.raises(memascend.UsageError, match="ssd"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf")) > 0


def test_the_norm_of_accumulated_gradients_is_of_all_of_them(tmp_path):
    plain, _, model, optimizer = twins(tmp_path, "fused", accumulation_steps=2)
    with optimizer:
        for one in (plain, model):
            loss_of(one).backward()
            loss_of(one, 2).backward()
        wanted = torch.nn.utils.clip_grad_norm_(plain.parameters(), float("inf"))
        got = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        torch.testing.assert_close(got, wanted)


def test_a_norm_that_is_nan_spoils_the_step_as_torch_does(tmp_path):
    plain, theirs, model, optimizer = twins(tmp_path, "ssd", max_grad_norm=1.0)
    with optimizer:
        for one in (plain, model):
            loss_of(one).backward()
            one[0].weight.grad = torch.full((WIDTH, WIDTH), float("nan"))
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        theirs.step()
        optimizer.step()
        with memascend.materialized(model):
            assert plain[1].weight.isnan().all()
            assert model[1].weight.isnan().all()


# --- steps that nobody asked for, and steps that fail --------------------------------------


@pytest.mark.parametrize("gradients", ["ssd", "fused", "auto", "ram"])
def test_a_step_without_gradients_is_none(tmp_path, gradients):
    *_, model, optimizer = twins(tmp_path, gradients)
    with optimizer:
        loss_of(model).backward()
        model.zero_grad()
        optimizer.step()
        assert optimizer.steps == 0
        loss_of(model).backward()
        optimizer.step()
        assert optimizer.steps == 1


@pytest.mark.parametrize("gradients", ["ssd", "fused", "ram"])
def test_a_step_that_was_interrupted_after_its_commit_is_committed(tmp_path, gradients, monkeypatch):
    plain, theirs, model, optimizer = twins(tmp_path, gradients, kind=torch.optim.AdamW, rate=1e-2)
    session = optimizer._session
    commit = session.run.resources.engine.commit

    def interrupted(*args, **options):
        commit(*args, **options)
        raise KeyboardInterrupt

    with optimizer:
        for index in range(3):
            loss_of(plain, index).backward()
            theirs.step()
            theirs.zero_grad()
            loss_of(model, index).backward()
            if index == 1:
                with monkeypatch.context() as patch:
                    patch.setattr(session.run.resources, "engine", Commits(session.run.resources.engine, interrupted))
                    with pytest.raises(KeyboardInterrupt):
                        optimizer.step()
            else:
                optimizer.step()
            optimizer.zero_grad()
        assert optimizer.steps == 3
        with memascend.materialized(model):
            for wanted, got in zip(plain.parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(wanted, got, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("gradients", ["ssd", "fused", "ram"])
def test_after_a_step_that_failed_the_next_one_is_of_the_next_gradients(tmp_path, gradients, monkeypatch):
    plain, theirs, model, optimizer = twins(tmp_path, gradients)
    session = optimizer._session

    def fails(*_, **__):
        raise memascend.StorageError("no room")

    with optimizer:
        loss_of(model, 1).backward()
        with monkeypatch.context() as patch:
            patch.setattr(session.run.resources, "engine", Commits(session.run.resources.engine, fails))
            with pytest.raises(memascend.StorageError):
                optimizer.step()
        model.zero_grad()
        for one, opt in ((plain, theirs), (model, optimizer)):
            loss_of(one, 2).backward()
            opt.step()
        require_same(plain, model)


def test_an_update_that_could_not_begin_is_no_part_of_the_next_step(tmp_path, monkeypatch):
    plain, theirs, model, optimizer = twins(tmp_path, "ssd")
    rule = optimizer._session.run.gradients.rule
    begin, calls = rule.update_spilled, []

    def fails_second(*args):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        begin(*args)

    with optimizer:
        loss_of(model).backward()
        monkeypatch.setattr(rule, "update_spilled", fails_second)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        optimizer.step()
        loss_of(plain).backward()
        theirs.step()
        require_same(plain, model)


# --- what offload() is given ------------------------------------------------------------------


@pytest.mark.parametrize("gradients", ["ssd", "fused", "ram", "auto"])
def test_an_optimizer_may_own_frozen_parameters_which_thaw_later(tmp_path, gradients):
    def half_frozen():
        model = chain()
        model[0].weight.requires_grad_(False)
        return model

    plain, theirs, model, optimizer = twins(tmp_path, gradients, half_frozen)
    with optimizer:
        for index in range(4):
            for one, opt in ((plain, theirs), (model, optimizer)):
                one[0].weight.requires_grad_(index >= 2)
                loss_of(one, index).backward()
                opt.step()
                opt.zero_grad()
        require_same(plain, model)


def test_parameters_that_share_memory_are_refused(tmp_path):
    model = chain()
    model[1].weight.data = model[0].weight.data
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(memascend.ConfigError, match="share memory"):
        memascend.offload(model, optimizer, storage=tmp_path / "s.store")


def test_a_buffer_that_is_a_view_of_a_parameter_is_refused(tmp_path):
    model = chain()
    model.register_buffer("first", model[0].weight.detach()[:2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(memascend.ConfigError, match="share memory"):
        memascend.offload(model, optimizer, storage=tmp_path / "s.store")


def test_parameters_that_are_parts_of_one_vector_are_fine(tmp_path):
    def flattened():
        model = chain()
        vector = nn.utils.parameters_to_vector(model.parameters())
        nn.utils.vector_to_parameters(vector, model.parameters())
        return model

    plain, theirs, model, optimizer = twins(tmp_path, make=flattened)
    with optimizer:
        for one, opt in ((plain, theirs), (model, optimizer)):
            loss_of(one).backward()
            opt.step()
        require_same(plain, model)


# --- residency ------------------------------------------------------------------------------


def test_a_unit_whose_read_failed_is_read_again(tmp_path, monkeypatch):
    plain, _, model, optimizer = twins(tmp_path)
    residency = optimizer._session.run.residency

    class Interrupted:
        def __init__(self, fetch):
            self.fetch = fetch

        def wait(self):
            raise KeyboardInterrupt

    def blank(_, into):
        into.zero_()
        return Interrupted(None)

    with optimizer, torch.no_grad():
        wanted = plain(batch())
        with monkeypatch.context() as patch:
            patch.setattr(residency._memory, "begin", blank)
            try:
                model(batch())
            except KeyboardInterrupt:
                patch.undo()
                # The traceback holds what was being read into.
                assert torch.equal(model(batch()), wanted)
            else:
                pytest.fail("nothing was read")


def test_two_threads_may_compute_at_once(tmp_path):
    class Turns(nn.Module):
        """Two modules in one unit, which different threads are in at one time."""

        def __init__(self):
            super().__init__()
            self.one = nn.Linear(WIDTH, WIDTH)
            self.two = nn.Linear(WIDTH, WIDTH)
            self.two.weight, self.two.bias = self.one.weight, self.one.bias

        def forward(self, x):
            return self.two(self.one(x))

    def make():
        torch.manual_seed(0)
        return Turns()

    plain, _, model, optimizer = twins(tmp_path, make=make)
    inside, left = threading.Event(), threading.Event()
    found = []

    def second():
        inside.wait(10)
        with torch.no_grad():
            found.append(model.two(batch()))

    def hold(*_):
        # The first thread leaves while the second is inside.
        left.wait(10)

    def enter_second(*_):
        inside.set()
        left.wait(0.2)

    model.one.register_forward_pre_hook(enter_second)
    seen = []

    def probe(module, _):
        left.set()
        if threading.current_thread() is not first and first.ident is not None:
            first.join(10)
        try:
            seen.append(torch.equal(module.weight.data, plain.two.weight))
        except memascend.UsageError as error:
            seen.append(error)

    model.two.register_forward_pre_hook(probe)
    with optimizer, torch.no_grad():
        seen.append(True)
        # Each thread is known from its first forward of the whole model.
        warm = threading.Thread(target=lambda: model(batch()))
        first = warm
        inside.set(), left.set()
        model(batch())
        warm.start()
        warm.join(20)
        inside.clear(), left.clear(), seen.clear()
        first = threading.Thread(target=lambda: model.one(batch()))
        other = threading.Thread(target=second)
        other.start()
        first.start()
        first.join(20)
        other.join(20)
        assert seen == [True], "the unit was taken away while another thread computed with it"
        assert torch.equal(found[0], plain.two(batch()))


def test_forwards_in_another_thread_do_not_fail_a_backward(tmp_path):
    plain, theirs, model, optimizer = twins(tmp_path)
    other = chain(1)

    def evaluates(gradient):
        def run():
            with torch.no_grad():
                model(batch())

        thread = threading.Thread(target=run)
        thread.start()
        thread.join(20)
        return gradient

    del other
    with optimizer:
        out = model[0](batch())
        out.register_hook(evaluates)
        loss = model[1](out)
        loss.register_hook(evaluates)
        loss.square().mean().backward()
        optimizer.step()
        loss_of(plain).backward()
        theirs.step()
        require_same(plain, model)


def test_a_forward_that_was_interrupted_leaves_nothing_bound(tmp_path):
    plain, _, model, optimizer = twins(tmp_path, make=lambda: chain(4))
    residency = optimizer._session.run.residency

    def interrupts(*_):
        raise KeyboardInterrupt

    with optimizer, torch.no_grad():
        hook = model[1].register_forward_hook(interrupts, prepend=True)
        with pytest.raises(KeyboardInterrupt):
            model(batch())
        hook.remove()
        assert torch.equal(model(batch()), plain(batch()))
        assert not any(home.bound for home in residency.units.homes)


# --- accumulation --------------------------------------------------------------------------------


def test_gradients_that_were_dropped_are_no_part_of_the_count(tmp_path):
    plain, theirs, model, optimizer = twins(tmp_path, "fused", accumulation_steps=2)
    with optimizer:
        for one, opt in ((plain, theirs), (model, optimizer)):
            loss_of(one, 1).backward()
            one.zero_grad()
            loss_of(one, 2).backward()
            loss_of(one, 3).backward()
            opt.step()
        require_same(plain, model)


def test_autograd_grad_through_a_checkpoint_is_no_backward(tmp_path):
    from torch.utils.checkpoint import checkpoint

    plain, theirs, model, optimizer = twins(tmp_path, "fused", accumulation_steps=2)
    with optimizer:
        for one, opt in ((plain, theirs), (model, optimizer)):
            x = batch().requires_grad_()
            out = checkpoint(one, x, use_reentrant=False).square().mean()
            loss_of(one, 2).backward()
            torch.autograd.grad(out, [x])
            loss_of(one, 3).backward()
            opt.step()
        require_same(plain, model)


class OwnCheckpoint(torch.autograd.Function):
    """A reentrant checkpoint that is not torch's, as libraries have them."""

    @staticmethod
    def forward(ctx, function, tensor):
        ctx.function = function
        ctx.save_for_backward(tensor)
        with torch.no_grad():
            return function(tensor)

    @staticmethod
    def backward(ctx, gradient):
        tensor = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.function(tensor)
        torch.autograd.backward(out, gradient)
        return None, tensor.grad


@pytest.mark.parametrize("gradients", ["fused", "auto", "ssd"])
def test_a_weight_in_two_backwards_within_one(tmp_path, gradients):
    plain, theirs, model, optimizer = twins(tmp_path, gradients)
    with optimizer:
        for index in range(3):
            for one, opt in ((plain, theirs), (model, optimizer)):
                out = OwnCheckpoint.apply(one[0], batch(index).requires_grad_())
                out = OwnCheckpoint.apply(one[0], one[1](out))
                out.square().mean().backward()
                opt.step()
                opt.zero_grad()
        require_same(plain, model)


@pytest.mark.parametrize("gradients", ["fused", "auto", "ssd"])
@pytest.mark.parametrize("way", ["first", "last", "twice", "touched"])
def test_a_weight_inside_and_outside_of_a_reentrant_checkpoint(tmp_path, gradients, way):
    """Its gradient comes in pieces, of which the outer may be the first."""
    from torch.utils.checkpoint import checkpoint

    def forward(model, x):
        def inside(y):
            return model[0](y) if way != "touched" else y @ model[0].weight.t()

        if way == "first":
            x = model[0](x)
        x = checkpoint(inside, x, use_reentrant=True)
        if way == "twice":
            x = checkpoint(inside, model[1](x), use_reentrant=True)
        if way in ("last", "touched"):
            x = model[0](x)
        return model[1](x).square().mean()

    plain, theirs, model, optimizer = twins(tmp_path, gradients)
    with optimizer:
        for index in range(3):
            for one, opt in ((plain, theirs), (model, optimizer)):
                forward(one, batch(index).requires_grad_()).backward()
                opt.step()
                opt.zero_grad()
        require_same(plain, model)


def test_a_step_after_a_step_with_a_new_gradient_for_one(tmp_path):
    *_, model, optimizer = twins(tmp_path, "fused")
    with optimizer:
        loss_of(model).backward()
        optimizer.step()
        model[0].weight.grad = torch.ones(WIDTH, WIDTH)
        with pytest.raises(memascend.UsageError, match="zero_grad"):
            optimizer.step()
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
        assert optimizer.steps == 2


def test_a_large_buffer_that_is_replaced_is_committed(tmp_path):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("count", torch.zeros(1 << 19))

        def forward(self, x):
            self.count = self.count + 1
            return self.layer(x)

    model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = memascend.offload(model, optimizer, storage=tmp_path / "s.store", gradients="ssd")
    with optimizer:
        for _ in range(4):
            for index in range(2):
                loss_of(model, index).backward()
            optimizer.step()
            optimizer.zero_grad()
    fresh = Counting()
    again = torch.optim.SGD(fresh.parameters(), lr=0.1)
    fresh, again = memascend.offload(fresh, again, storage=tmp_path / "s.store", gradients="ssd", existing="resume")
    with again:
        assert fresh.count[0] == 8
