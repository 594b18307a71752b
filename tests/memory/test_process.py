"""Tests that the memory of training does not grow with depth, stays below the model's size, and follows the plan."""

import pytest
import torch
from memory.measured import SQUARES, VOCABULARY
from support.grids import usual

MIB = 1 << 20
# With this width, a block has 8 MiB of weights. For the modules of the block, torch and Python need much less
# memory than 8 MiB.
WIDTH = 512
GROWS_MAX = 0.05
# The largest memory that a block may need while its values are on storage. This memory consists of Python objects and
# of the ends of holes in the heap.
BESIDE_BYTES = 432 << 10
BLOCK_BYTES = SQUARES * WIDTH * WIDTH * 4
# The largest memory that the C library's heap may keep for each block in a step. The kept memory consists of holes
# around the small activation that the block saves.
KEPT_BYTES = 2 << 20


def added(run):
    """Returns the peak memory of training, minus the memory before the model was made and minus activations."""
    return run["peaks"]["train"] - run["before"]["RssAnon"] - run["activation_bytes"]


def require_flat(measure, shallow, deep, **work):
    """Trains a shallow and a deep model. Requires that neither peak exceeds the plan of the shallow model by much."""
    few, many = (measure(blocks=blocks, width=WIDTH, **work) for blocks in (shallow, deep))
    # While the queue is full, torch holds one more gradient. The largest gradient is the embedding's. Timing decides
    # how full the queue is when the embedding's gradient arrives, so the peaks of two runs cannot be compared with each
    # other.
    bound = few["plan"]["host_peak"] + VOCABULARY * WIDTH * 4
    for run, blocks in ((few, shallow), (many, deep)):
        assert added(run) <= bound * (1 + GROWS_MAX) + blocks * KEPT_BYTES, (added(run), bound)
    assert many["plan"]["host_peak"] <= few["plan"]["host_peak"] * 1.01
    return few, many


@pytest.mark.timeout(300)
def test_process_memory_does_not_grow_with_model_depth(measure):
    few, many = require_flat(measure, 4, 20, options={"gradients": "fused"}, steps=2)
    for run in (few, many):
        # When offload() returns, the process holds Python objects, and all planned memory except gradients.
        planned = run["plan"]["host_peak"] - run["plan"]["host"]["gradients"]
        assert run["after"]["RssAnon"] - run["before"]["RssAnon"] == pytest.approx(planned, rel=0.06)
    # Further blocks cost Python objects and holes in the heap, but no memory for values.
    for when in ("after", "trained"):
        grown = [run[when]["RssAnon"] - run["before"]["RssAnon"] for run in (few, many)]
        assert grown[1] - grown[0] <= (20 - 4) * BESIDE_BYTES, (when, grown)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("start", "dtype"),
    [
        pytest.param({"in_heap": True}, "float32", id="ram-float32"),
        pytest.param({"meta": True}, "float32", id="meta-float32", marks=pytest.mark.slow),
        pytest.param({"in_heap": True}, "bfloat16", id="ram-bfloat16", marks=pytest.mark.slow),
        pytest.param({"meta": True}, "bfloat16", id="meta-bfloat16", marks=pytest.mark.slow),
    ],
)
def test_memory_does_not_grow_with_depth_for_models_in_heap_or_on_meta(measure, dtype, start):
    """With `in_heap`, the model's values leave holes in the heap. Tensors of later steps must not fill these holes."""
    work = {**start, "dtype": dtype, "options": {"gradients": "fused"}, "steps": 3}
    few, many = require_flat(measure, 4, 20, **work)
    rest = [run["trained"]["RssAnon"] - run["before"]["RssAnon"] for run in (few, many)]
    assert rest[1] - rest[0] <= (20 - 4) * BESIDE_BYTES, rest


@pytest.mark.timeout(300)
def test_no_training_phase_holds_a_copy_of_the_model(measure):
    run = measure(blocks=18, width=WIDTH, vocabulary=64, phases=True, steps=1)
    assert run["model_bytes"] > 120 * MIB
    at_return = run["after"]["RssAnon"]
    # `room` allows for activations, and for gradients that are queued while processors are busy. A copy of the model
    # would not fit.
    room = run["model_bytes"] // 2
    assert at_return - run["before"]["RssAnon"] < room
    for phase, peak in run["peaks"].items():
        # After the last backward, no step() trims the heap. On a busy machine, the heap then still has most of the
        # gradients.
        most = run["model_bytes"] if phase in ("backward", "close()") else room
        assert peak - at_return < most, (phase, peak - at_return, run["model_bytes"])


# The budget of `RAM_OPTIONS` keeps this whole model in RAM.
BLOCKS = 4
RAM_TIER = {"blocks": BLOCKS, "width": WIDTH, "vocabulary": 64, "steps": 2}
RAM_OPTIONS = {"gradients": "fused", "host_memory": "1GiB"}


