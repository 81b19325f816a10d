"""The words of the executor: kinds of operations and the columns of an operation list. Plain numbers, no numba.

An operation list is an int64 matrix, one row per operation in forward order; what a column means depends on the kind.
Positions of buffers are in values per row of the batch: position p of a batch of R rows starts at float p * R.
"""

from __future__ import annotations

(
    CONV,
    BATCH_NORM,
    GROUP_NORM,
    ACTIVATION,
    SCALE,
    MIX,
    MULTIPLY,
    MAX_POOL,
    AVG_POOL,
    RESAMPLE,
    MEAN,
    LOSS,
    ATTACH,
) = range(13)
KINDS = (
    "conv",
    "batch_norm",
    "group_norm",
    "activation",
    "scale",
    "mix",
    "multiply",
    "max_pool",
    "avg_pool",
    "resample",
    "mean",
    "loss",
    "attach",
)
"""Names of the kinds, by number.

conv        y = w * x + bias; a linear layer is a convolution of one pixel
batch_norm  y = norm(x) over rows and pixels, with running statistics; relu if asked
group_norm  y = norm(x) over the pixels of a group of channels, row by row; relu if asked
activation  y = f(x)
scale       y = s * gain[c] * x + shift[c] + t
mix         y = x + s * gain[c] * z
multiply    y = s * x * z, z of the same shape, one value per channel, or one per row
max_pool, avg_pool, mean (over pixels)
resample    y[a, b] = x[ROW + a * ROW_NUM // ROW_DEN, likewise for columns]: nearest neighbours, crops, strides
loss        softmax cross-entropy of logits x, summed and counted in row MODE of the totals
attach      backward only: hands the gradient of features x to the output z of the training seed with meter MODE
"""

ADAMW, SGD = range(2)
RELU, GELU, TANH, SIGMOID, SILU = range(5)
SAME, PER_CHANNEL, PER_ROW = range(3)

(
    KIND,
    X,  # position of the input
    Y,  # position of the output
    Z,  # position of the second input
    IN,  # channels of the input
    OUT,  # channels of the output; classes of a loss
    H,  # height and width of the input
    W,
    HO,  # height and width of the output
    WO,
    K,  # kernel
    STRIDE,
    DILATION,
    PAD,
    GROUPS,
    WEIGHT,  # position in the parameters, or -1
    BIAS,  # position in the parameters, or -1
    STAT,  # position in the running statistics: means, then variances
    SAVE,  # what forward keeps for backward: a position in the saved scalars (batch norm) or of a buffer (group norm)
    MODE,  # relu after a norm, function of an activation, shape of a factor, row of the totals, meter
    SCALAR,  # which of the scalars given at run time is s; -1: the constant
    ROW,  # of resample
    ROW_NUM,
    ROW_DEN,
    COL,
    COL_NUM,
    COL_DEN,
    BACK,  # whether there is anything to do backward
    NEED_X,  # whether backward computes the gradient of x, and whether it adds to what is there
    ADD_X,
    NEED_Z,
    ADD_Z,
) = range(32)
COLUMNS = 32
CONST_S, CONST_T = range(2)
"""Constants of an operation: s and t of scale, mix and multiply; epsilon and momentum of norms."""
LANES = 16
"""Rows of a batch are padded to a multiple of this."""
