"""Tests what the class `Device` asks of torch, on a stand-in for torch.cuda with two devices."""

import threading

import pytest
import torch

from memascend.device import device as devices
from memascend.device.device import Device
from memascend.errors import UsageError

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


class Stream:
    def __init__(self, device):
        self.device = device
        self.waited = []

    def wait_event(self, event):
        self.waited.append(event)


class Event:
    made = ()

    def __init__(self, **options):
        self.options = options
        self.stream = None
        Event.made += (self,)

    def record(self, stream):
        self.stream = stream

    def query(self):
        return True

    def synchronize(self):
        pass


class Contexts:
    """Which device each thread is on, and which devices have a context: as torch does it on CUDA 12."""

    def __init__(self):
        self.made = set()
        self.defaults = {device: Stream(device) for device in (FIRST, SECOND)}
        self.threads = threading.local()
        self.captures = False

    @property
    def here(self):
        return getattr(self.threads, "device", FIRST)

    def set_device(self, device):
        if device != self.here:
            self.threads.device = device
            self.made.add(device)

    def current_stream(self, device=None):
        streams = getattr(self.threads, "streams", {})
        return streams.get(device or self.here, self.defaults[device or self.here])

    def set_stream(self, stream):
        self.set_device(stream.device)
        self.threads.streams = {**getattr(self.threads, "streams", {}), stream.device: stream}

    def is_current_stream_capturing(self):
        return self.captures

    def stream(contexts, stream):  # noqa: N805
        class Context:
            def __enter__(self):
                self.before = contexts.current_stream()
                if self.before.device != stream.device:
                    self.there = contexts.current_stream(stream.device)
                contexts.set_stream(stream)

            def __exit__(self, *_):
                if self.before.device != stream.device:
                    contexts.set_stream(self.there)
                contexts.set_stream(self.before)

        return Context()

    def device(contexts, device):  # noqa: N805
        class Context:
            def __enter__(self):
                self.before = contexts.here
                contexts.set_device(device)

            def __exit__(self, *_):
                # Back only to where there is a context; else the thread stays.
                if self.before in contexts.made:
                    contexts.set_device(self.before)
                else:
                    contexts.threads.device = self.before

        return Context()


@pytest.fixture
def contexts(monkeypatch):
    made = Contexts()
    names = ("set_device", "current_stream", "set_stream", "is_current_stream_capturing", "stream", "device")
    for name in names:
        monkeypatch.setattr(torch.cuda, name, getattr(made, name))
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "made", ())
    return made


@pytest.mark.parametrize("ours", [False, True])
def test_another_device_alone_is_touched(contexts, ours):
    """By threads of ours and the user's, on whichever device they are."""
    made = Device(SECOND)
    source, target = torch.arange(8), torch.zeros(8, dtype=torch.int64)

    def copies():
        if ours:
            made.enter_thread()
        mark = made.mark(made.stream())
        made.bring(source, target, [mark]).order()
        made.take(target, source, [mark]).wait()

    thread = threading.Thread(target=copies)
    thread.start()
    thread.join(30)
    assert torch.equal(source, target)
    assert contexts.made == {SECOND}
    assert {event.stream.device for event in Event.made} == {SECOND}
    # Both streams for copies come after the mark.
    assert [stream.waited for stream in (made._inward, made._outward)] == [[Event.made[0]]] * 2


@pytest.mark.usefixtures("contexts")
def test_waits_do_not_spin():
    made = Device(FIRST)
    made.mark(made.stream())
    made.bring(torch.zeros(2), torch.zeros(2), [])
    assert [event.options for event in Event.made] == [{"blocking": True}] * 2


def test_a_thread_of_ours_enters_once(contexts, monkeypatch):
    told = []
    monkeypatch.setattr(devices, "ignore_captures", lambda: told.append(threading.current_thread()))
    made = Device(SECOND)
    for _ in range(2):
        made.enter_thread()
    assert contexts.here == SECOND
    assert told == [threading.current_thread()]
    other = threading.Thread(target=made.enter_thread)
    other.start()
    other.join(30)
    assert told[1:] == [other]


def test_a_capture_is_refused(contexts):
    made = Device(FIRST)
    made.require_no_capture()
    contexts.captures = True
    with pytest.raises(UsageError, match="CUDA graph"):
        made.require_no_capture()
