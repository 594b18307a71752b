"""Offloads models that torch's `fully_shard` shards. Each rank has its own store, with its rows of each parameter.

[Note: All ranks or none] A step is committed on all ranks or on none, so that all of them can open one commit. The
results of a run do not depend on the number of ranks. All ranks make the same calls in the same order. If a rank fails,
dies or hangs, all other ranks raise an error within the timeout, and no rank commits again. The error names the rank
that failed. Ranks never train from rows of different commits. They never begin a new run if another rank has a store of
an earlier run.

Only `fsdp` uses torch's private fields. A single process with a plain model imports nothing of this package.
"""
