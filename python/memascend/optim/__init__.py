"""Runs optimizers on streamed state: decides which can stream, finds the state of each, and updates one parameter.

[Note: One at a time] Updates of one parameter at a time are bit-identical to torch's step of all parameters. torch's
own classes are listed (`trial`). Any other class is tried on copies before anything is offloaded, and rejected with an
error that names it if the bits differ. Adam and SGD run in the engine if it has a format for their state; all other
optimizers run their own code.

The original optimizer is never stepped: copies of it step, on the memory of one parameter. Values that a step changes
for all parameters alike (counters, options) are set on the original once the updates of all parameters agree on them;
otherwise the step is rejected.
"""
