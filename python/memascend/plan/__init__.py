"""Decisions before a run: its options, the model's units, the memory plan, and the bytes and seconds of a step.

Invariant: the plan accounts for every byte of host memory that the library takes, by owner, and its sum is within the
budget. Where a budget is too small, the error names the smallest that works, to the byte. Options are checked here,
once, each by itself and against the others.

Nothing here reads or writes a store (the system is asked for free space), or allocates the planned memory; models may
be on "meta". A plan is a frozen value: a change makes another plan. Times are estimates of a step, and never affect
exactness.
"""
