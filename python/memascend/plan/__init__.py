"""Checks the options of a run, chooses its units, plans its memory, and estimates the bytes and seconds of a step.

Invariant: the plan lists, for each owner, every byte of host memory that the library takes. The sum is within the
budget. If a budget is too small, the error names the smallest budget that works, to the byte. `Options` checks each
option, and that the options fit together.

This package does not read a store, and does not allocate the planned memory. It reads the free space of file systems.
A model may be on the device "meta". A `Plan` is frozen: methods that change a plan return a new plan. Times are
estimates, and never affect results.
"""
