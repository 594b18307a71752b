"""Tests real memory limits: RLIMIT_MEMLOCK as an unprivileged user, a memory cgroup, address space."""

import re

import pytest

UNPRIVILEGED = """
import os, resource, sys
import torch
import memascend
from memascend.memory import Arena, ChunkRing, Region, limits
import memascend.cli.demo, memascend.cli.doctor, memascend.errors  # before the user changes: files may be root's
resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, 64 << 10))
os.setgroups([]); os.setgid(65534); os.setuid(65534)
assert limits()["memlock_soft"] == 64 << 10
"""


@pytest.mark.root
def test_auto_goes_on_without_pinning_and_says_why_and_mlock_past_the_limit_is_refused(loaded):
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
    # Once before the user changes: what it loads may lie where that user is not let in.
    doctor = "from memascend.cli import main; status = main(['doctor'])"
    out = loaded(f"{doctor}; print('---')\n{UNPRIVILEGED}{doctor}; sys.exit(status)").partition("---\n")[2]
    assert re.search(r"memlock limit +slower", out)
    assert "ulimit -l" in out


def test_an_address_space_limit_is_an_error_with_a_name(loaded):
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
    # What a forked process copies of what it shares would count.
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
