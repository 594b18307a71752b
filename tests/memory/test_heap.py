"""Tests that large allocations are mapped once a model is offloaded, and what threads keep beside their tensors."""

import pytest
import torch

PROGRAM = """if True:
    import ctypes, sys
    import torch
    import memascend

    class Mallinfo(ctypes.Structure):
        names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
        _fields_ = tuple((name, ctypes.c_size_t) for name in names.split())

    def mapped(nbytes):
        library = ctypes.CDLL(None)
        library.mallinfo2.restype = Mallinfo
        before = library.mallinfo2().hblkhd
        kept = torch.empty(nbytes, dtype=torch.uint8)
        return library.mallinfo2().hblkhd - before >= nbytes

    # Freed once, a tensor of 20 MiB lets glibc take all up to that size from its heap.
    torch.empty(20 << 20, dtype=torch.uint8)
    model = torch.nn.Linear(4, 4)
    model, optimizer = memascend.offload(model, torch.optim.AdamW(model.parameters()), storage=sys.argv[1])
    optimizer.close()
    print(mapped(5 << 20), mapped(20 << 10))
"""


@pytest.mark.parametrize(
    ("environment", "mapped"),
    [
        pytest.param({}, "True False", id="fixed"),
        pytest.param({"MEMASCEND_MALLOC": "system"}, "False False", id="left-alone"),
        pytest.param({"MALLOC_MMAP_THRESHOLD_": "1"}, "False False", id="chosen-by-glibcs-own-variable"),
    ],
)
def test_what_is_large_is_mapped(loaded, tmp_path, environment, mapped):
    assert loaded(PROGRAM, tmp_path / "store", env=environment).split()[-2:] == mapped.split()


# Free pages in the midst of the heap, which nothing gives back by itself: a MiB of every two, below the threshold.
FREED = """if True:
    import sys
    from pathlib import Path
    import torch
    import memascend

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    model = torch.nn.Linear(4, 4)
    model, optimizer = memascend.offload(model, torch.optim.AdamW(model.parameters()), storage=sys.argv[1])
    made = [torch.ones(512 << 10, dtype=torch.uint8) for _ in range(200)]
    model(torch.ones(1, 4)).sum().backward()
    del made[::2]
    before = resident()
    optimizer.step()
    print(before - resident())
"""


@pytest.mark.parametrize("environment", [{}, {"MEMASCEND_MALLOC": "system"}], ids=["ours", "left-alone"])
def test_a_step_gives_free_heap_back(loaded, tmp_path, environment):
    given = int(loaded(FREED, tmp_path / "store", env=environment).split()[-1])
    assert (given > 40 << 20) == (not environment), given


# MKL keeps memory of its own in each thread that computed, which it counts.
KEPT = """if True:
    import ctypes, os, sys, threading
    import torch
    import memascend

    def kept():
        library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so"))
        library.mkl_serv_mem_stat.restype = ctypes.c_int64
        return library.mkl_serv_mem_stat(ctypes.byref(ctypes.c_int()))
"""

PRODUCTS = (
    KEPT
    + """
    from memascend.memory import free_scratch

    one, other = torch.rand(512, 768), torch.rand(768, 2048)
    expected = one @ other
    before = kept()
    free_scratch()
    print(before, kept(), torch.equal(one @ other, expected))
"""
)

MICRO_BATCHES = (
    KEPT
    + """
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(768, 2048), torch.nn.Linear(2048, 768)) for _ in range(3))
    )
    optimizer = torch.optim.AdamW(model.parameters())
    options = dict(storage=sys.argv[1], gradients="fused")
    try:
        memascend.offload(model, optimizer, host_memory=1, **options)
    except memascend.BudgetError as error:
        options["host_memory"] = error.smallest
    model, optimizer = memascend.offload(model, optimizer, **options)
    threads, after = set(), []

    def loss_of(batch):
        threads.add(threading.get_ident())
        return model(batch).square().mean()

    with optimizer:
        for _ in range(2):
            optimizer.accumulate(loss_of, [torch.rand(512, 768) for _ in range(3)], by_layer=True)
            optimizer.step()
            optimizer.zero_grad()
            after.append(kept())
    print(len(threads), *after)
"""
)

needs_mkl = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch is built without MKL")


@needs_mkl
def test_memory_of_products_is_freed(loaded):
    before, after, equal = loaded(PRODUCTS).split()[-3:]
    assert int(before) > 0
    assert (after, equal) == ("0", "True")


@needs_mkl
def test_threads_of_micro_batches_keep_nothing_for_their_next_products(loaded, tmp_path):
    threads, in_turn, by_layer = map(int, loaded(MICRO_BATCHES, tmp_path / "store").split()[-3:])
    # The main thread computes the first call, and a thread for each micro-batch the second.
    assert threads == 4
    assert in_turn > 0
    assert by_layer == 0
