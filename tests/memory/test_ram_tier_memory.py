"""Tests that what is kept in RAM takes what the plan says: by the kernel's count, and in a cgroup of that size."""

import pytest
from memory.measured import SQUARES

MIB = 1 << 20
BLOCKS, WIDTH, VOCABULARY = 4, 512, 64
BLOCK_BYTES = SQUARES * WIDTH * WIDTH * 4
# All of it, many times.
RAM_TIER = {"blocks": BLOCKS, "width": WIDTH, "vocabulary": VOCABULARY, "steps": 4}
OPTIONS = {"gradients": "fused", "host_memory": "1GiB"}


@pytest.mark.timeout(300)
def test_what_is_in_ram_takes_what_the_plan_says(measure):
    run = measure(**RAM_TIER, options={**OPTIONS, "durability": "none"})
    plan = run["plan"]["host"]
    assert plan["records in RAM"] == pytest.approx(3 * run["model_bytes"], rel=0.03)
    assert plan["gradients in RAM"] == run["model_bytes"]
    # No gradient waits yet, nor is one on its way.
    planned = run["plan"]["host_peak"] - plan["gradients in RAM"] - plan["gradients"]
    assert run["after"]["RssAnon"] - run["before"]["RssAnon"] == pytest.approx(planned, rel=0.03)
    peak = run["peaks"]["train"] - run["before"]["RssAnon"] - run["activation_bytes"]
    # What torch holds is a gradient that is being made.
    assert peak <= run["plan"]["host_peak"] * 1.03 + WIDTH * WIDTH * 4


@pytest.mark.root
@pytest.mark.timeout(300)
def test_a_cgroup_of_the_plan_is_enough(measure, cgroup):
    # After offload() all is there but gradients: the process would be killed, and the status says so. Beside them the
    # heap keeps what torch frees, if that takes no more than a tenth.
    waiting = BLOCKS * BLOCK_BYTES
    grow_bytes = waiting + (waiting * 3 // 100 + waiting // 10) * 4
    measure(**RAM_TIER, options=OPTIONS, cgroup=str(cgroup), grow_bytes=grow_bytes)
