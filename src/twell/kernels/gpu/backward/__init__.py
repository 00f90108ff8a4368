"""Gradients of the feed-forward block on the active set; see `stages.py` for the order of things."""