@pytest.mark.timeout(300)
def test_memory_of_the_ram_tier_matches_the_plan(measure):
    run = measure(**RAM_TIER, options={**RAM_OPTIONS, "durability": "none"})
    plan = run["plan"]["host"]
    assert plan["records in RAM"] == pytest.approx(3 * run["model_bytes"], rel=0.03)
    assert plan["gradients in RAM"] == run["model_bytes"]
    # No gradient exists when offload() returns.
    planned = run["plan"]["host_peak"] - plan["gradients in RAM"] - plan["gradients"]
    assert run["after"]["RssAnon"] - run["before"]["RssAnon"] == pytest.approx(planned, rel=0.03)
    # torch also holds the gradient that it is computing.
    assert added(run) <= run["plan"]["host_peak"] * 1.03 + WIDTH * WIDTH * 4


@pytest.mark.root
@pytest.mark.timeout(300)
def test_training_fits_in_a_cgroup_of_the_planned_size(measure, cgroup):
    # After offload(), only gradients add memory. If the process exceeded the limit, the kernel would kill it, and the
    # exit status would fail the test. The planned memory is about four times the gradients. The limit allows for 3 %
    # more than planned, and for freed memory that the heap keeps, up to a tenth of the planned memory.
    waiting = BLOCKS * BLOCK_BYTES
    grow_bytes = waiting + (waiting * 3 // 100 + waiting // 10) * 4
    measure(**RAM_TIER, options=RAM_OPTIONS, cgroup=str(cgroup), grow_bytes=grow_bytes)


# Memory that belongs to no owner of the plan. torch keeps it after the first step.
OWNERLESS_BYTES = 2 * MIB
# glibc may keep this many bytes of freed memory at the heap's end (M_TRIM_THRESHOLD) after step() has trimmed the heap.
HEAP_BYTES = 2 * MIB
# A weight that was in the C library's heap leaves a hole in the heap. The last page of this hole stays in memory.
PAGE_BYTES = 4096

CASES = {
    "deep and narrow": {"blocks": 48, "width": 128, "vocabulary": 64},
    "large buffers": {"buffer_bytes": 24 * MIB},
    "resumed": {"resume": True},
    "ram": {"options": {"gradients": "ram"}},
    "activations": {"tokens": 512, "options": {"gradients": "fused", "activations": "ssd"}},
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", usual(CASES, "deep and narrow", "activations"))
def test_reported_host_memory_equals_the_growth_of_the_process(measure, case):
    run = measure(**{"vocabulary": 1024, **CASES[case]})
    owners, total = run["report"]["host"]["owners"], run["report"]["host"]["total"]
    objects = run["report"]["beside"]["Python objects"]
    # offload() moves the model's values out of the process, so `grown` adds the bytes of these values.
    grown = run["trained"]["RssAnon"] - run["made"]["RssAnon"] + run["model_bytes"]
    beside = OWNERLESS_BYTES + HEAP_BYTES + run["parameters"] * PAGE_BYTES
    # A resumed run may reuse the memory of the first run's objects. The lower bound therefore counts no objects.
    assert total - OWNERLESS_BYTES <= grown <= total + objects + beside, (grown, total, objects, owners)
    if case == "deep and narrow":
        assert grown >= total + objects / 2, (grown, total, objects, owners)


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

    # Once a tensor of 20 MiB is freed, glibc serves all requests up to that size from its heap.
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
def test_large_allocations_are_mapped_after_offload(loaded, tmp_path, environment, mapped):
    assert loaded(PROGRAM, tmp_path / "store", env=environment).split()[-2:] == mapped.split()


# Frees every second tensor in the heap. glibc does not return the pages of these tensors to the kernel. A tensor is
# smaller than the mmap threshold, so it is in the heap.
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
def test_step_returns_free_heap_to_the_kernel(loaded, tmp_path, environment):
    given = int(loaded(FREED, tmp_path / "store", env=environment).split()[-1])
    assert (given > 40 << 20) == (not environment), given


# MKL keeps memory for each thread that computed. `mkl_serv_mem_stat` returns the number of bytes of this memory.
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
def test_free_scratch_frees_the_memory_of_mkl_products(loaded):
    before, after, equal = loaded(PRODUCTS).split()[-3:]
    assert int(before) > 0
    assert (after, equal) == ("0", "True")


@needs_mkl
def test_micro_batch_threads_keep_no_mkl_memory_after_by_layer(loaded, tmp_path):
    threads, in_turn, by_layer = map(int, loaded(MICRO_BATCHES, tmp_path / "store").split()[-3:])
    # In the first call, the main thread computes all micro-batches. In the second call, each micro-batch has its own
    # thread.
    assert threads == 4
    assert in_turn > 0
    assert by_layer == 0
