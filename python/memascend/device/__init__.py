"""A CUDA device that computes: its memory for units, copies to it and back, and what may not run on it.

`device` is streams and events behind one protocol, which tests replace; `arena` has exact-size slots of device memory,
`transfer` the few pinned chunks of host memory that units and gradients pass through, `unit_memory` both or, where the
host computes, its own memory.

Invariant: nothing is written where work that was begun may still read or write, and nothing is read before what fills
it; each such wait is an event on a stream, and one that tests take away is seen. The host waits for the device once a
step. Host memory does not grow with the model.

Never here: which unit is needed when, which is `params.residency`'s; CUDA graphs, which are refused.
"""
