"""Parameters whose values are on storage: in memory while modules compute, placeholders between.

`offloaded_param` is one parameter, `unit` the parameters that are read together and where their bytes are,
`resident_units` which units have bytes in memory, `residency` who has bound them, `module_hooks` the modules that do,
`weight_access` memory of weights between forwards, `threads` who may change values when, `aliases` the check before.

Invariant: a module computes with the values of the last commit, or with those that user code wrote since. Whatever
cannot have these raises before anything has changed. A graph names the version of the values that it saved, and is not
walked with others. Memory is the arena's alone, which the plan has sized; a view that somebody keeps keeps its bytes.

Never here: gradients and updates, which write to storage and report `ResidentUnits.changed`; what a step is made of;
where a unit's memory lies, on the host or on a device.
"""
