"""What to do about a block that `sparsify_` has skipped."""

from __future__ import annotations

import shlex

# (part of a reason, what to do), the first match counts.
_WAYS_OUT = (
    (
        "no exact zeros",
        "`twell train --preset relufy model.init_from={model} data.source=TEXT` trains it on with ReLU",
    ),
    ("hook", "remove them, then call sparsify_ again"),
    ("forward was replaced", "restore it, then call sparsify_ again"),
    ("parametrised", "torch.nn.utils.parametrize.remove_parametrizations, then call sparsify_ again"),
    ("DTensor", "call sparsify_, and twell.hf.set_neuron_major(model, False), before sharding"),
    ("sharded or quantised", "load the model unquantised"),
    ("weight is torch.", "load the model unquantised"),
    ("are not nn.Linear", "load the model unquantised, or without what replaces nn.Linear"),
    ("experts", "not supported yet"),
    ("several dtypes", "cast the model to one dtype"),
    ("several devices", "put all of a block on one device"),
    ("its code decides", "write it without the condition, or describe it: twell.register_adapter"),
    ("its forward is not", "if it is one, describe it: twell.register_adapter"),
)


def way_out(reason: str, model: str = "") -> str:
    """One line, or nothing where there is no way.

    model:  where the model was loaded from, if that is known.
    """
    way = next((way for part, way in _WAYS_OUT if part in reason), "")
    return way.replace("{model}", shlex.quote(model) if model else "MODEL")
