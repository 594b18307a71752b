"""Tests the model of costs against calculations by hand."""

from types import SimpleNamespace

import pytest

from memascend.plan.cost import Drive, Host, Work, drive_days, phases, seconds, update_seconds
from memascend.plan.units import Unit

GB = 10**9
# As if eight blocks of 1 GB and a small pinned unit were trained; two blocks stay from the forward to the backward.
UNITS = [
    *(Unit(f"block{index}", (f"block{index}.weight",), GB, f"block{index}", pinned=False, elements=GB // 2)
      for index in range(8)),
    Unit("rest", ("norm.weight",), 4096, None, pinned=True, elements=2048),
]  # fmt: skip


def plan(**changes):
    given = {
        "units": UNITS,
        "resident": {"block6", "block7"},
        "ram_tier_part": 0.0,
        "ram_tier": (),
        "window": 2,
        "spared": None,
        "gradients": "auto",
        "read_bytes": {"values, forward": 8 * GB, "values, backward": 6 * GB, "state": 40 * GB},
        "written_bytes": {"values": 8 * GB, "state": 40 * GB},
    }
    return SimpleNamespace(**{**given, **changes})


KEPT = plan(
    gradients="ssd",
    read_bytes={"values, forward": 8 * GB, "values, backward": 6 * GB, "state": 40 * GB, "gradients": 8 * GB},
    written_bytes={"values": 8 * GB, "state": 40 * GB, "gradients": 8 * GB},
)
# A quarter in RAM, whose gradients are logged.
LOGGED = {"values": 6 * GB, "state": 30 * GB, "log": 2 * GB}
DRIVE = Drive(read=5 * GB, write=4 * GB)
IDLE = Host(update=0.0, check=0.0, threads=1, shared=False)


def test_a_drive_whose_speeds_are_given_takes_turns():
    assert DRIVE.seconds(10 * GB, 8 * GB) == pytest.approx(2 + 2)


@pytest.mark.parametrize(
    ("read", "written", "expected"),
    [(6, 6, 12 / 3), (9, 6, 12 / 3 + 3 / 5), (2, 6, 4 / 3 + 4 / 4), (5, 0, 1), (0, 4, 1)],
)
def test_a_measured_drive_does_both_and_then_what_is_left(read, written, expected):
    drive = Drive(read=5 * GB, write=4 * GB, mixed=3 * GB)
    assert drive.seconds(read * GB, written * GB) == pytest.approx(expected)


def test_fused_updates_run_beside_the_backward():
    forward, last = phases(plan(), Work(forward=2.0, backward=4.0), DRIVE, IDLE)
    assert forward.parts == pytest.approx({"compute": 2, "disk": 8 / 5, "update": 0})
    assert (forward.seconds, forward.bound) == (2, "compute")
    assert last.parts["disk"] == pytest.approx((6 + 40) / 5 + 48 / 4)
    assert (last.seconds, last.bound) == (pytest.approx(21.2), "disk")
    assert seconds([forward, last]) == pytest.approx(23.2)


def test_kept_gradients_make_a_phase_of_their_own():
    forward, backward, update = phases(KEPT, Work(forward=2.0, backward=4.0), DRIVE, IDLE)
    assert forward.parts["disk"] == pytest.approx(8 / 5)
    assert backward.parts["disk"] == pytest.approx(6 / 5 + 8 / 4)
    assert update.parts["disk"] == pytest.approx((40 + 8) / 5 + 48 / 4)
    assert update.parts["compute"] == 0


def test_each_backward_after_the_first_adds_to_what_is_spilled():
    forward, backward, update = phases(KEPT, Work(forward=2.0, backward=4.0, backwards=3), DRIVE, IDLE)
    assert forward.parts == pytest.approx({"compute": 6, "disk": 24 / 5, "update": 0})
    # Values three times; gradients are written three times, and read twice to be added to.
    assert backward.parts["disk"] == pytest.approx((18 + 16) / 5 + 24 / 4)
    assert backward.parts["compute"] == pytest.approx(12)
    assert update.parts["disk"] == pytest.approx(48 / 5 + 48 / 4)


def test_processors_that_compute_the_model_update_in_the_same_time():
    host = Host(update=6.0, check=0.1 / GB, threads=1, shared=True)
    drive = Drive(read=5 * GB, write=4 * GB, processor_seconds=0.03 / GB)
    forward, last = phases(plan(), Work(forward=2.0, backward=4.0), drive, host)
    assert forward.parts["compute"] == pytest.approx(2 + 0.13 * 8)
    # An eighth is the first block's, whose gradient comes when the model has ended.
    assert last.parts["compute"] == pytest.approx(4 + 6 * 7 / 8 + 0.13 * (46 + 48), rel=1e-6)
    assert "update" not in last.parts


def test_the_gradient_that_comes_last_is_updated_when_all_else_has_ended():
    one = (40 / 5 + 48 / 4) / 8
    compute = Work(forward=2.0, backward=30.0)
    _, last = phases(plan(), compute, DRIVE, IDLE)
    assert last.tail == pytest.approx(one, rel=1e-6)
    assert (last.seconds, last.bound) == (pytest.approx(30 + one, rel=1e-6), "compute")
    # Where storage is slower than all else, it is busy until the end anyway.
    _, last = phases(plan(), Work(forward=2.0, backward=4.0), DRIVE, IDLE)
    assert last.seconds == last.parts["disk"]
    # What is in RAM has nothing to stream; kept gradients are all there before the first update.
    assert phases(plan(ram_tier=("block0.weight",)), compute, DRIVE, IDLE)[-1].tail == 0
    assert [phase.tail for phase in phases(KEPT, compute, DRIVE, IDLE)] == [0, 0, 0]


def test_what_is_in_ram_without_a_log_is_written_in_step():
    work = Work(forward=2.0, backward=4.0)
    *_, last, step = phases(plan(ram_tier_part=0.25), work, DRIVE, IDLE)
    assert last.parts["disk"] == pytest.approx(46 / 5 + 0.75 * 48 / 4)
    assert step.parts["disk"] == pytest.approx(0.25 * 48 / 4)
    assert "disk" not in phases(plan(ram_tier_part=0.25, written_bytes=LOGGED), work, DRIVE, IDLE)[-1].parts


def test_what_is_in_ram_is_updated_after_the_commit_by_all_threads():
    host = Host(update=8.0, check=1e-10, threads=1, shared=False, ram_tier_threads=4)
    logs = plan(ram_tier_part=0.25, written_bytes=LOGGED)
    *_, last, step = phases(logs, Work(forward=2.0, backward=4.0), DRIVE, host)
    # Values of a quarter have their checksums read before it and renewed after it.
    checked = 2 * (8 * GB + 4096) / 4 * 1e-10
    assert (step.name, step.parts) == ("step()", {"update": pytest.approx((2.0 + checked) / 4)})
    streamed = (6 + 40 + 38) * GB * 1e-10
    assert last.parts["update"] == pytest.approx(6.0 + streamed)


def test_a_device_is_beside_the_update_and_behind_a_link():
    host = Host(update=6.0, check=0.1 / GB, threads=1, shared=False, link=2 * GB)
    forward, last = phases(plan(), Work(forward=2.0, backward=4.0), DRIVE, host)
    # Pinned units stay there; those that stay until the backward come once; gradients go the other way meanwhile.
    assert forward.parts["PCIe"] == pytest.approx(8 / 2)
    assert last.parts["PCIe"] == pytest.approx((8 + 4096 / GB) / 2)
    assert last.parts["update"] == pytest.approx(6 + 0.1 * 94)
    assert last.parts["compute"] == 4


def test_what_is_frozen_is_not_updated():
    half = [Unit("block", ("a", "b"), GB, "block", pinned=False, elements=GB // 2, frozen_bytes=GB // 2)]
    assert update_seconds(plan(units=half), 2.0 / GB) == pytest.approx(0.5)
    assert update_seconds(plan(), 2.0 / GB) == pytest.approx(8, rel=1e-5)


def test_the_life_of_a_drive():
    # 48 GB in 12 s are 345.6 TB a day.
    assert drive_days(48 * GB, 12.0, 600 * 10**12) == pytest.approx(600 / 345.6)
    assert drive_days(0, 12.0, 600 * 10**12) is None


def test_checkpointed_activations_pass_through_link_and_drive():
    link = Host(update=0.0, check=0.0, threads=1, shared=False, link=2 * GB)
    away = Work(forward=2.0, backward=4.0, carried=100 * GB, stored=60 * GB)
    for model in (plan(), KEPT):
        still = phases(model, Work(forward=2.0, backward=4.0), DRIVE, link)
        forward, last, *_ = phases(model, away, DRIVE, link)
        # Out of the device beside the units that come in, and back after them.
        assert forward.parts["PCIe"] == pytest.approx(50)
        assert last.parts["PCIe"] == pytest.approx(53)
        assert forward.parts["disk"] == pytest.approx(still[0].parts["disk"] + 60 / 4)
        assert last.parts["disk"] == pytest.approx(still[1].parts["disk"] + 60 / 5)
