"""Tests the content of a commit, later changes that close() commits, and steps that fail or are interrupted."""

import ast
import functools
import itertools
import os
import pathlib
import sys
from unittest import mock

import pytest
import torch
from support.bits import same_states
from support.chains import chain, loss_of, offloaded, require_same, step, twins, values
from torch import nn

import memascend
from memascend.optim import rules

WIDTH = 16
# The number of elements of a large buffer. A step writes a large buffer only if the buffer has changed. Every step
# writes all small buffers, which tests/parity/machine.py tests.
LARGE = 600_000


class Counting(nn.Module):
    """A model that writes to its buffer in place in every forward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(LARGE))

    def forward(self, x):
        self.seen += 1
        return self.layer(x)


class Codebook(Counting):
    """A model whose forward does not change its buffer.

    Like `vector_quantize_pytorch`, a test changes the buffer through `.data`. torch then counts no new version of the
    buffer.
    """

    def forward(self, x):
        return self.layer(x)


@pytest.mark.parametrize(("kind", "is_replaced"), [(Counting, True), (Codebook, False)])
def test_step_commits_a_buffer_changed_in_place_or_replaced(tmp_path, kind, is_replaced):
    model, optimizer = offloaded(tmp_path / "s", kind())
    for index in range(3):
        step(model, optimizer)
        if is_replaced:
            model.seen = model.seen * 0.5 + index
        else:
            model.seen.data.mul_(0.5).add_(index)
    step(model, optimizer)
    wanted = model.seen.clone()
    optimizer.close()
    model, optimizer = offloaded(tmp_path / "s", kind(), existing="resume")
    with optimizer:
        assert torch.equal(model.seen, wanted)


def test_buffer_of_a_failed_step_is_committed_by_the_next_step(tmp_path):
    model, optimizer = offloaded(tmp_path / "s", Codebook())
    step(model, optimizer)
    model.seen += 1
    error = memascend.StorageError("no room")
    with mock.patch.object(memascend.engine.Engine, "commit", side_effect=error), pytest.raises(type(error)):
        step(model, optimizer)
    optimizer.zero_grad()
    step(model, optimizer)
    before = sum(optimizer.report().written.values())
    step(model, optimizer)
    assert sum(optimizer.report().written.values()) - before < LARGE, "the step wrote an unchanged buffer"
    optimizer.close()
    model, optimizer = offloaded(tmp_path / "s", Codebook(), existing="resume")
    with optimizer:
        assert model.seen.eq(1).all()


def normed():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))


def test_deleted_buffer_keeps_its_committed_value(tmp_path):
    """Steps, loads and close() work after code has deleted a buffer.

    Permanent pruning, for example, deletes its mask.
    """

    def made(**options):
        model = normed()
        model.register_buffer("extra", torch.full((3,), 7.0))
        return offloaded(tmp_path / "s", model, **options)

    model, optimizer = made()
    with optimizer:
        del model.extra
        step(model, optimizer)
        model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()}, strict=False)
        optimizer.save(tmp_path / "saved")
    again, optimizer = made(existing="resume")
    with optimizer:
        assert optimizer.steps == 1
        assert torch.equal(again.extra, torch.full((3,), 7.0))
        assert torch.equal(again[1].running_mean, model[1].running_mean)


@pytest.mark.parametrize(("change", "gradients"), [("dtype", "fused"), ("shape in place", "ssd")])
def test_step_rejects_a_buffer_of_changed_dtype_or_shape_until_set_back(tmp_path, change, gradients):
    model, optimizer = offloaded(tmp_path / "s", normed(), gradients=gradients)
    with optimizer:
        norm = model[1]
        own, before = norm.running_mean.clone(), model[0].weight.detach().clone()
        loss_of(model).backward()
        if change == "dtype":
            norm.running_mean = norm.running_mean.half()
        else:
            norm.running_mean.resize_(4)
        with pytest.raises(memascend.ConfigError, match=r"buffer '1\.running_mean' .* was .*Set the buffer back"):
            optimizer.step()
        assert optimizer.steps == 0
        norm.running_mean = own
        optimizer.step()
        assert optimizer.steps == 1
        assert not torch.equal(model[0].weight, before)


# --- buffers that code assigns after the last step ------------------------------------------------


def assigned(model):
    model[1].running_mean = torch.full((WIDTH,), 0.25)


def statistics(model):
    return {name: one.clone() for name, one in model.named_buffers()}


@pytest.mark.parametrize(("durability", "resumes"), [("step", True), ("none", False)])
def test_save_and_close_keep_buffers_changed_after_the_last_step(tmp_path, durability, resumes):
    options = {"storage": tmp_path / "s", "durability": durability}
    model, optimizer = offloaded(model=normed(), **options)
    step(model, optimizer)
    optimizer.zero_grad(set_to_none=False)
    if resumes:
        optimizer.close()
        model, optimizer = offloaded(model=normed(), existing="resume", **options)
    assigned(model)
    wanted = statistics(model)
    optimizer.save(tmp_path / "saved")
    optimizer.close()
    for begin in ({"existing": "resume", **options}, {"checkpoint": tmp_path / "saved", "storage": tmp_path / "other"}):
        model, optimizer = offloaded(model=normed(), **begin)
        with optimizer:
            assert optimizer.steps == 1
            assert same_states(statistics(model), wanted)


def test_a_rejected_resume_leaves_the_buffers_as_they_were(tmp_path):
    def groups(count):
        def kind(parameters, **_):
            own = [*parameters]
            return torch.optim.AdamW([{"params": own[:count]}, {"params": own[count:]}])

        return kind

    model, optimizer = offloaded(tmp_path / "s", normed(), groups(2))
    step(model, optimizer)
    optimizer.close()
    model = normed()
    before = statistics(model)
    with pytest.raises(memascend.ConfigError, match="was in group 0 and is in group 1"):
        offloaded(tmp_path / "s", model, groups(1), existing="resume")
    assert same_states(statistics(model), before)
    with offloaded(tmp_path / "s", model, groups(2), existing="resume")[1] as optimizer:
        assert optimizer.steps == 1


@pytest.mark.parametrize("existing", ["refuse", "resume", "previous"])
def test_offload_that_fails_to_reserve_the_log_can_be_repeated(tmp_path, monkeypatch, existing):
    """offload() reserves the log before it offloads the parameters. If this fails, the call can be repeated."""
    if existing != "refuse":
        trained, optimizer = offloaded(tmp_path / "s", normed())
        step(trained, optimizer)
        step(trained, optimizer)
        optimizer.close()
    model = normed()
    parameters, before = [*model.parameters()], values(model)

    def failing(*_):
        raise memascend.StorageError("the drive is gone", errno=5)

    with monkeypatch.context() as patch:
        patch.setattr("memascend.session.offload.begin_log", failing)
        with pytest.raises(memascend.StorageError, match="the drive is gone"):
            offloaded(tmp_path / "s", model, existing=existing)
    assert [*map(id, model.parameters())] == [*map(id, parameters)]
    assert same_states(values(model), before)
    assert (tmp_path / "s").exists() == (existing != "refuse")
    # "previous" has dropped the newest commit.
    again = "resume" if existing == "previous" else existing
    model, optimizer = offloaded(tmp_path / "s", model, existing=again)
    with optimizer:
        assert optimizer.steps == {"refuse": 0, "resume": 2, "previous": 1}[existing]
        step(model, optimizer)


def test_close_does_not_commit_buffers_of_an_uncommitted_step(tmp_path):
    """A resume repeats a step that was not committed, so close() must not keep the buffers that this step changed."""
    model, optimizer = offloaded(tmp_path / "s", normed())
    step(model, optimizer)
    wanted = statistics(model)
    with pytest.raises(KeyError), optimizer:
        raise KeyError(assigned(model))
    model, optimizer = offloaded(tmp_path / "s", normed(), existing="resume")
    assert same_states(statistics(model), wanted)
    loss_of(model)
    with pytest.warns(
        UserWarning,
        match="close.. does not keep changes of the model's buffers since the last step: a forward ran without a step",
    ):
        optimizer.close()


def test_close_after_a_nonfinite_step_keeps_the_previous_commit(tmp_path):
    """close() makes no commit here, because a commit would replace step 1, which existing="previous" opens."""
    options = {"gradients": "fused", "storage": tmp_path / "s"}
    model, optimizer = offloaded(model=normed(), **options)
    step(model, optimizer)
    wanted = values(model)
    (loss_of(model) * float("nan")).backward()
    with pytest.warns(UserWarning, match='back to step 1, .*existing="previous"'):
        optimizer.step()
    optimizer.zero_grad()
    assigned(model)
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.close()
    model, optimizer = offloaded(model=normed(), existing="previous", **options)
    with optimizer:
        assert optimizer.steps == 1
        assert same_states(values(model), wanted)


# --- steps that fail or are interrupted ----------------------------------------------------------------

FUSED = functools.partial(torch.optim.AdamW, fused=True)


@pytest.mark.parametrize("gradients", ["ssd", "fused", "ram"])
def test_a_step_that_was_interrupted_after_its_commit_is_committed(tmp_path, gradients):
    plain, theirs, model, optimizer = twins(tmp_path, gradients, kind=FUSED, rate=1e-2)
    commit = memascend.engine.Engine.commit

    def interrupted(*args, **options):
        commit(*args, **options)
        raise KeyboardInterrupt

    with optimizer:
        for index in range(3):
            step(plain, theirs, index)
            if index != 1:
                step(model, optimizer, index)
                continue
            patch = mock.patch.object(memascend.engine.Engine, "commit", interrupted)
            with patch, pytest.raises(KeyboardInterrupt):
                step(model, optimizer, index)
            optimizer.zero_grad()
        assert optimizer.steps == 3
        require_same(plain, model)


def test_repeated_step_after_an_interrupted_update_equals_torch(tmp_path, monkeypatch):
    plain, theirs, model, optimizer = twins(tmp_path, "ssd")
    begin, calls = rules._Rule.update, []

    def fails_second(*args, **options):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return begin(*args, **options)

    with optimizer:
        loss_of(model).backward()
        monkeypatch.setattr(rules._Rule, "update", fails_second)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        optimizer.step()
        loss_of(plain).backward()
        theirs.step()
        require_same(plain, model)


def edited(model, optimizer):
    with optimizer.edit(model[0].weight) as weight:
        weight.mul_(2)


def test_failed_commit_changes_neither_loss_scale_nor_count_of_edits(tmp_path):
    model, optimizer = offloaded(tmp_path / "store", chain(dtype=torch.float16))
    error = memascend.StorageError("no room")
    with optimizer:
        scale = optimizer._session.run.metadata.scale
        before = scale.state()
        edited(model, optimizer)
        with mock.patch.object(memascend.engine.Engine, "commit", side_effect=error), pytest.raises(type(error)):
            step(model, optimizer)
        assert scale.state() == before
        optimizer.zero_grad()
        edited(model, optimizer)
        # `blocks` counts the edits since the last step. After a resume, a Trainer's program repeats these edits, and
        # memascend drops as many.
        assert optimizer._session.run.resources.store.hyperparameters["blocks"] == 2
        step(model, optimizer)
        assert scale.state() != before


# --- Ctrl-C at any line of a forward and a backward ------------------------------------------------

PACKAGE = os.path.dirname(memascend.__file__)
# Each backward is interrupted this number of executed lines later than the backward before. The number is odd, and each
# case starts at a different line, so the cases together interrupt many different lines.
STRIDE = 97


@functools.cache
def with_lines(file):
    """Returns the line numbers of all `with` statements in a file, without the lines of the bodies."""
    statements = (node for node in ast.walk(ast.parse(pathlib.Path(file).read_text())) if isinstance(node, ast.With))
    return {line for one in statements for line in range(one.lineno, one.body[0].lineno)}


def interrupted(run, line, functions=None):
    """Calls `run`, and raises KeyboardInterrupt in `run` at `line`. Returns True if execution reached `line`.

    `line` is a number of executed lines. If `functions` is None, all lines of the package count. Otherwise only the
    lines of the functions with these names count.

    If the line belongs to a `with` statement, the interrupt is raised at the next line. The reason: Python also calls
    the trace function at the `with` statement when the block has ended and before it calls `__exit__`. No signal can
    arrive at this point, and an exception at this point would skip `__exit__`.
    """
    lines = itertools.count(1)
    due = False

    def trace(frame, event, arg):
        nonlocal due
        del arg
        file = frame.f_code.co_filename
        if not file.startswith(PACKAGE):
            return None
        if event in ("call", "line") and (functions is None or frame.f_code.co_name in functions):
            due |= next(lines) == line
            if due and frame.f_lineno not in with_lines(file):
                due = False
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    # If the KeyboardInterrupt is raised in some kinds of callbacks, torch or Python prints the KeyboardInterrupt and
    # continues.
    return next(lines) > line


def continues(tmp_path, way, gradients, lines, functions=None):
    """For each of `lines`, interrupts a forward or its backward, and requires that the next step equals torch's.

    Drops the gradients between the interrupt and the next step. `way` names the way to drop the gradients. Ends at the
    first line that a forward and its backward do not reach. Returns the number of interrupts.
    """
    plain, theirs, model, ours = twins(tmp_path, gradients, lambda: chain(bias=True))
    ways = {
        "optimizer": ours.zero_grad,
        "model": model.zero_grad,
        "each": lambda: [setattr(p, "grad", None) for p in model.parameters()],
    }
    count = 0
    with ours:
        for line in lines:
            more = interrupted(lambda line=line: loss_of(model, line).backward(), line, functions)
            ways[way]()
            for one, optimizer in ((plain, theirs), (model, ours)):
                step(one, optimizer, line + 1)
            require_same(plain, model)
            if not more:
                break
            count += 1
    # If an interrupt left `__torch_function__` disabled, later tests in this process would fail.
    assert torch._C._is_torch_function_enabled()
    return count


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("first", "way", "gradients"), [(1, "optimizer", "ram"), (33, "model", "ssd"), (65, "each", "fused")]
)
def test_step_after_an_interrupted_backward_equals_torch(tmp_path, first, way, gradients):
    assert continues(tmp_path, way, gradients, itertools.count(first, STRIDE)) > 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_step_after_an_interrupted_materialization_equals_torch(tmp_path):
    materializing = {"count", "_bring", "materialize", "offload", "_make_placeholders"}
    assert continues(tmp_path, "each", "fused", itertools.count(1), materializing) > 50
