"""Takes from torch's profiler what a run allocated."""

__all__ = ["peak_of"]


def peak_of(profile):
    """The most bytes that the CPU's allocator gave at once, beside what was there before."""
    events = [one for one in profile.profiler.kineto_results.events() if one.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda one: one.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
