"""Tests regions, arenas, rings and leases through the public interface: results, errors, waiting, system limits."""

import re
import signal
import threading

import pytest
import torch

import memascend
from memascend.memory import Arena, ChunkRing, Lease, Region, layout, limits, regions

KIB = 1024


@pytest.fixture
def arena():
    with Region(64 * KIB) as region:
        yield Arena(region, {16 * KIB: 2, 4 * KIB: 4})


def test_region_has_the_requested_size_and_is_listed_until_closed():
    with Region(3_000_001, owner="exact") as region:
        assert region.nbytes == 3_000_001
        assert region.mapped_bytes == -(-3_000_001 // limits()["page"]) * limits()["page"]
        assert {"owner": "exact", "bytes": region.mapped_bytes, "pinned": region.pinned} in regions()
    assert region.closed
    assert not [listed for listed in regions() if listed["owner"] == "exact"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_region_rejects_cuda_pinning_without_cuda():
    with pytest.raises(memascend.ConfigError, match=r"cannot be pinned as asked: (libcuda|no CUDA)"):
        Region(4 * KIB, pin="cuda")


WRONG = [
    ({"nbytes": 0}, "cannot be mapped"),
    *(({"nbytes": nbytes}, "nbytes must be an integer from 0") for nbytes in (-1, -1e6, 1e300, "1", 2**70, True)),
    *(({"nbytes": nbytes}, f"integer.*, not {nbytes}") for nbytes in (1.5, float("nan"), float("inf"))),
    *(({"pin": pin}, "pin must be") for pin in ("gpu", True, None)),
    *(({"on_fork": on_fork}, "on_fork must be") for on_fork in ("keep", 1, None)),
]


@pytest.mark.parametrize(("wrong", "says"), WRONG)
def test_region_rejects_wrong_arguments(wrong, says):
    with pytest.raises(memascend.ConfigError, match=says):
        Region(**{"nbytes": 4096, **wrong})


PLANS = [{}, {0: 1}, {1: 0}, {-1: 1}, {1: -1}, {1.5: 1}, {"4096": 1}, {1 << 62: 2}, {1: 1 << 40}]


def test_impossible_plans_rings_and_timeouts_are_refused(arena):
    with Region(4096) as region:
        for plan in PLANS:
            with pytest.raises(memascend.ConfigError):
                Arena(region, plan)
    for chunk_bytes, count in [(0, 1), (4096, 0), (-1, 2), (4096, 1.5)]:
        with pytest.raises(memascend.ConfigError):
            ChunkRing(chunk_bytes, count)
    for timeout in (-1, float("nan"), "1", b"", []):
        with pytest.raises(memascend.ConfigError, match="timeout must be"):
            arena.lease(1, timeout=timeout)
    arena.lease(1, timeout=float("inf")).release()


def test_a_whole_number_of_bytes_may_be_a_float(tmp_path):
    with Region(1e6) as region:
        assert region.nbytes == 1_000_000
    with memascend.nvme.open(tmp_path / "volume", size=1e6) as volume:
        assert volume.size == 1_000_000


def test_region_larger_than_the_available_memory_is_rejected():
    with pytest.raises(memascend.MemoryLimitError, match=r"^64 TiB of memory .* [\d.]+ .iB are available") as caught:
        Region(1 << 46)
    assert caught.value.needed == 1 << 46
    assert 0 < caught.value.available < 1 << 46
    assert isinstance(caught.value, MemoryError)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.bool, torch.uint8])
def test_tensors_of_one_lease_share_its_memory(arena, dtype):
    lease = arena.lease(100 * dtype.itemsize)
    one, other = lease.tensor(100, dtype), lease.tensor((10, 10), dtype)
    one.fill_(1)
    assert other.eq(1).all()
    assert one.data_ptr() == other.data_ptr()


