"""Provides memory for units on a CUDA device, copies to the device and back, and rejects CUDA graphs.

`device` wraps streams and events. `arena` leases exact-size slots of device memory, and `transfer` copies units and
gradients through a few pinned chunks of host memory. `unit_memory` combines `arena` and `transfer`; if the host
computes, it provides host memory instead.

Invariant: no memory is written while earlier work may still read or write it, and no memory is read before it is
filled. Later work waits for earlier work by an event on a stream, and tests fail if one of these events is removed. The
host waits for the device once a step. Host memory does not grow with the model.

Not in this package: the decision which unit is needed when (`params.residency`).
"""
