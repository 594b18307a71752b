"""Tests that progress of long work shows in a notebook: a real kernel, and what it sends to the page."""

import queue
import sys
import time

import pytest

# Five pieces that take longer than the bar waits, as loading a large checkpoint would.
CELL = """
import time
from memascend.text import Progress

with Progress("loading weights", 5, unit="pieces") as progress:
    for _ in range(5):
        time.sleep(0.3)
        progress.add(1)
"""


@pytest.fixture
def kernel():
    manager = pytest.importorskip("jupyter_client").KernelManager()
    pytest.importorskip("ipykernel")
    manager.start_kernel(extra_arguments=["--log-level=ERROR"])
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=60)
        yield client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def shown(client, code):
    """What the kernel sends while a cell runs."""
    asked, found = client.execute(code), []
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            message = client.get_iopub_msg(timeout=60)
        except queue.Empty:
            break
        if message["parent_header"].get("msg_id") != asked:
            continue
        if message["msg_type"] == "error":
            pytest.fail("\n".join(message["content"]["traceback"]))
        if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
            return found
        found.append(message)
    pytest.fail("the cell did not end")


@pytest.mark.parametrize("widgets", [True, False])
def test_a_cell_shows_a_bar_and_takes_it_away(kernel, widgets):
    if widgets:
        pytest.importorskip("ipywidgets")
    else:
        shown(kernel, "import sys; sys.modules['ipywidgets'] = None")
    messages = shown(kernel, f"import sys; sys.path[:0] = {sys.path!r}\n{CELL}")
    kinds = [message["msg_type"] for message in messages]
    text = "".join(message["content"]["text"] for message in messages if message["msg_type"] == "stream")
    if widgets:
        opened = [message["content"]["data"]["state"] for message in messages if message["msg_type"] == "comm_open"]
        (bar,) = [state for state in opened if state.get("_model_name") == "FloatProgressModel"]
        assert bar["max"] == 5
        assert any("loading weights" in str(message["content"]) for message in messages)
        sent = [
            message["content"]["data"].get("state", {}) for message in messages if message["msg_type"] == "comm_msg"
        ]
        values = [state["value"] for state in sent if isinstance(state.get("value"), (int, float))]
        assert values
        assert values == sorted(values)
        # The box that holds it is hidden in the end.
        assert any(state.get("display") == "none" or state.get("visibility") == "hidden" for state in sent) or (
            kinds.count("comm_close") > 0
        )
        assert not text
    else:
        assert "comm_open" not in kinds
        assert "loading weights" in text
        # The bar of text is taken away: the last line is blank.
        assert not text.rsplit("\r", 1)[-1].strip()
