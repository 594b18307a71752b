"""Models that torch's `fully_shard` shards: several ranks, each with its rows in a store of its own.

Invariant: a step is committed on all ranks or on none, so that all of them can open one commit. The results of a run do
not depend on the number of ranks. All ranks make the same calls in the same order. If a rank fails, dies or hangs, all
other ranks raise an error that names it, within the timeout, and no rank commits any more.

Only `fsdp` uses torch's private fields. A single process with a plain model imports nothing of this package. Ranks
never train from rows of different commits, and never begin anew beside stores that hold a run.
"""
