"""Training data: text from anywhere, tokenised once, read as sequences in an order that can be resumed."""

from ..config import DataConfig
from .prepare import Prepared, prepare
from .sequences import EpochOrder, PackedDataset, RunOrder
from .sources import documents

__all__ = ["DataConfig", "EpochOrder", "PackedDataset", "Prepared", "RunOrder", "documents", "prepare"]
