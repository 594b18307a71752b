"""Tests the cost model, which predicts the seconds of a step, against calculations by hand."""

from types import SimpleNamespace

import pytest

from memascend.plan.cost import Drive, Host, Work, drive_days, fastest, seconds, update_seconds, ways
from memascend.plan.units import Unit

GB = 10**9
# Eight blocks of 1 GB, and a small pinned unit. Two of the blocks stay in memory from the forward to the backward.
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
# The bytes that a step writes if a quarter of the model is in RAM. The gradients of this quarter are written to the
# log.
LOGGED = {"values": 6 * GB, "state": 30 * GB, "log": 2 * GB}
DRIVE = Drive(read=5 * GB, write=4 * GB)
IDLE = Host(update=0.0, check=0.0, shared=False)


def phases(*given):
    found = ways(*given)
    return found[fastest(found)]


@pytest.mark.parametrize(
    ("read", "written", "expected"),
    [(6, 6, 12 / 3), (9, 6, 12 / 3 + 3 / 5), (2, 6, 4 / 3 + 4 / 4), (5, 0, 1), (0, 4, 1)],
)
def test_drive_seconds_use_the_mixed_rate_then_the_single_rate(read, written, expected):
    drive = Drive(read=5 * GB, write=4 * GB, mixed=3 * GB)
    assert drive.seconds(read * GB, written * GB) == pytest.approx(expected)


def test_fused_updates_share_the_phase_of_the_backward():
    forward, last = phases(plan(), Work(forward=2.0, backward=4.0), DRIVE, IDLE)
    assert forward.parts == pytest.approx({"compute": 2, "disk": 8 / 5, "update": 0})
    assert (forward.seconds, forward.bound) == (2, "compute")
    assert last.parts["disk"] == pytest.approx((6 + 40) / 5 + 48 / 4)
    assert (last.seconds, last.bound) == (pytest.approx(21.2), "disk")
    assert seconds([forward, last]) == pytest.approx(23.2)


def test_spilled_gradients_add_a_separate_update_phase():
    forward, backward, update = phases(KEPT, Work(forward=2.0, backward=4.0), DRIVE, IDLE)
    assert forward.parts["disk"] == pytest.approx(8 / 5)
    assert backward.parts["disk"] == pytest.approx(6 / 5 + 8 / 4)
    assert update.parts["disk"] == pytest.approx((40 + 8) / 5 + 48 / 4)
    assert update.parts["compute"] == 0


# --- deferred and early updates ---------------------------------------------------------

# Like `KEPT`, but an update also reads the values. Deferred updates compute the values that modules of the next step
# use, so the forward itself reads 8 GB less. With "next backward", the backward also reads 6 GB less.
DEFERRED = plan(
    gradients="ssd",
    read_bytes={**KEPT.read_bytes, "values, update": 8 * GB},
    written_bytes=KEPT.written_bytes,
    spared=(8 * GB, 6 * GB),
)
UPDATE = 8 + 40 + 8  # GB that an update reads: values, state, gradients


def test_update_in_the_next_forward_reads_the_values_for_its_modules():
    found = ways(DEFERRED, Work(forward=2.0, backward=4.0), DRIVE, IDLE)["next forward"]
    assert [phase.name for phase in found] == ["forward and last step's update", "backward"]
    assert found[0].parts["disk"] == pytest.approx(UPDATE / 5 + 48 / 4)
    assert found[1].parts["disk"] == pytest.approx(6 / 5 + 8 / 4)
    # This update starts from separate master weights, so it does not read the values. It computes the values that the
    # forward needs.
    master = plan(**{**vars(DEFERRED), "read_bytes": KEPT.read_bytes})
    own = ways(master, Work(forward=2.0, backward=4.0), DRIVE, IDLE)["next forward"]
    assert own[0].parts["disk"] == pytest.approx((UPDATE - 8) / 5 + 48 / 4)


def test_an_update_in_the_next_backward_is_read_twice_and_written_once():
    host = Host(update=6.0, check=0.0, shared=False)
    found = ways(DEFERRED, Work(forward=2.0, backward=4.0), DRIVE, host)["next backward"]
    assert [phase.name for phase in found] == ["forward and last step's values", "backward and last step's update"]
    assert found[0].parts == pytest.approx({"compute": 2, "disk": UPDATE / 5, "update": 6})
    assert found[1].parts == pytest.approx({"compute": 4, "disk": UPDATE / 5 + 56 / 4, "update": 6})
    # The first unit is an eighth of the model. The forward waits for this unit's update. In the backward, the unit's
    # gradient arrives last.
    assert [phase.tail for phase in found] == pytest.approx([UPDATE / 5 / 8, (UPDATE / 5 + 48 / 4) / 8], rel=1e-5)


