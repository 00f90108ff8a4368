"""Training data: text from anywhere, tokenised once, as sequences in an order that can be resumed."""

from .config import DataConfig
from .order import EpochOrder, RunOrder
from .packed import PackedDataset
from .preparation import Prepared, prepare
from .sources import documents

__all__ = [
    "DataConfig",
    "EpochOrder",
    "PackedDataset",
    "Prepared",
    "RunOrder",
    "documents",
    "prepare",
]
