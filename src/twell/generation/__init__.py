"""Generation as one captured step: see `generate`."""

from .generate import CapturedGeneration, accelerate_

__all__ = ["CapturedGeneration", "accelerate_"]
