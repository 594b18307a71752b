"""What is decided before a run: its options, the model's units, the memory plan, what a step moves and takes.

Invariant: the plan accounts for every byte of host memory that the library takes, by owner, and its sum is within the
budget; a budget that works is named to the byte where one is too small. Options are checked here, once, each by itself
and against the others.

Nothing here reads or writes storage, or takes the memory that is planned; models may be on "meta". A plan is a frozen
value: what changes it makes another one. Times are estimates of a step and never decide what is exact.
"""