@pytest.mark.parametrize("shape", [(), 0, (0, 3), (2, 0), 5, (1, 2, 3), [4, 4], torch.Size([2, 2])])
def test_lease_makes_tensors_of_every_shape(arena, shape):
    tensor = arena.lease(4 * KIB).tensor(shape, torch.float32)
    assert tensor.shape == torch.Size([shape] if isinstance(shape, int) else shape)


def test_lease_rejects_sizes_shapes_and_dtypes_that_do_not_fit(arena):
    lease = arena.lease(4 * KIB)
    with pytest.raises(memascend.ConfigError, match="needs 4100 bytes; the lease holds 4096"):
        lease.tensor(1025, torch.float32)
    with pytest.raises(memascend.ConfigError, match="0 or more"):
        lease.tensor((-1, 4), torch.float32)
    with pytest.raises(memascend.ConfigError, match="quantized"):
        lease.tensor(4, torch.qint8)
    with pytest.raises(memascend.ConfigError, match=r"can never be granted: the largest class of this arena is 16384"):
        arena.lease(16 * KIB + 1)
    with pytest.raises(memascend.ConfigError, match="at least one byte"):
        arena.lease(0)
    for shape, dtype in [(3, float), ((2.0, 3), torch.uint8), ("ab", torch.uint8), (None, torch.uint8)]:
        with pytest.raises(memascend.ConfigError, match=r"torch\.dtype|sequence of integers"):
            lease.tensor(shape, dtype)


def test_lease_tensor_is_on_the_cpu_and_no_view_under_a_meta_device(arena):
    lease = arena.lease(4 * KIB)
    with torch.device("meta"):
        for shape in (0, 3, (2, 2)):
            tensor = lease.tensor(shape, torch.float32)
            assert (tensor.device.type, tensor._is_view()) == ("cpu", False)


def test_a_tensor_is_aligned_or_refused():
    with Region(4096) as region:
        roomy = Arena(region, {1001: 2})
        held = [roomy.lease(1000).tensor(250, torch.float32) for _ in range(2)]
        assert all(tensor.data_ptr() % 16 == 0 for tensor in held)
    with Region(3 * 4096) as region:
        tight = Arena(region, {1001: 11, 1277: 1})
        assert tight.stats()["reserved"] == tight.stats()["capacity"]
        leases = [tight.lease(1000) for _ in range(2)]
        with pytest.raises(memascend.ConfigError, match=r"not aligned for torch\.float32: plan its class"):
            [lease.tensor(250, torch.float32) for lease in leases]


def test_returned_lease_rejects_use_and_a_lease_in_use_rejects_release(arena):
    lease = arena.lease(4 * KIB)
    lease.release()
    assert arena.stats()["leases"] == 0
    with pytest.raises(memascend.UsageError, match="returned already"):
        lease.release()
    with pytest.raises(memascend.UsageError, match="returned already"):
        lease.tensor(1, torch.uint8)
    # A lease in use cannot be returned.
    lease = arena.lease(4 * KIB)
    tensor = lease.tensor(4 * KIB, torch.uint8)
    with pytest.raises(memascend.UsageError, match="a tensor or buffer still uses this lease"):
        lease.release()
    tensor.fill_(3)
    del tensor
    lease.release()


def test_lease_context_manager_releases_the_lease(arena):
    with arena.lease(4 * KIB) as lease:
        assert isinstance(lease, Lease)
    with arena.lease(4 * KIB) as lease:
        lease.release()
    assert arena.stats()["leases"] == 0


def test_a_lease_takes_the_smallest_class_and_never_a_larger_one(arena):
    held = [arena.lease(4 * KIB, owner="small") for _ in range(4)]
    output = r" within .* 4 slots of 4096 bytes .*held by: .small. 4"
    with pytest.raises(memascend.TimeoutExpired, match=output) as caught:
        arena.lease(100, timeout=0.01)
    assert isinstance(caught.value, TimeoutError)
    held.append(arena.lease(4 * KIB + 1))
    assert arena.stats()["classes"] == [
        {"bytes": 4 * KIB, "count": 4, "in_use": 4, "peak": 4},
        {"bytes": 16 * KIB, "count": 2, "in_use": 1, "peak": 1},
    ]


