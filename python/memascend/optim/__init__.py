"""Optimizers on streamed state: which can stream, what each keeps for a parameter, and how one parameter is updated.

Invariant: an update of one parameter at a time has the bits of the step of torch that updates all at once. Where that
is not known of a class, it is tried on copies before anything is offloaded, and a class that differs is refused by
name. Adam and SGD run in the engine where their state is as the engine has it, everything else by its own code.

The original optimizer is never stepped here: copies of it are, on the memory of one parameter. What its steps change
for all parameters alike (counters, options) is adopted once all of them have ended alike, or the step is refused.
"""
