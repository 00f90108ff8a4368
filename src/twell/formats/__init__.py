"""Sparse layouts of an activation matrix [M tokens, H neurons].

`TwELL`       the paper's inference format: row-wise tiles packed into 32-bit words.
`Hybrid`      the paper's training format: ELL rows plus a dense backup for heavy rows;
              `Hybrid.transpose()` is neuron-major.
`BlockTwELL`  ours: per block of R tokens, the union of active neurons and their values.

The paper's two are kept and tested. The GPU's row path, the paper's too, writes TwELL words; the block path
works on the unions that `BlockTwELL` stores. All three round-trip to the bit: `Format.pack(dense).unpack()`
equals `dense`, with -0.0 read as 0.
"""

from .block import BlockTwELL
from .hybrid import Hybrid, HybridTransposed
from .row import TwELL

__all__ = ["BlockTwELL", "Hybrid", "HybridTransposed", "TwELL"]