def test_deferred_updates_also_read_frozen_values():
    # 3 GB of frozen values are added to the model. The backward reads 2 GB of these frozen values again.
    read = {**DEFERRED.read_bytes, "values, forward": 11 * GB, "values, backward": 8 * GB}
    found = ways(plan(**{**vars(DEFERRED), "read_bytes": read}), Work(forward=2.0, backward=4.0), DRIVE, IDLE)
    assert found["next forward"][0].parts["disk"] == pytest.approx((3 + UPDATE) / 5 + 48 / 4)
    assert found["next backward"][0].parts["disk"] == pytest.approx((3 + UPDATE) / 5)
    assert found["next backward"][1].parts["disk"] == pytest.approx((2 + UPDATE) / 5 + 56 / 4)


def test_early_updates_store_their_gradient_and_do_not_read_it():
    work = Work(forward=2.0, backward=4.0)
    fused, early = phases(plan(), work, DRIVE, IDLE), ways(DEFERRED, work, DRIVE, IDLE)["early"]
    assert [phase.name for phase in early] == [phase.name for phase in fused]
    assert early[0] == fused[0]
    assert early[1].parts["disk"] == pytest.approx(fused[1].parts["disk"] + 8 / 4)
    # With a window of one unit, values are evicted before the update needs them, so the update reads 8 GB of values
    # again.
    small = ways(plan(**{**vars(DEFERRED), "window": 1}), work, DRIVE, IDLE)["early"]
    assert small[1].parts["disk"] == pytest.approx(early[1].parts["disk"] + 8 / 5)


def test_first_micro_batch_shares_a_phase_with_the_deferred_update():
    link = Host(update=0.0, check=0.0, shared=False, link=2 * GB)
    work = Work(forward=2.0, backward=4.0, backwards=4, exchanged=(1.0, 3.0), carried=40 * GB, stored=20 * GB)
    found = ways(DEFERRED, work, DRIVE, link)
    first, other, back = found["next forward"]
    assert [first.parts["compute"], other.parts["compute"], back.parts["compute"]] == [2, 6, 16]
    assert [first.parts["network"], other.parts["network"], back.parts["network"]] == [1, 3, 12]
    # A quarter of the activations leave the device in the first forward.
    assert [first.parts["PCIe"], other.parts["PCIe"]] == pytest.approx([(40 / 4) / 2, 30 / 2])
    assert first.parts["disk"] == pytest.approx(UPDATE / 5 + (48 + 5) / 4)
    assert other.parts["disk"] == pytest.approx(3 * 8 / 5 + 15 / 4)
    assert back.parts["disk"] == pytest.approx((4 * 6 + 3 * 8 + 20) / 5 + 4 * 8 / 4)
    values, update, other, back = found["next backward"]
    assert [phase.parts["compute"] for phase in (values, update, other, back)] == [2, 4, 6, 12]
    assert [phase.parts["network"] for phase in (values, update, other, back)] == [1, 3, 3, 9]
    assert [phase.parts["PCIe"] for phase in (update, back)] == pytest.approx([(6 + 10) / 2, (18 + 30) / 2])
    assert values.parts["disk"] == pytest.approx(UPDATE / 5 + 5 / 4)
    assert update.parts["disk"] == pytest.approx((UPDATE + 5) / 5 + 56 / 4)
    # Each further micro-batch reads the spilled gradients, adds its own gradients, and writes the sums.
    assert back.parts["disk"] == pytest.approx((3 * 6 + 3 * 8 + 15) / 5 + 3 * 8 / 4)
    _, back, last = found["early"]
    assert [back.parts["compute"], last.parts["compute"]] == [12, 4]
    assert back.parts["disk"] == pytest.approx((3 * 6 + 2 * 8 + 15) / 5 + 3 * 8 / 4)
    assert last.parts["disk"] == pytest.approx((6 + 40 + 8 + 5) / 5 + 56 / 4)


