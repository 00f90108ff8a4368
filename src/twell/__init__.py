"""twell: the zeros in LLM feed-forward layers, made to pay.

twell.sparsify_(model)                    the blocks of any model that has exact zeros, in place
twell.prune_(model, data=batches)         the neurons that never fire, removed
y = twell.ffn(x, up, down, gate)          one block, exact, inactive neurons skipped
mlp = twell.SparseMLP(1024, 4096)         the same as a module, Llama's parameter names
twell.TwELL, BlockTwELL, Hybrid           the sparse formats of the activation matrix
"""

# First: a CPU that was found to need it gets its cap before anything multiplies.
from ._processor import apply_kept_verdict as _apply_kept_verdict

_apply_kept_verdict()

from ._log import Ran, recorded_paths
from ._version import __version__
from .accumulation import accumulate_in_place
from .activations import Activation, fatrelu
from .explanation import ExplainedLayer, Explanation, explain
from .formats import BlockTwELL, Hybrid, HybridTransposed, TwELL
from .functional import FfnStats, ffn, ffn_with_stats
from .kernels.gpu.workspace import overflowed_steps
from .layer_state import TrainingState, training_states
from .nn import SparseMLP
from .plan import Plan
from .pruning import PruneReport, prune_
from .sparsify import BlockDescription, SparsifyReport, densify_, register_adapter, sparsify_

__all__ = [
    "Activation",
    "BlockDescription",
    "BlockTwELL",
    "ExplainedLayer",
    "Explanation",
    "FfnStats",
    "Hybrid",
    "HybridTransposed",
    "Plan",
    "PruneReport",
    "Ran",
    "SparseMLP",
    "SparsifyReport",
    "TrainingState",
    "TwELL",
    "__version__",
    "accumulate_in_place",
    "densify_",
    "overflowed_steps",
    "explain",
    "fatrelu",
    "ffn",
    "ffn_with_stats",
    "prune_",
    "recorded_paths",
    "register_adapter",
    "sparsify_",
    "training_states",
]