def test_arena_stats_count_bytes_and_peaks_by_owner(arena):
    held = [arena.lease(3000, owner="units"), arena.lease(16 * KIB, owner="update")]
    stats = arena.stats()
    assert (stats["bytes"], stats["in_use"], stats["capacity"]) == (3000 + 16 * KIB, 20 * KIB, 48 * KIB)
    assert stats["owners"]["units"]["bytes"] == stats["owners"]["units"]["peak"] == 3000
    held.clear()
    stats = arena.stats()
    assert (stats["bytes"], stats["peak"], stats["owners"]["update"]["peak"]) == (0, 3000 + 16 * KIB, 16 * KIB)


def test_budget_error_names_the_smallest_region_for_a_plan():
    plan = {1_000_003: 3, 77: 5}
    needed = 3 * 1_000_003 + 5 * 77
    page = limits()["page"]
    with Region(needed - page) as region, pytest.raises(memascend.BudgetError) as caught:
        Arena(region, plan)
    assert caught.value.smallest == needed
    assert re.search(
        rf"holds [\d.]+ \wiB and .* [\d.]+ \wiB: make the region at least {needed} bytes", str(caught.value)
    )
    with Region(caught.value.smallest) as region:
        stats = Arena(region, plan).stats()
        assert needed == stats["capacity"] <= stats["reserved"] <= region.mapped_bytes
    with Region(layout(plan).reserved) as region:
        stats = Arena(region, plan).stats()
        assert stats["capacity"] == layout(plan).asked == needed
        assert stats["reserved"] == layout(plan).reserved
        assert stats["reserved"] - needed <= 0.02 * needed