def test_micro_batches_by_layer_all_share_the_phases_of_the_update():
    work = Work(forward=2.0, backward=4.0, backwards=4, by_layer=True)
    values, update = ways(DEFERRED, work, DRIVE, IDLE)["next backward"]
    assert (values.parts["compute"], values.parts["disk"]) == (8, pytest.approx(UPDATE / 5))
    assert (update.parts["compute"], update.parts["disk"]) == (16, pytest.approx(UPDATE / 5 + 56 / 4))


def test_gradient_log_of_deferred_updates_is_a_phase_before_step():
    # A quarter of the model is in RAM, and the rest streams. The quarter's gradients are written to the log. The step
    # also writes a part of the quarter's values and state.
    read = {"values, forward": 6 * GB, "values, update": 6 * GB, "state": 30 * GB, "gradients": 6 * GB}
    written = {"values": 7 * GB, "state": 32 * GB, "gradients": 6 * GB, "log": 2 * GB}
    quarter = {**vars(DEFERRED), "read_bytes": read, "ram_tier_part": 0.25, "spared": (6 * GB, 0)}
    for way in ("next forward", "next backward", "early"):
        found = ways(plan(**{**quarter, "written_bytes": written}), Work(forward=2.0, backward=4.0), DRIVE, IDLE)[way]
        assert [phase.name for phase in found[2:]] == ["gradient log", "step()"]
        assert found[2].seconds == pytest.approx((1 + 2 + 2) / 4)
        assert sum(phase.parts.get("disk", 0) * 4 for phase in found) == pytest.approx(
            sum(written.values()) / GB + 4 / 5 * {"next forward": 42, "next backward": 84, "early": 36}[way]
        )
    # Without a log, step() writes the values and the state of the quarter that is in RAM.
    whole = {"values": 8 * GB, "state": 40 * GB, "gradients": 6 * GB}
    *_, step = ways(plan(**{**quarter, "written_bytes": whole}), Work(forward=2.0, backward=4.0), DRIVE, IDLE)["early"]
    assert step.parts["disk"] == pytest.approx(12 / 4)


def test_fastest_chooses_the_shortest_way_but_never_early():
    for compute, way in ((1.0, "next forward"), (1000.0, "next forward"), (30.0, "next backward")):
        work = Work(forward=compute / 3, backward=compute)
        found = ways(DEFERRED, work, DRIVE, IDLE)
        assert fastest(found) == way, compute
        assert phases(DEFERRED, work, DRIVE, IDLE) == found[way]
        assert seconds(found[way]) <= seconds(phases(KEPT, work, DRIVE, IDLE))
    # "early" is faster than "next backward", but `fastest` does not choose it, because early updates are invalid if
    # gradients are clipped or changed.
    assert seconds(found["early"]) < seconds(found["next backward"])


def test_each_further_backward_reads_and_rewrites_spilled_gradients():
    forward, backward, update = phases(KEPT, Work(forward=2.0, backward=4.0, backwards=3), DRIVE, IDLE)
    assert forward.parts == pytest.approx({"compute": 6, "disk": 24 / 5, "update": 0})
    # The backwards read values three times, write gradients three times, and read gradients twice to add to them.
    assert backward.parts["disk"] == pytest.approx((18 + 16) / 5 + 24 / 4)
    assert backward.parts["compute"] == pytest.approx(12)
    assert update.parts["disk"] == pytest.approx(48 / 5 + 48 / 4)


def test_shared_processors_add_update_seconds_to_compute():
    host = Host(update=6.0, check=0.1 / GB, shared=True)
    drive = Drive(read=5 * GB, write=4 * GB, processor_seconds=0.03 / GB)
    forward, last = phases(plan(), Work(forward=2.0, backward=4.0), drive, host)
    assert forward.parts["compute"] == pytest.approx(2 + 0.13 * 8)
    # The gradient of the first block arrives at the end of the backward. To compute the update of this block takes an
    # eighth of the 6 seconds. This eighth counts in `tail` and not in `parts`.
    assert last.parts["compute"] == pytest.approx(4 + 6 * 7 / 8 + 0.13 * (46 + 48), rel=1e-6)
    assert "update" not in last.parts


