"""Makes the volumes that tests run on."""

import pytest
from support.disks import backend, child, faulty, loop, path, small_ext4

from memascend import nvme

__all__ = ["backend", "child", "faulty", "loop", "path", "small_ext4", "volume"]


@pytest.fixture
def volume(path, backend):
    with nvme.open(path, size=16 << 20, backend=backend) as volume:
        yield volume
