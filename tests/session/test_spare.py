"""Tests the budget that `host_memory="auto"` chooses: for one run, for several runs and ranks, and at a resume."""

import contextlib
import logging
import re
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from support.chains import chain, offloaded
from support.lives import environment, life
from support.torchrun import command

import memascend
from memascend.plan import spare
from memascend.plan.options import Options
from memascend.plan.spare import HostMemory, Spare, faster
from memascend.session.spare import Turn, agreed

GIB = 1 << 30
# Programs that the tests start begin with this code. The code makes `spare` compute budgets in whole MiB, count 200 MiB
# for imports, and require no minimum of memory that stays free.
SMALL = """
from memascend.plan import spare
spare._GIB, spare._MARGIN_MIN, spare.IMPORTS = 1 << 20, 0, 200 << 20
"""


def machine(total, available=None):
    return HostMemory(total=int(total * GIB), available=int((total if available is None else available) * GIB))


@pytest.mark.parametrize(
    ("of", "options", "on_host", "budget"),
    [
        # These runs use a GPU. An eighth of the memory must stay free, and only four fifths of the memory may be
        # registered with CUDA.
        (machine(64), {}, False, 51),
        (machine(128), {"taken": 10 * GIB}, False, 92),
        (machine(64, 30), {}, False, 28),
        (machine(64), {"processes": 2}, False, 25),
        # These runs use the CPU, where torch also needs host memory. Without `torch_bytes`, the budget is half of the
        # memory that the run may use. With `torch_bytes`, the budget is the memory that the run may use, minus
        # `torch_bytes`.
        (machine(64), {}, True, 27),
        (machine(64), {"torch_bytes": 20 * GIB}, True, 35),
        # On small machines, at least 2 GiB must stay free.
        (machine(8), {"torch_bytes": 0}, True, 5),
        (machine(2), {"torch_bytes": 0}, True, 0),
        (machine(64), {"agreed": 7}, False, 7),
    ],
)
def test_spare_budget_leaves_memory_for_the_machine_and_torch(of, options, on_host, budget):
    found = Spare(machine=of, **options).budget(on_host=on_host)
    assert found == (budget if "agreed" in options else budget * GIB)


def test_host_memory_here_respects_the_cgroup_limit(monkeypatch):
    limits = {"cgroup_limit": 3 * GIB, "available": 2 * GIB}
    monkeypatch.setattr("memascend.memory.limits", lambda: limits)
    assert HostMemory.here() == machine(3, 2)
    limits["cgroup_limit"] = None
    assert HostMemory.here().total > 3 * GIB


