"""Tests that a lease lives exactly as long as its last view: in graphs, threads, forks, and at exit."""

import gc
import os
import re
import threading

import pytest
import torch
from memory.measured import status
from support.forked_child import in_child
from support.grids import usual

from memascend.memory import Arena, Region, regions


@pytest.fixture
def arena():
    region = Region(1 << 20, owner="lifetime")
    yield Arena(region, {4096: 8})
    region.close()
    gc.collect()
    assert not [listed for listed in regions() if listed["owner"] == "lifetime"]


def leases(arena):
    return arena.stats()["leases"]


def test_lease_is_returned_with_its_last_view_in_any_deletion_order(arena):
    lease = arena.lease(4096)
    base = lease.tensor((32, 32), torch.float32).fill_(2)
    views = [base[1:], base.t(), base.view(-1)[5:], base.detach(), base.view(torch.int32)]
    del lease, base
    while views:
        assert leases(arena) == 1
        assert views[0].numel() > 0
        views.pop(len(views) // 2)
    assert leases(arena) == 0


def test_a_view_in_a_graph_holds_the_lease(arena):
    weight = arena.lease(4096).tensor((32, 32), torch.float32).fill_(1).requires_grad_()
    loss = (weight * 2).exp().sum()
    holder = weight.view(-1)
    del weight
    assert leases(arena) == 1
    loss.backward()
    del loss, holder
    gc.collect()
    assert leases(arena) == 0


def test_lease_is_returned_when_another_thread_deletes_the_last_view(arena):
    box = [arena.lease(4096).tensor(4096, torch.uint8)]
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()
    assert leases(arena) == 0


def test_lease_tensor_made_in_inference_mode_supports_autograd(arena):
    with torch.inference_mode():
        tensor = arena.lease(4096).tensor(1024, torch.float32)
    assert not tensor.is_inference()
    tensor.requires_grad_().sum().backward()


def test_ten_thousand_leases_leak_no_memory_or_descriptors(arena):
    def cycle(count):
        for _ in range(count):
            arena.lease(4096).tensor((32, 32), torch.float32).view(-1)[3:]

    cycle(1000)
    gc.collect()
    before, descriptors = status()["VmRSS"], len(os.listdir("/proc/self/fd"))
    cycle(10_000)
    gc.collect()
    # If each cycle leaked a tensor, the process would grow by more than half a megabyte.
    assert status()["VmRSS"] - before < 500_000
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert leases(arena) == 0


# This test forks a process with threads on purpose; the child makes only calls that are safe after such a fork.
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize(("on_fork", "seen"), [("copy", 7), ("wipe", 0)])
def test_forked_child_sees_copied_or_wiped_memory_and_gets_no_lease(on_fork, seen):
    arena = Arena(Region(8 << 20, on_fork=on_fork), {4 << 20: 2})
    tensor = arena.lease(4 << 20).tensor(4 << 20, torch.uint8).fill_(7)
    assert in_child(lambda: [tensor[0].item(), tensor[-1].item()]) == f"[{seen}, {seen}]"
    assert re.match("UsageError.*fork", in_child(lambda: arena.lease(1)))
    assert tensor.eq(7).all()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_on_fork_wipe_keeps_the_parents_huge_pages_while_a_child_runs():
    region = Region(8 << 20, on_fork="wipe")
    tensor = Arena(region, {8 << 20: 1}).lease(8 << 20).tensor(8 << 20, torch.uint8)
    huge_bytes = region.huge_bytes
    until_closed, close = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(close)
        os.read(until_closed, 1)
        os._exit(0)
    tensor.fill_(1)
    assert region.huge_bytes == huge_bytes
    os.close(until_closed)
    os.close(close)
    os.waitpid(child, 0)


WAITING = "threading.Thread(target=lambda: arena.lease(4096), daemon=True).start(); time.sleep(0.2)"
IN_GRAPH = "tensor.requires_grad_(); builtins.kept = (tensor * 2).sum()"
ENDINGS = [
    "pass",
    "sys.exit(0)",
    "del lease, arena, region",
    "builtins.kept = (tensor, lease, arena, region)",
    WAITING,
    "atexit.register(lambda: tensor.fill_(1))",
    "sys.modules['kept'] = tensor; del tensor, lease, arena, region",
    IN_GRAPH,
]


@pytest.mark.parametrize("ending", usual(ENDINGS, "pass", WAITING, IN_GRAPH))
def test_interpreter_exits_cleanly_with_leases_in_use(loaded, ending):
    program = """
import atexit, builtins, sys, threading, time, torch
from memascend.memory import Arena, Region
region = Region(1 << 20)
arena = Arena(region, {4096: 1})
lease = arena.lease(4096)
tensor = lease.tensor(1024, torch.float32)
"""
    assert loaded(program + ending, whole=True) == ""
