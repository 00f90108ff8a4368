"""`twell.prune_`: removes the neurons of a model that do not fire.

firing        counts how often neurons fire while a model runs
selection     which neurons stay
projections   cuts the weights of a block
stored_sizes  which fields of a config hold the sizes, so that the model loads back
"""

from __future__ import annotations

from .prune import PrunedBlock, PruneReport, prune_

__all__ = ["PruneReport", "PrunedBlock", "prune_"]
