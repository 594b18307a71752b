"""Keeps parameters on storage: materializes them while modules compute, and makes them placeholders in between.

`offloaded_param` represents one parameter. `unit` represents the parameters that are read together, and tracks where
their bytes are. `cached_units` reads and evicts units, and `residency` materializes units for threads. `module_hooks`
hooks modules, and `saved_tensors` hooks the tensors that autograd saves. `settling` chooses which reads write deferred
updates. `weight_access` gives copies of weights to user code; its module docstring lists the places where the bytes of
a weight can be. `threads` serialises the threads that use or change parameters. `aliases` rejects parameters that share
memory with other objects at offload().

Invariant: a module computes with the values of the last commit. A call that cannot have these values raises before it
changes anything. A graph records the version of the weights that it saved. If a later commit has changed these weights,
the backward raises an error. Units in memory are in the RAM tier or in the arena, whose size the plan has set. A slot
stays leased while user code has a view of the slot.

Not in this package: gradients, updates, the order of actions in a step, and the choice of the memory for units, on the
host or on a device (`device.unit_memory`).
"""
