"""Tests that what users do with CUDA works, or is refused with a way out."""

import pytest
from device.simulated.test_order import LONG, fine

pytestmark = pytest.mark.simulated


LONG_HABITS = [pytest.param(habit, marks=LONG) for habit in ("cache_emptied", "under_a_default_device")]


@pytest.mark.parametrize("habit", ["on_the_device_already", *LONG_HABITS])
def test_the_first_device(simulated, habit):
    found = simulated(f"habits.{habit}")
    fine(found)
    assert found["on"] == "cuda:0"
    assert found["contexts"] == [1, 0]


def test_the_second_device(simulated):
    """No context, which is memory, is made on the first one."""
    found = simulated("habits.second_device")
    fine(found)
    assert found["on"] == "cuda:1"
    assert found["contexts"] == [0, 1]


@pytest.mark.parametrize("ours", [False, True])
def test_copies_to_the_second_device_from_the_first(simulated, ours):
    assert simulated("habits.copies_to_the_second_device", ours=ours) == {"same": True, "contexts": [0, 1]}


def test_a_device_that_is_made_visible(simulated):
    found = simulated("habits.checked", env={"CUDA_VISIBLE_DEVICES": "1"})
    fine(found)
    assert (found["on"], found["name"]) == ("cuda:0", "Simulated GPU 1")


def test_no_device_is_visible(simulated):
    said = simulated("habits.refused_device", env={"CUDA_VISIBLE_DEVICES": ""})
    assert "there is no CUDA device" in said
    assert "device='cpu'" in said


def test_autocast(simulated):
    assert simulated("habits.autocast") == {"steps": 2, "faults": []}


@pytest.mark.parametrize(
    ("habit", "how"),
    [
        ("dispatched", {"where": "cuda"}),
        pytest.param("dispatched", {"where": "auto"}, marks=LONG),
        ("prepared", {"before": False}),
        pytest.param("prepared", {"before": True}, marks=LONG),
    ],
)
def test_a_model_that_accelerate_places(simulated, habit, how):
    pytest.importorskip("accelerate")
    assert simulated(f"habits.{habit}", **how) == {"steps": 2, "faults": []}


@pytest.mark.parametrize("where", ["several", "offloaded"])
def test_a_device_map_that_divides(simulated, where):
    """Refused before anything changed: weights that accelerate keeps elsewhere would have been lost."""
    pytest.importorskip("accelerate")
    found = simulated("habits.dispatched", where=where)
    assert found["refused"] == "ConfigError"
    assert "without device_map=" in found["why"]