@pytest.fixture
def whole_mib(monkeypatch):
    """Makes `spare` compute budgets in whole MiB.

    Returns a function that sets the number of MiB that are free in addition to the memory for imports. The number is
    100 at first.
    """
    monkeypatch.setattr(spare, "_GIB", 1 << 20)
    monkeypatch.setattr(spare, "_MARGIN_MIN", 0)

    def free(mib):
        total = (mib << 20) + spare.IMPORTS
        here = HostMemory(total=total * 8 // 7 + 8, available=total)
        monkeypatch.setattr(HostMemory, "here", staticmethod(lambda: here))

    free(100)
    return free


def test_auto_budget_is_limited_to_host_peak_and_at_least_comfortable(tmp_path, whole_mib, caplog):
    caplog.set_level(logging.INFO, "memascend")
    _, optimizer = offloaded(tmp_path / "a.store", host_memory="auto")
    with optimizer:
        plan = optimizer.plan
        assert plan.host_peak <= plan.budget < plan.host_peak + (1 << 20)
        assert not plan.larger
        assert len(plan.ram_tier) == sum(len(unit.parameters) for unit in plan.units)
    assert "which this machine can spare" in caplog.text
    # The budget is at least the plan's `comfortable` budget.
    whole_mib(1)
    _, optimizer = offloaded(tmp_path / "b.store", host_memory="auto")
    with optimizer:
        assert optimizer.plan.budget == optimizer.plan.comfortable


def trained_once(path, **options):
    # The model is so large that a run can use all of each budget in this test.
    model, optimizer = offloaded(path, chain(16, width=512), existing="resume", **options)
    model(torch.randn(4, next(model.parameters()).shape[-1])).square().mean().backward()
    optimizer.step()
    budget = optimizer.plan.budget
    optimizer.close()
    return budget


def test_resume_with_auto_keeps_the_stored_budget_if_memory_is_free(tmp_path, whole_mib, caplog):
    caplog.set_level(logging.INFO, "memascend")
    path = tmp_path / "run.store"
    whole_mib(60)
    first = trained_once(path, host_memory="auto")
    assert first == 30 << 20
    # A resume keeps the budget of the store if enough memory is free for this budget, even if more or less memory is
    # free than in the first run.
    for free, kept in ((100, True), (32, True), (28, False)):
        whole_mib(free)
        caplog.clear()
        assert (trained_once(path, host_memory="auto") == first) == kept
        assert ("as this run had before" in caplog.text) == kept
    whole_mib(100)
    # If a resume had to use a smaller budget, the smaller budget must not replace the budget of the store.
    assert trained_once(path, host_memory="auto") == first
    # A budget from the user becomes the budget of the store. A run with the default budget removes the budget from the
    # store.
    given = trained_once(path, host_memory="31MiB")
    assert trained_once(path) < given
    assert trained_once(path, host_memory="auto") != given


def test_auto_budget_counts_memory_of_the_run_that_offload_closes(tmp_path, whole_mib):
    path = tmp_path / "run.store"
    model, optimizer = offloaded(path, chain(16, width=512), host_memory="auto")
    budget = optimizer.plan.budget
    # The second offload() of the store closes the first run. Only then is the memory of the first run free.
    whole_mib(10)
    with pytest.warns(UserWarning, match="had this store open"):
        again = offloaded(path, chain(16, width=512), existing="resume", host_memory="auto")[1]
    with again:
        assert again.plan.budget == budget
    del model


def test_turn_wait_returns_after_end_or_timeout():
    """`Turn.wait` returns once the run that has the turn calls `Turn.end`, or after the timeout."""
    first, second, third = Turn(), Turn(), Turn()
    first.wait(1)
    waiting = threading.Thread(target=second.wait, args=(60,))
    waiting.start()
    # The third run continues after its timeout, although the turn of the first run has not ended.
    third.wait(0.2)
    third.end()
    assert waiting.is_alive()
    first.end()
    waiting.join(30)
    assert not waiting.is_alive()
    second.end()


def test_ranks_with_auto_agree_on_the_smallest_spare_memory(monkeypatch):
    """Two ranks are on this host. A third rank is on another host with less memory."""
    monkeypatch.setattr("socket.gethostname", lambda: "here")
    printed = iter([[["here", True], ["there", True], ["here", True]], [None] * 3, None])

    def all_values(mine):
        others = next(printed)
        return [mine, 7 << 20, mine + 1] if others is None else others

    exchange = SimpleNamespace(rank=0, all_values=all_values)
    turn = Turn()
    options = agreed(Options(host_memory="auto"), exchange, turn, on_host=True)
    turn.end()
    assert options.spare == Spare(processes=2, agreed=7 << 20)
    # Each rank first sends whether it has host_memory="auto".
    given = Options(host_memory="8MiB")
    exchange.all_values = lambda mine: [mine, ["here", False]]
    assert agreed(given, exchange, turn, on_host=True) is given
    with pytest.raises(
        memascend.ConfigError, match=r"some ranks have host_memory=.auto., but other ranks do not: pass"
    ):
        agreed(Options(host_memory="auto"), exchange, turn, on_host=True)


def test_advice_for_a_larger_budget_is_logged_once(tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "memascend")
    monkeypatch.setattr("memascend.session.report.faster", lambda *_: (40 * GIB, 74.0))
    monkeypatch.setattr("memascend.session.report.Report.waited", 0.5)
    words = 'pass host_memory="40GiB", which is free here: a step would take about 74 s instead of '
    for options, count in (({}, 1), ({"host_memory": "64MiB"}, 0), ({"host_memory": "auto"}, 0)):
        caplog.clear()
        model, optimizer = offloaded(tmp_path / f"{count}{len(options)}.store", existing="replace", **options)
        with optimizer:
            for _ in range(6):
                model(torch.randn(4, next(model.parameters()).shape[-1])).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert caplog.text.count(words) == count


def test_faster_estimates_the_step_time_of_a_larger_budget():
    moves = {budget: SimpleNamespace(total=total) for budget, total in ((10, 60), (20, 30), (40, 0))}
    plan = SimpleNamespace(larger=moves, moved_bytes=100)
    assert faster(plan, 9, 10.0, 8.0) is None
    assert faster(plan, 25, 10.0, 8.0) == (20, 3.0)
    # With this budget, the computation takes longer than the drive, so the computation determines the length of a step.
    assert faster(plan, 40, 10.0, 6.0) == (40, 4.0)
    assert faster(plan, 40, 10.0, 0.5) is None


# --- processes ------------------------------------------------------------------------------

RUN = (
    SMALL
    + """
import os, sys, torch, memascend
from memascend.plan.spare import Spare
group, path, options = sys.argv[1], sys.argv[2], eval(sys.argv[3])
if group:
    open(group + "/cgroup.procs", "w").write(str(os.getpid()))
with torch.device("meta"):
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(64)))
optimizer = torch.optim.AdamW(model.parameters())
print("ready", flush=True)
sys.stdin.readline()
model, optimizer = memascend.offload(model, optimizer, storage=path, existing="resume", **options)
print("budget", optimizer.plan.budget, flush=True)
sys.stdin.readline()
model(torch.randn(2, 1024)).square().mean().backward()
optimizer.step()
optimizer.close()
print("done", flush=True)
"""
)


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_runs_at_once_fit_into_a_cgroup(tmp_path, cgroup):
    """A single run would take all memory of the cgroup. If both runs did so, the kernel would kill one of the runs."""
    first = cgroup / "memory.limit_in_bytes"
    limit = 2000 << 20
    (first if first.exists() else cgroup / "memory.max").write_text(str(limit))
    start = [sys.executable, "-W", "ignore", "-c", RUN, str(cgroup)]
    options = "{'host_memory': Spare(torch_bytes=250 << 20)}"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment()}
    budgets = []
    with contextlib.ExitStack() as last_first:
        runs = [
            last_first.enter_context(subprocess.Popen([*start, str(tmp_path / str(number)), options], **pipes))
            for number in range(2)
        ]
        for run in runs:
            last_first.callback(run.kill)
        for words in ("ready", "budget", "done"):
            for run in runs:
                line = run.stdout.readline()
                assert line.startswith(words), (words, line, [one.poll() for one in runs])
                budgets += [int(line.split()[1])] if words == "budget" else []
            # Tells each run to continue, so that the two runs continue at the same time.
            for run in runs if words != "done" else ():
                print(file=run.stdin, flush=True)
        assert [run.wait(60) for run in runs] == [0, 0]
    assert 0 < sum(budgets) < limit
    assert max(budgets) > 700 << 20


@pytest.mark.timeout(300)
def test_ranks_with_auto_divide_the_memory_of_the_machine(tmp_path):
    program = tmp_path / "ranks.py"
    program.write_text(
        SMALL
        + """
import torch, memascend
from memascend.plan.spare import HostMemory
HostMemory.here = staticmethod(lambda: HostMemory(total=800 << 20, available=800 << 20))
torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(64)))
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer = memascend.offload(model, optimizer, storage="run", host_memory="auto")
print("budget", optimizer.plan.budget >> 20, flush=True)
optimizer.close()
torch.distributed.destroy_process_group()
"""
    )
    output = life(command(program), cwd=tmp_path)
    # Two ranks share 700 MiB. The imports of each rank take 200 MiB, so 300 MiB remain. torch takes half of these 300
    # MiB, so the budget of each rank is 75 MiB.
    assert re.findall(r"budget (\d+)", output) == ["75", "75"], output


def test_offload_rejects_an_unknown_host_memory_text(tmp_path):
    with pytest.raises(memascend.ConfigError, match="host_memory must be a number of bytes, or text"):
        offloaded(tmp_path / "run.store", host_memory="all")
