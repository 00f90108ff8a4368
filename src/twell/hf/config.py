"""The configs: transformers' Llama and Qwen2 configs with `sparsity_*` fields."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any, ClassVar

from transformers import LlamaConfig, Qwen2Config

from .._errors import reject, require_positive_int
from .._log import log_once
from ..activations import Activation

_log = logging.getLogger("twell")

# Stock names of the activations. Stock classes have no fatrelu and no drelu; relu is the nearest.
_STOCK_ACTIVATION = {"relu": "relu", "relu2": "relu2", "fatrelu": "relu", "drelu": "relu"}
# Stock activations with exact zeros, under every name that configs use.
EXACT_ZEROS = {"relu": "relu", "relu2": "relu2", "relu_squared": "relu2"}


@dataclass(repr=False, eq=False, kw_only=True)
class SparsityConfig:
    """The fields that a sparse config adds to the stock one.

    sparsity_l1_coeff:     weight of the L1 term of the training loss; initial `l1_weight` of the model.
    sparsity_gated_mlp:    act(gate) * up if True, act(up) if False.
    sparsity_activation:   "relu", "relu2", "fatrelu(THRESHOLD)" or "drelu" (gated only).
    sparsity_layer_sizes:  neurons of every layer; None: intermediate_size in each.
    sparsity_new_intermediate_size:  found in released configs; replaces intermediate_size if above 0.

    Other `sparsity_*` fields of released configs are kept and not used. `hidden_act` is always the stock name
    of `sparsity_activation`: released configs say "silu" there and mean ReLU. A stock model's config keeps
    its own activation if that has exact zeros.
    """

    hidden_act: str = "relu"
    sparsity_l1_coeff: float = 0.0
    sparsity_gated_mlp: bool = True
    sparsity_activation: str = "relu"
    sparsity_layer_sizes: list[int] | None = None
    sparsity_new_intermediate_size: int | None = None

    # The Trainer passes every other output of a model to its metrics.
    keys_to_ignore_at_inference: ClassVar[list[str]] = [
        "past_key_values",
        "ce_loss",
        "l1_loss",
        "l1",
        "l0",
        "firing",
    ]

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self._check_sparsity()
        if self.sparsity_new_intermediate_size is not None and self.sparsity_new_intermediate_size > 0:
            self.intermediate_size = self.sparsity_new_intermediate_size
        activation = Activation.parse(self.sparsity_activation)
        activation.check_gated(self.sparsity_gated_mlp)
        self.sparsity_activation = activation.spec
        stock_name = _STOCK_ACTIVATION[activation.name]
        if EXACT_ZEROS.get(self.hidden_act, "relu") not in ("relu", stock_name):
            reject("hidden_act", repr(self.hidden_act), f"{stock_name!r}, as sparsity_activation has it")
        if self.hidden_act != stock_name:
            _log.info(
                "twell: hidden_act %r of a %s config is read as %r: sparsity_activation decides",
                self.hidden_act,
                self.model_type,
                stock_name,
            )
            self.hidden_act = stock_name
        self.neurons_per_layer()
        # The stock class validates in its `__init__`, which a subclass replaces.
        self.validate()

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """transformers' `from_dict`; checks `sparsity_*` in kwargs as the constructor does."""
        names = [name for name in kwargs if name.startswith("sparsity_") or name == "hidden_act"]
        own = {name: kwargs.pop(name) for name in names}
        fields = config_dict | own
        is_stock = fields.get("model_type", cls.model_type) != cls.model_type
        if "sparsity_activation" in own and "hidden_act" not in own:
            fields.pop("hidden_act", None)
        elif "hidden_act" in own and "sparsity_activation" not in own:
            fields["sparsity_activation"] = _activation_of_stock(own["hidden_act"])
        elif is_stock and "sparsity_activation" not in fields:
            fields["sparsity_activation"] = _activation_of_stock(fields.get("hidden_act", "silu"))
        return super().from_dict(fields, **kwargs)

    def _check_sparsity(self) -> None:
        coefficient = self.sparsity_l1_coeff
        is_number = isinstance(coefficient, (int, float)) and not isinstance(coefficient, bool)
        if not is_number or not 0 <= coefficient < math.inf:
            reject("sparsity_l1_coeff", repr(coefficient), "a finite number >= 0")
        if not isinstance(self.sparsity_gated_mlp, bool):
            reject("sparsity_gated_mlp", repr(self.sparsity_gated_mlp), "True | False")
        size = self.sparsity_new_intermediate_size
        if size is not None and (not isinstance(size, int) or isinstance(size, bool)):
            reject("sparsity_new_intermediate_size", repr(size), "an integer or None")

    def neurons_per_layer(self) -> list[int]:
        """H of every layer's feed-forward block."""
        layers, sizes = self.num_hidden_layers, self.sparsity_layer_sizes
        if sizes is None:
            return [self.intermediate_size] * layers
        if not isinstance(sizes, (list, tuple)) or len(sizes) != layers:
            reject("sparsity_layer_sizes", repr(sizes), f"a list of {layers} integers, one for each layer")
        for size in sizes:
            require_positive_int("sparsity_layer_sizes", size)
        return list(sizes)


def _activation_of_stock(hidden_act: str) -> str:
    """The activation to use for a stock model's `hidden_act`."""
    if hidden_act not in EXACT_ZEROS:
        log_once(
            f"a stock model with hidden_act {hidden_act!r} is loaded with 'relu': its output changes until "
            "it is trained further; use twell.hf.relufy to convert on purpose"
        )
    return EXACT_ZEROS.get(hidden_act, "relu")


class SparseLlamaConfig(SparsityConfig, LlamaConfig):
    """`LlamaConfig` with the fields of `SparsityConfig`; keyword arguments only."""

    model_type = "llama_sparse_relu"


class SparseQwen2Config(SparsityConfig, Qwen2Config):
    """`Qwen2Config` with the fields of `SparsityConfig`; keyword arguments only."""

    model_type = "qwen2_sparse_relu"
