"""Handles gradients from their arrival in autograd until an update uses them.

`gradients` takes each gradient once autograd has accumulated it, and implements step() and zero_grad() for all
parameters. `gradient` holds the state of one gradient and begins its update. `lazy_grad` defines the handle that
`p.grad` holds while the gradient is on storage, and `operations` records the arithmetic on that handle. `norms`
measures gradients, `loss_scale` scales losses. `loop` detects the habits of the training loop. `microbatches` and
`baton` compute micro-batches layer by layer.

[Note: Gradient states] Each gradient is in one `GradientState`, and `_MOVES` lists all allowed transitions. `p.grad`
decides: step() drops a gradient whose handle the user removed from `p.grad`, and uses a gradient that the user
assigned. Sums, scaling and rounding keep torch's order. If user code reads or changes a gradient that an update has
already used, an error is raised.

This package commits nothing (`session` does) and reads no weights (`params` does).
"""
