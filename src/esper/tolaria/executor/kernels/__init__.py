"""The compiled half of the executor: `run.run` takes an operation list (see ops.py) through an epoch of batches.

Layout of every buffer: [channel, pixel, row], rows innermost and padded to R, a multiple of 16, so every loop runs over
whole vectors of rows. Padding rows hold numbers without meaning in activations and exact zeros in gradients; kernels
that sum over rows of activations leave them out. No kernel allocates, and every sum has one fixed order.

An operation `kind` is `kind_forward` and `kind_backward`, in conv, norms, pointwise, pixels or losses; `update` is the
optimizer. Names: A activations, G their gradients, p parameters, dp their gradients, all fields of `arrays.Memory`; x,
y, z positions in A and G; P pixels. Nothing is bounds-checked: `program.check` has looked at an operation list before
it comes here.
"""
