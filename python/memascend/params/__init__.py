"""Keeps the values of parameters on storage, and brings them into memory while modules compute.

`offloaded_param` represents one parameter. `unit` represents the parameters that are read together, and tracks where
their bytes are. `cached_units` reads and evicts units, and `residency` materializes units for threads. `module_hooks`
hooks modules, and `saved_tensors` hooks the tensors that autograd saves. `settling` chooses which reads write deferred
updates. `weight_access` gives copies of weights to user code; its module docstring lists the places where the bytes of
a weight can be. `threads` makes other threads wait while one thread changes parameters. `aliases` finds objects that
share memory with parameters.

Invariant: a module computes with the values of the last commit. A call that cannot have these values raises before it
changes anything. A graph records the version of the weights that it saved. If a later commit has changed these weights,
the backward raises an error. Units in memory are in the RAM tier or in slots of the arena. The plan sets the size of
the arena; if the user gave no budget, `cached_units` may enlarge it. A slot stays leased while any code has a view of
the slot.

Not in this package: gradients, updates, the order of actions in a step, and the choice of the memory for units, on the
host or on a device (`device.unit_memory`).
"""
