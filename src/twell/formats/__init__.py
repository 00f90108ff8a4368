"""Sparse layouts of an activation matrix [M tokens, H neurons].

`TwELL`       row-wise tiles packed into 32-bit words (the paper's inference format).
`BlockTwELL`  per block of R tokens, the union of active neurons and their values.
`Hybrid`      ELL rows plus a dense backup for heavy rows (training); `Hybrid.transpose()` is neuron-major.

All three round-trip to the bit: `Format.pack(dense).unpack()` equals `dense`, with -0.0 read as 0.
"""

from .block import BlockTwELL
from .hybrid import Hybrid, HybridTransposed
from .row import TwELL

__all__ = ["BlockTwELL", "Hybrid", "HybridTransposed", "TwELL"]