def test_waiting_lease_lets_other_threads_run_and_answers_ctrl_c(arena):
    held = [arena.lease(16 * KIB) for _ in range(2)]
    # The timer's thread can only run if the waiting thread has released the GIL.
    timer = threading.Timer(0.2, lambda: signal.raise_signal(signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        arena.lease(16 * KIB)
    timer.join()
    held.clear()
    arena.lease(16 * KIB, timeout=0).release()


def test_making_a_region_answers_ctrl_c():
    def make_regions():
        timer.start()  # on a busy machine, a timer that started earlier might fire before this loop
        while True:
            Region(1 << 30, owner="interrupted").close()

    timer = threading.Timer(0.005, lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        make_regions()
    timer.join()
    assert not [listed for listed in regions() if listed["owner"] == "interrupted"]


def test_finalizer_that_uses_a_lease_does_not_deadlock(loaded):
    # When a call of a lease fails, building the exception may start a garbage collection. The collection may run a
    # finalizer that uses this lease.
    loaded(
        """
import gc, torch
from memascend.memory import Arena, Region
import memascend
lease = Arena(Region(4096), {4096: 1}).lease(4096)
tensor = lease.tensor(1, torch.uint8)
class Asks:
    def __init__(self):
        self.me = self
    def __del__(self):
        repr(lease)
gc.set_threshold(1)
def refused(call):
    for _ in range(30):
        Asks()
        try:
            call()
        except memascend.UsageError:
            pass
refused(lease.release)
del tensor
lease.release()
refused(lease.release)
refused(lambda: lease.tensor(1, torch.uint8))
""",
        timeout=60,
    )


def test_ring_leases_distinct_aligned_chunks_until_closed():
    with ChunkRing(64 * KIB, 3) as ring:
        chunks = [ring.lease(owner="io") for _ in range(3)]
        assert {chunk.nbytes for chunk in chunks} == {64 * KIB}
        with pytest.raises(memascend.TimeoutExpired, match=r'"io" 3'):
            ring.lease(timeout=0)
        tensors = [chunk.tensor(64 * KIB, torch.uint8) for chunk in chunks]
        assert len({tensor.data_ptr() for tensor in tensors}) == 3
        assert all(tensor.data_ptr() % 4096 == 0 for tensor in tensors)
        del chunks, tensors
        assert ring.stats()["in_use"] == 0
    with pytest.raises(memascend.UsageError, match="closed"):
        ring.lease()


def test_repr_of_region_and_lease_shows_size_and_state(arena):
    with Region(4096) as region:
        assert repr(region) == f"Region(4096 bytes, pinned={region.pinned!r})"
    assert repr(region) == "Region(4096 bytes, closed)"
    lease = arena.lease(10)
    assert repr(lease) == "Lease(10 bytes)"
    lease.release()
    assert repr(lease) == "Lease(10 bytes, returned)"


UNPRIVILEGED = """
import os, resource, sys
import torch
import memascend
from memascend.memory import Arena, ChunkRing, Region, limits
import memascend.cli.demo, memascend.cli.doctor, memascend.errors  # the new user may be unable to read the files
resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, 64 << 10))
os.setgroups([]); os.setgid(65534); os.setuid(65534)
assert limits()["memlock_soft"] == 64 << 10
"""


@pytest.mark.root
def test_memlock_limit_disables_auto_pinning_and_rejects_explicit_mlock(loaded):
    loaded(
        UNPRIVILEGED
        + """
region = Region(1 << 20)
assert region.pinned is False
for part in ("RLIMIT_MEMLOCK", "soft limit 65536 bytes", "ulimit -l", "memlock=-1"):
    assert part in region.why_not, region.why_not
Arena(region, {1 << 20: 1}).lease(1 << 20).tensor(1 << 20, torch.uint8).fill_(1)
small = Region(4096)
assert small.pinned == "mlock"
with ChunkRing(1 << 20, 2) as ring:
    ring.lease().release()
before = memascend.memory.regions()
try:
    Region(1 << 20, pin="mlock")
except memascend.ConfigError as error:
    assert "soft limit 65536 bytes" in str(error) and "ulimit -l" in str(error), error
else:
    sys.exit("granted")
assert memascend.memory.regions() == before
"""
    )


@pytest.mark.root
def test_doctor_explains_a_memlock_limit(loaded):
    # The first call runs as root, so it can import all modules. The second call runs without privileges, and may not be
    # allowed to read the folders of the modules.
    doctor = "from memascend.cli import main; status = main(['doctor'])"
    out = loaded(f"{doctor}; print('---')\n{UNPRIVILEGED}{doctor}; sys.exit(status)").partition("---\n")[2]
    assert re.search(r"memlock limit +slower", out)
    assert "ulimit -l" in out


def test_address_space_limit_raises_memory_limit_error(loaded):
    out = loaded(
        """
import resource, torch, memascend
from memascend.memory import Region
memascend.MemoryLimitError
with open("/proc/self/statm") as statm:
    used = int(statm.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
try:
    Region(256 << 20)
except memascend.MemoryLimitError as error:
    print(error)
"""
    )
    assert "mmap of 256 MiB failed" in out


@pytest.mark.root
def test_a_cgroup_limit_is_an_error_and_not_a_kill(python, cgroup):
    first = cgroup / "memory.limit_in_bytes"
    (first if first.exists() else cgroup / "memory.max").write_text(str(512 << 20))
    # `python` starts a fresh process. If the process were forked, the limit would also count the shared pages that it
    # copies.
    out = python(
        """
import os, sys, torch, memascend
from memascend.memory import Arena, Region, limits
memascend.MemoryLimitError
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
assert limits()["cgroup"] == sys.argv[1] and limits()["cgroup_limit"] == 512 << 20, limits()
try:
    Region(1 << 30)
except memascend.MemoryLimitError as error:
    print(error)
    smaller = error.available // 2
region = Region(smaller)
Arena(region, {smaller: 1}).lease(smaller).tensor(smaller, torch.uint8).fill_(1)
print("survived")
""",
        cgroup,
    )
    assert f"memory cgroup {cgroup} with a limit of {512 << 20} bytes" in out
    assert "survived" in out
