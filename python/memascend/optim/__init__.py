"""Optimizers on streamed state: which can stream, the state that each keeps, and the update of one parameter.

Invariant: updates of one parameter at a time are bit-identical to torch's step of all parameters. A class of which that
is not known is tried on copies before anything is offloaded, and rejected with an error that names it where it differs.
Adam and SGD run in the engine where their state is as the engine has it; all other optimizers run their own code.

The original optimizer is never stepped here: copies of it are, on the memory of one parameter. Values that its steps
change for all parameters alike (counters, options) are adopted once all updates agree; else the step is rejected.
"""
