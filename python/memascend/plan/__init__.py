"""Decides, before a run, its options, units and memory plan, and estimates the bytes and seconds of a step.

Invariant: the plan accounts for every byte of host memory that the library takes, by owner, and the sum is within the
budget. If a budget is too small, the error names the smallest budget that works, to the byte. `Options` checks all
options, each alone and against the others.

This package reads no store (only the free space of a file system), and does not allocate the planned memory. Models may
be on "meta". A `Plan` is frozen: a change makes another plan. Times are estimates, and never affect results.
"""
