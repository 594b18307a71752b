"""Keeps parameters on storage: materializes them while modules compute, and makes them placeholders in between.

`offloaded_param` represents one parameter, `unit` the parameters that are read together and the state of their bytes.
`cached_units` reads and evicts units, `residency` materializes them for threads, `module_hooks` hooks modules, and
`saved_tensors` hooks the tensors that autograd saves. `settling` chooses which reads write deferred updates.
`weight_access` gives copies of weights to user code, and has a table of where the bytes of a weight can be. `threads`
serialises threads, and `aliases` rejects shared memory at offload().

Invariant: a module computes with the values of the last commit. A call that cannot have these values raises before it
changes anything. A graph records the version of the values that it saved; a backward raises if that version is gone.
Units are stored only in the arena, whose size the plan has set; a slot stays leased while user code has a view of it.

Not in this package: gradients and updates (they write to storage and call `CachedUnits.changed`), the phases of a step,
and the choice of memory for units, on the host or on a device (`device.unit_memory`).
"""
