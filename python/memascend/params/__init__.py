"""Parameters whose values are on storage: in memory while modules compute, placeholders between.

`offloaded_param` is one parameter, `unit` the parameters that are read together, with the state of their bytes.
`cached_units` has the units in memory, `residency` the threads that have them materialized, `module_hooks` the hooks of
modules, `saved_tensors` those on what autograd saves. `settling` chooses which reads write updates. `weight_access` has
the copies that user code gets, and a table of where the bytes of a weight can be; `threads` the turns of threads,
`aliases` the check at offload().

Invariant: a module computes with the values of the last commit. A call that cannot have them raises before anything
has changed. A graph names the version of the values that it saved, and is not
walked with others. Memory is the arena's alone, which the plan has sized; a view that user code keeps keeps its bytes.

Never here: gradients and updates, which write to storage and report `CachedUnits.changed`; the parts of a step;
the place of a unit's memory, on the host or on a device.
"""
