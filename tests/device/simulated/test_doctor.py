"""Tests `memascend doctor --gpu` where all but the kernels is there: it ends, writes its file, and finds their bits."""

import json
import subprocess
import sys

import pytest
from device.simulated import build
from device.simulated.test_order import LONG

pytestmark = [pytest.mark.posing, *LONG, pytest.mark.timeout(300)]


@pytest.mark.usefixtures("simulated")
def test_it_ends_and_writes_its_file(tmp_path):
    """Kernels compute nothing there: bits differ, and that is what it says."""
    program = (
        "import sys; from memascend.cli import gpu_check, main\n"
        "gpu_check._SIZES, gpu_check._PINNED_BYTES = (1, 2049), 32 << 20\n"
        "sys.exit(main(['doctor', '--gpu']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=build.environment(), cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["memascend-gpu.json"]
    report = json.loads((tmp_path / "memascend-gpu.json").read_text())
    found = {finding["subject"]: finding for check in report["checks"] for finding in check["findings"]}
    assert found["pinning"]["found"].startswith("registered with CUDA")
    assert found["copies"]["verdict"] == "fine"
    assert "DIFFER" in found["overflow check and norm"]["found"]
    assert "attach this file" in done.stdout
    assert report["machine"]["GPU 0"].startswith("Simulated GPU 0")
