"""Models that torch's fully_shard divides: several ranks, each with its rows in a store of its own.

Invariant: a step is committed on all ranks or on none, so that all of them can open one commit; the bits of a run do
not depend on the number of ranks. All ranks make the same calls in the same order; a rank that fails, dies or hangs is
named on all others within the timeout, and none commits any more.

`fsdp` alone knows torch's private fields. One process with a model of its own imports nothing of this and pays
nothing. Ranks never train from rows of different commits, and never begin anew beside stores that hold a run.
"""
