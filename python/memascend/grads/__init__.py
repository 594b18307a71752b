"""Handles gradients from their arrival in autograd until an update uses them.

`gradients` takes each gradient once autograd has accumulated it, and does the work of step() and zero_grad() on all
gradients. `gradient` holds the state of one gradient and begins its update. `lazy_grad` defines the handle that
`p.grad` holds while the gradient is on storage or used up, and `operations` records the arithmetic on that handle.
`norms` measures gradients, and `loss_scale` scales losses. `loop` detects the habits of the training loop.
`microbatches` and `baton` compute micro-batches layer by layer.

[Note: Gradient states] Each gradient is in one `GradientState`, and `_MOVES` lists all allowed transitions. `p.grad`
decides: step() drops a gradient whose handle the user removed from `p.grad`, and uses a gradient that the user
assigned. Sums, scaling and rounding keep torch's order. If user code reads or changes a gradient that an update has
used up, a `UsageError` is raised; only the 2-norm can still be read.

This package commits no step (`session` does) and reads no weights (`params` does).
"""
