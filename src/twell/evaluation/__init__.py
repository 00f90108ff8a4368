"""How good and how sparse a language model is."""

from .load import load_model
from .text import TextResult, evaluate_text, evaluate_windows

__all__ = ["TextResult", "evaluate_text", "evaluate_windows", "load_model"]
