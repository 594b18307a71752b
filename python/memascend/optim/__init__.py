"""Runs optimizers on streamed state: rejects unsuited optimizers, finds an optimizer's state, and updates parameters.

[Note: One at a time] memascend updates one parameter at a time. The results must be bit-identical to torch's step of
all parameters. `trial` lists torch's own classes, which were tested. An optimizer of any other class is tried on small
parameters before anything is offloaded: steps of one parameter at a time are compared with steps of all parameters. If
the bits differ, offload() raises an error that names the optimizer. `rules` lists the updates by Adam, AdamW and SGD
that the engine computes. All other updates run the optimizer's own code.

memascend never steps the original optimizer. To run its code, memascend steps copies of it, each with a single
parameter. A step may change shared values, such as counters and options. If all copies end with the same shared values,
these values are set on the original optimizer. Otherwise the step is rejected.
"""
