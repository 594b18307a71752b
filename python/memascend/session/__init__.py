"""Makes `memascend.offload()` and what it returns: decides, opens the store, and runs each step in order.

`offload` is the call; `decide` and `open_store` prepare a run, and `build` makes its parts, bottom up. `session` has
the order of a step, and hears what is done with the model; `run` has what is committed with it, and what is let go at
the end. `value_edits` changes values outside of a step, and `materialize` takes them out; `report` measures.

Invariant: what a forward computes with, what storage holds, and what `optimizer.steps` says are of one commit. A call
that is rejected leaves model, optimizer and storage as they were.

Never: nothing that builds runs in a step; the resources of a run know neither model nor optimizer, so that both can be
collected; no arithmetic on weights or gradients is done here.
"""
