"""DeepSpeed's swapper beside `bench update`: started with what works, compared before it counts."""

import json
import stat

import pytest
import torch

from memascend.cli.bench import bag
from memascend.cli.bench.swapper import Swapper
from memascend.errors import ConfigError


@pytest.fixture
def python(tmp_path):
    """A peer that needs ten buffers; its answers are those of a file."""
    path = tmp_path / "bin" / "python"
    path.parent.mkdir()
    path.write_text(
        f"#!/bin/sh\n"
        "echo noise; echo peer: ready\n"
        'test "$5" -ge 10 || { read order; echo "AssertionError: ran out of swap buffers"; exit 1; }\n'
        f'while read order; do echo "peer: $(cat {tmp_path}/answer)"; done\n'
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    sample = bag.values(bag.SAMPLE).float()
    answer = {"seconds": 2.0, "added_bytes": 1000, "swap_buffer_bytes": 500, "sample": sample.tolist()}
    (tmp_path / "answer").write_text(json.dumps(answer))
    return path


def test_it_is_started_with_the_fewest_buffers_that_work(python, tmp_path):
    with Swapper(python, tmp_path / "state", bag.SAMPLE) as swapper:
        assert [swapper.step() for _ in range(3)] == [2.0] * 3
        assert swapper.compared(bag.values(bag.SAMPLE).float()) == {
            "buffers": 10,
            "swap_buffer_bytes": 500,
            "added_bytes": 1000,
            "difference": 0,
        }


def test_another_update_is_no_peer(python, tmp_path):
    with Swapper(python, tmp_path / "state", bag.SAMPLE) as swapper:
        for _ in range(3):
            swapper.step()
        other = bag.values(bag.SAMPLE).float() * 1.02
        assert "differ from ours" in swapper.compared(other)["error"]
        assert "differ from ours" in swapper.compared(other * torch.nan)["error"]


def test_an_environment_without_it_is_named(python, tmp_path):
    python.write_text('#!/bin/sh\necho "ModuleNotFoundError: No module named deepspeed"\nexit 1\n')
    with pytest.raises(ConfigError, match="No module named deepspeed"):
        Swapper(python, tmp_path / "state", bag.SAMPLE)
