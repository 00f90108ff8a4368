"""How good and how sparse a language model is."""

from .load import load_model
from .text import TextResult, evaluate_text

__all__ = ["TextResult", "evaluate_text", "load_model"]
