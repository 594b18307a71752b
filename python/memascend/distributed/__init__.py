"""Offloads models that torch's `fully_shard` shards: each of several ranks has its rows in a store of its own.

[Note: All ranks or none] A step is committed on all ranks or on none, so that all of them can open one commit. The
results of a run do not depend on the number of ranks. All ranks make the same calls in the same order. If a rank fails,
dies or hangs, all other ranks raise an error that names it, within the timeout, and no rank commits again. Ranks never
train from rows of different commits, and never begin a new run beside stores that hold one.

Only `fsdp` uses torch's private fields. A single process with a plain model imports nothing of this package.
"""
