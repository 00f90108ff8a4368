"""`twell.sparsify_`: runs the feed-forward blocks of any model on our kernels, in place.

activation_probe  recognises activation functions by what they return
proof             works out what the projections of a module do, by running its code on stand-ins
stock_code        finds projections that a layer's code calls one after the other
linear_twins      admits subclasses of nn.Linear that compute the same
recognition       searches a model with these
ways_out          what to do about what it skips
adapters          blocks that users describe
roles, twin       the weights of a block, and our block on them
blocks            what runs in its place
"""

from __future__ import annotations

from .adapters import BlockDescription, register_adapter
from .convert import SparsifyReport, densify_, sparsify_

__all__ = ["BlockDescription", "SparsifyReport", "densify_", "register_adapter", "sparsify_"]