def test_update_of_the_last_gradient_adds_a_tail_to_the_backward():
    one = (40 / 5 + 48 / 4) / 8
    compute = Work(forward=2.0, backward=30.0)
    _, last = phases(plan(), compute, DRIVE, IDLE)
    assert last.tail == pytest.approx(one, rel=1e-6)
    # The gradient of the unit that computes first arrives last. Here this unit is small, so its update is short.
    assert phases(plan(units=UNITS[::-1]), compute, DRIVE, IDLE)[1].tail < one / 1000
    assert (last.seconds, last.bound) == (pytest.approx(30 + one, rel=1e-6), "compute")
    # If storage is the slowest part, storage is busy until the end, so the last update adds no time.
    _, last = phases(plan(), Work(forward=2.0, backward=4.0), DRIVE, IDLE)
    assert last.seconds == last.parts["disk"]
    # If the unit whose gradient arrives last is in RAM, its update streams no bytes. With gradients="ssd", all
    # gradients are spilled before the first update. In both cases, the tail takes no time.
    assert phases(plan(ram_tier=("block0.weight",), ram_tier_part=0.125), compute, DRIVE, IDLE)[1].tail == 0
    assert [phase.tail for phase in phases(KEPT, compute, DRIVE, IDLE)] == [0, 0, 0]


def test_ram_tier_without_a_log_is_written_in_step():
    work = Work(forward=2.0, backward=4.0)
    *_, last, step = phases(plan(ram_tier_part=0.25), work, DRIVE, IDLE)
    assert last.parts["disk"] == pytest.approx(46 / 5 + 0.75 * 48 / 4)
    assert step.parts["disk"] == pytest.approx(0.25 * 48 / 4)
    assert "disk" not in phases(plan(ram_tier_part=0.25, written_bytes=LOGGED), work, DRIVE, IDLE)[-1].parts


def test_ram_tier_is_updated_in_step_by_all_ram_tier_threads():
    host = Host(update=8.0, check=1e-10, shared=False, ram_tier_threads=4)
    logs = plan(ram_tier_part=0.25, written_bytes=LOGGED)
    *_, last, step = phases(logs, Work(forward=2.0, backward=4.0), DRIVE, host)
    # The checksums of the values in RAM, a quarter of all values, are verified before the update and renewed after the
    # update.
    checked = 2 * (8 * GB + 4096) / 4 * 1e-10
    assert (step.name, step.parts) == ("step()", {"update": pytest.approx((2.0 + checked) / 4)})
    streamed = (6 + 40 + 38) * GB * 1e-10
    assert last.parts["update"] == pytest.approx(6.0 + streamed)


def test_device_link_seconds_count_apart_from_compute_and_update():
    host = Host(update=6.0, check=0.1 / GB, shared=False, link=2 * GB)
    forward, last = phases(plan(), Work(forward=2.0, backward=4.0), DRIVE, host)
    # Pinned units stay on the device, and resident units are copied to the device only once. Gradients leave the
    # device, and the link moves bytes in both directions at once.
    assert forward.parts["PCIe"] == pytest.approx(8 / 2)
    assert last.parts["PCIe"] == pytest.approx((8 + 4096 / GB) / 2)
    assert last.parts["update"] == pytest.approx(6 + 0.1 * 94)
    assert last.parts["compute"] == 4


def test_update_seconds_leave_out_frozen_parameters():
    half = [Unit("block", ("a", "b"), GB, "block", pinned=False, elements=GB // 2, frozen_bytes=GB // 2)]
    assert update_seconds(plan(units=half), 2.0 / GB) == pytest.approx(0.5)
    assert update_seconds(plan(), 2.0 / GB) == pytest.approx(8, rel=1e-5)


def test_drive_days_divide_the_endurance_by_the_daily_writes():
    # If 48 GB are written in 12 s, 345.6 TB are written in a day.
    assert drive_days(48 * GB, 12.0, 600 * 10**12) == pytest.approx(600 / 345.6)
    assert drive_days(0, 12.0, 600 * 10**12) is None


def test_checkpointed_activations_pass_through_link_and_drive():
    link = Host(update=0.0, check=0.0, shared=False, link=2 * GB)
    away = Work(forward=2.0, backward=4.0, carried=100 * GB, stored=60 * GB)
    for model in (plan(), KEPT):
        still = phases(model, Work(forward=2.0, backward=4.0), DRIVE, link)
        forward, last, *_ = phases(model, away, DRIVE, link)
        # In the forward, activations leave the device while units arrive, so the link moves both at once. In the
        # backward, activations return in the same direction as the units, so the times add up.
        assert forward.parts["PCIe"] == pytest.approx(50)
        assert last.parts["PCIe"] == pytest.approx(53)
        assert forward.parts["disk"] == pytest.approx(still[0].parts["disk"] + 60 / 4)
        assert last.parts["disk"] == pytest.approx(still[1].parts["disk"] + 60 / 5)
