"""Keeps units (groups of parameters) on a CUDA device, copies units and gradients, and rejects CUDA graphs.

`device` wraps streams and events. `arena` leases slots of device memory. `transfer` copies units and gradients through
a few pinned chunks of host memory. `unit_memory` combines `arena` and `transfer`. If the host computes, `unit_memory`
provides host memory instead.

Invariant: no memory is written while earlier work may still read or write it, and no memory is read before it is
filled. Later work waits for an event that marks the end of the earlier work. Tests fail if one of these events is
removed. The thread that trains waits for the copy of each gradient of a record in the RAM tier. The number of chunks
does not grow with the model.

Not in this package: `params.residency` decides which unit is needed at which time.
"""
