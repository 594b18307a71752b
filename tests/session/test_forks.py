"""Tests forks of a run's process: calls in the child raise at once, and writes of the child do not reach the parent."""

import copy
import ctypes
import multiprocessing
import os
import threading

import pytest
import torch
from support.bits import same_bits, same_states
from support.chains import batch, loss_of, offloaded, step, values
from support.forked_child import in_child

from memascend.errors import StorageError

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

ASKED = {
    "forward": lambda model, _, __: model(batch()),
    "step": lambda _, optimizer, __: optimizer.step(),
    "zero_grad": lambda _, optimizer, __: optimizer.zero_grad(),
    "load_state_dict": lambda model, _, __: model.load_state_dict(
        {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    ),
    "the optimizer's": lambda _, optimizer, __: optimizer.load_state_dict(optimizer.state_dict()),
    "save": lambda _, optimizer, folder: optimizer.save(folder / "saved"),
    "report": lambda _, optimizer, __: optimizer.report(),
    "deep copy": lambda model, _, __: copy.deepcopy(model),
    "state_of": lambda model, optimizer, _: optimizer.state_of(model[0].weight),
    "read": lambda model, _, __: model[0].weight.sum(),
    "write": lambda model, _, __: model[0].weight.data.zero_(),
}


def begun(folder, host_memory: str | None = "64MiB"):
    model, optimizer = offloaded(folder / "run.store", host_memory=host_memory)
    step(model, optimizer)
    # This read loads the values of a unit into memory. The kernel wipes this memory in a forked child.
    model[0].weight.norm()
    return model, optimizer


def asked(model, optimizer, folder):
    """Runs in a child process: makes all calls of `ASKED`, then checks offload() and close().

    Returns the calls of `ASKED` that did not raise the UsageError about forks.
    """
    wrong = {}
    # Removes the store, so that a call that uses the store fails. At the fork, a thread of the parent may have held
    # locks of the store. This thread does not exist in the child, so the child could wait for these locks forever.
    run = optimizer._session.run
    run.metadata._store = run.resources.store = None
    for name, ask in ASKED.items():
        try:
            ask(model, optimizer, folder)
            wrong[name] = "nothing"
        except BaseException as error:
            if type(error).__name__ != "UsageError" or "fork" not in str(error):
                wrong[name] = repr(error)
    offloaded(folder / "of a child", existing="replace")[1].close()
    with pytest.raises(StorageError, match="in use by pid"):
        offloaded(folder / "run.store", existing="resume")
    # A child may call close().
    optimizer.close()
    return wrong


@pytest.mark.parametrize(
    ("when", "host_memory"), [("idle", None), ("idle", "64MiB"), ("staged", "64MiB"), ("loaded", None)]
)
def test_calls_in_a_forked_child_raise_and_the_parent_step_continues(tmp_path, when, host_memory):
    model, optimizer = begun(tmp_path, host_memory)
    with optimizer:
        expected = values(model)
        if when == "staged":
            loss_of(model).backward()
        if when == "loaded":
            expected = {name: value * 0.5 for name, value in expected.items()}
            model.load_state_dict(expected)
        assert in_child(lambda: asked(model, optimizer, tmp_path)) == "{}"
        if when == "staged":
            optimizer.step()
            optimizer.zero_grad()
            assert optimizer.steps == 2
        else:
            assert same_states(values(model), expected)
        step(model, optimizer)


def test_child_forked_while_a_thread_trains_does_not_deadlock(tmp_path):
    """A thread of the parent may hold locks at the fork.

    The child has no such thread, so it must not wait for locks.
    """
    model, optimizer = begun(tmp_path)
    ended = threading.Event()

    def train():
        while not ended.is_set():
            step(model, optimizer)

    with optimizer:
        thread = threading.Thread(target=train)
        thread.start()
        try:
            for _ in range(5):
                assert in_child(lambda: asked(model, optimizer, tmp_path)) == "{}"
        finally:
            ended.set()
            thread.join()
        step(model, optimizer)


def test_forked_child_exits_without_output_or_commit(tmp_path, loaded):
    """A child that exits prints nothing and commits nothing, because the run belongs to the parent process."""
    program = """if True:
        import os, sys, torch, memascend
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(2)))
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = memascend.offload(model, optimizer, storage=sys.argv[1], host_memory="64MiB")
        for _ in range(2):
            model(torch.ones(3, 64)).square().mean().backward()
            child = os.fork()
            if child == 0:
                sys.exit(0)
            assert os.waitpid(child, 0)[1] == 0
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
        print("steps", optimizer.steps)
    """
    printed = loaded(program, tmp_path / "run.store")
    assert printed.splitlines() == ["steps 2"]


# --- a child's writes to memory of weights -------------------------------------------------------------

WAYS = {
    "state dict": lambda model: model.state_dict()["1.weight"],
    "numpy": lambda model: torch.from_numpy(model[1].weight.detach().numpy()),
    "deep copy": lambda model: copy.deepcopy(model)[1].weight.detach(),
}


@pytest.mark.parametrize("way", WAYS)
def test_writes_of_a_forked_child_do_not_reach_the_parent(tmp_path, way):
    model, optimizer = begun(tmp_path)
    expected = values(model)
    computed = model(batch()).detach()
    reached = WAYS[way](model)
    before = reached.clone()

    def write():
        read = same_bits(reached, before)
        reached.fill_(7)
        # This child also forks. Writes of the second child must not reach this child.
        in_child(lambda: reached.fill_(9))
        return read and bool((reached == 7).all())

    for fork in (os.fork, ctypes.CDLL(None).fork):
        assert in_child(write, fork) == "True"
        assert same_bits(reached, before)
    assert same_bits(model(batch()).detach(), computed)
    assert same_states(values(model), expected)
    reached = None
    step(model, optimizer)
    optimizer.close()


def test_forked_child_reads_a_state_dict_that_its_parent_has_dropped(tmp_path):
    model, optimizer = begun(tmp_path)
    state = model.state_dict()
    before = values(model)
    context = multiprocessing.get_context("fork")
    gone, printed = context.Event(), context.SimpleQueue()

    def read():
        gone.wait()
        printed.put(same_states(state, before))

    child = context.Process(target=read)
    child.start()
    state.clear()
    step(model, optimizer)
    gone.set()
    assert printed.get()
    child.join()
    assert child.exitcode == 0
    optimizer.close()
