"""Implementations of the feed-forward block: `dense` (plain PyTorch, differentiable), `cpu` and `gpu`."""
