"""Checks the options of a run, chooses its units, plans its memory, and estimates the bytes and seconds of a step.

Invariant: the plan lists, for each owner, the bytes of host memory that the library takes, except Python and torch
objects (`Plan.object_bytes`). The sum is within the budget. If a budget is too small, `BudgetError.smallest` is the
smallest budget that works, to the byte. `Options` checks each option, and that the options fit together.

This package does not read a store, and does not allocate the planned memory. It reads how much disk space and memory
are free, which GPU the machine has, and how fast the machine's processor multiplies matrices. A model may be on the
device "meta". A `Plan` is frozen: methods such as `Plan.by` return a new plan. Times are estimates, and never affect
the results of training.
"""
