"""A CUDA device that computes: its memory for units, copies to it and back, and the calls that it rejects.

`device` is streams and events in one class. `arena` has exact-size slots of device memory,
`transfer` the few pinned chunks of host memory that units and gradients pass through. `unit_memory` has both or, where
the host computes, memory of the host.

Invariant: memory is not written while earlier work may still read or write it, and not read before it is filled. Each
such wait is an event on a stream, and tests fail without it. The host waits for the device once a
step. Host memory does not grow with the model.

Never here: which unit is needed when, which is `params.residency`'s; CUDA graphs, which are rejected.
"""
