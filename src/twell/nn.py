"""`SparseMLP`: the feed-forward block as a module with Hugging Face Llama's parameter names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ._errors import reject, require_positive_int
from ._log import log_once
from .activations import Activation
from .block_table import block_html
from .functional import FfnStats, run_ffn, stats_of
from .kernels.dense import statistics_of
from .layer_state import LayerState
from .low_rank import Adapted, LowRank
from .plan import Plan
from .prepared import call_mode
from .problem import FfnOutput
from .projections import Projection, is_lora


class SparseMLP(nn.Module):
    """A gated or plain feed-forward block that skips inactive neurons.

    Parameters are named and shaped as in Hugging Face Llama: `gate_proj.weight` [H, D],
    `up_proj.weight` [H, D], `down_proj.weight` [D, H] (and `.bias` where asked for), so state dicts go
    both ways. Inside, `down_proj.weight` is stored neuron by neuron (its transpose is contiguous), which
    is what sparse execution reads; a state dict always holds it as a stock contiguous tensor.

    hidden_size, intermediate_size:  D and H.
    gated:        act(gate) * up if True, act(up) if False.
    activation:   "relu", "relu2", "fatrelu(THRESHOLD)", "drelu" or a `twell.Activation`; drelu, which is
                  relu(gate) * relu(up), for gated blocks only.
    bias:         biases on all projections; gate_bias, up_bias and down_bias override it one by one.
    plan:         how to execute; None decides by itself.
    record:       keep `last_stats` (L1, L0, firing counts) of every forward; may be changed any time.
                  Under reentrant checkpointing its L1 carries no gradient; use_reentrant=False keeps it.
    neuron_major: store `down_proj.weight` as described. False keeps stock strides, which sparse paths
                  read more slowly but FSDP2 and other tools that want contiguous parameters accept.
    eager:        where `torch.compile` meets the block in training mode, break the graph, so that an
                  automatic plan decides at every step; inside the graph it trains dense. Not for
                  fullgraph=True, nor where a compiler meets a checkpoint around the block: it would leave all
                  of that to eager mode. `twell.hf.compile_inside_checkpoints` compiles the other way round.

    Because of the layout `state_dict()["down_proj.weight"]` is a copy, not an alias of the parameter: change
    weights through the parameters or `load_state_dict`, not in place through a state dict.
    """

    _shift = 0.0  # subtracted before the activation
    _forward_outside: ClassVar[Callable[[SparseMLP, Tensor], Tensor] | None] = None

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        gated: bool = True,
        activation: str | Activation = "relu",
        bias: bool = False,
        gate_bias: bool | None = None,
        up_bias: bool | None = None,
        down_bias: bool | None = None,
        plan: Plan | None = None,
        record: bool = False,
        neuron_major: bool = True,
        eager: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        require_positive_int("hidden_size", hidden_size)
        require_positive_int("intermediate_size", intermediate_size)
        if plan is not None and not isinstance(plan, Plan):
            reject("plan", f"a {type(plan).__name__}", "a twell.Plan or None")
        if gate_bias and not gated:
            reject("gate_bias", gate_bias, "None or False for a non-gated block")

        def projection(inputs: int, outputs: int, biased: bool | None) -> nn.Linear:
            biased = bias if biased is None else biased
            return nn.Linear(inputs, outputs, bias=biased, device=device, dtype=dtype)

        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.activation = Activation.parse(activation)
        self.activation.check_gated(gated)
        self.plan = plan
        self.record = record
        self.neuron_major = neuron_major
        self.eager = eager
        self.last_stats: FfnStats | None = None
        self._layer: LayerState | None = None
        self._low_rank: LowRank | None = None
        self.gate_proj = projection(hidden_size, intermediate_size, gate_bias) if gated else None
        self.up_proj = projection(hidden_size, intermediate_size, up_bias)
        self.down_proj = projection(intermediate_size, hidden_size, down_bias)
        if neuron_major:
            _store_neuron_major(self.down_proj)
        self.register_load_state_dict_post_hook(_restore_layout)
        self.register_state_dict_post_hook(_export_layout)

    @property
    def gated(self) -> bool:
        return self.gate_proj is not None

    def selector_rows(self) -> tuple[nn.Module, int, int]:
        """(module, first, step): row first + step * n of its weight decides whether neuron n is active."""
        return (self.gate_proj if self.gated else self.up_proj), 0, 1

    @property
    def eager(self) -> bool:
        return self._eager

    @eager.setter
    def eager(self, eager: bool) -> None:
        self._eager = eager
        if eager and SparseMLP._forward_outside is None:  # here, since it imports the compiler (2 s)
            SparseMLP._forward_outside = torch.compiler.disable(
                SparseMLP._forward_between_graphs,
                reason="SparseMLP.eager is on; with fullgraph=True turn it off",
            )

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D]."""
        if torch.compiler.is_compiling():
            return self._forward_outside(x) if self._leaves_graph() else self._forward(x, compile_dense=False)
        layer = self._layer
        if layer is not None and type(x) is Tensor and not self.record:
            # With few tokens a step waits for the host: what was prepared for them is asked at once.
            mode = call_mode(record=False)
            prepared, weights = (
                layer.prepared.get((x.shape, mode) if mode else x.shape),
                self._plain_weights(),
            )
            if prepared is not None and weights is not None:
                output = prepared.run((x, *weights), self.activation, self.plan, layer)
                if output is not None:
                    if self.last_stats is not None:
                        self.last_stats = None
                    return output.y
        return self._forward(x, compile_dense=False)

    def _leaves_graph(self) -> bool:
        """Whether there is something to decide that a compiler cannot."""
        return (
            self._eager
            and self.training
            and torch.is_grad_enabled()
            and (self.plan is None or self.plan.path == "auto")
            and self._plain_weights() is not None
        )

    def _forward_between_graphs(self, x: Tensor) -> Tensor:
        return self._forward(x, compile_dense=True)

    def _forward(self, x: Tensor, compile_dense: bool) -> Tensor:
        weights = self._plain_weights()
        if weights is None:
            adapted = self._adapt(x)
            if isinstance(adapted, str):
                self._say_why_dense(adapted)
            else:
                y = self._forward_low_rank(x, adapted)
                if y is not None:
                    return y
            return self._forward_through_modules(x)
        if self._low_rank is not None and not torch.compiler.is_compiling():
            weights = self._without_rooms()
        if isinstance(x, Tensor) and x.dim() and x.shape[-1] != self.hidden_size:
            reject("x", f"shape {tuple(x.shape)}", f"[..., {self.hidden_size}], the block's hidden size")
        if isinstance(x, Tensor) and x.dtype != weights[0].dtype and not _is_autocast(x.device.type):
            reject("x", f"dtype {x.dtype}", f"{weights[0].dtype}, the block's")
        # Not while tracing: a compiler would guard on it.
        layer = None if torch.compiler.is_compiling() else self._own_layer()
        output = run_ffn((x, *weights), self.activation, self.plan, self.record, compile_dense, layer)
        if self.record and self.training and not torch.is_grad_enabled() and weights[0].requires_grad:
            self._say_that_l1_is_a_constant()
        return self._recorded(output, x)

    def _recorded(self, output: FfnOutput, x: Tensor) -> Tensor:
        """y of a call on x, whose statistics are kept if they were recorded."""
        if self.record:
            y, self.last_stats = stats_of(output, x)
            return y
        if self.last_stats is not None:
            self.last_stats = None
        return output.y

    def _adapt(self, x: Tensor) -> Adapted | str:
        """The block on x with peft's LoRA on its projections; or why their own forwards must run."""
        if torch.compiler.is_compiling():
            return "compiled with wrapped projections"
        projections = self._projections()
        if not any(projection is not None and is_lora(projection.module) for projection in projections):
            return "a projection is not a plain nn.Linear (wrapped, parametrised, patched or hooked)"
        if not self.neuron_major:
            return "adapters need weights laid out by neuron, and neuron_major is False"
        if self._low_rank is None:
            self._low_rank = LowRank()
        return self._low_rank.prepare(x, *projections, self._shift)

    def _forward_low_rank(self, x: Tensor, adapted: Adapted) -> Tensor | None:
        """None for a training step that was decided dense: the widened block would compute gradients of all
        weights there, where the projections' own forwards compute the adapters' alone."""
        plan = self.activation, self.plan, self.record
        output = run_ffn(adapted.tensors, *plan, layer=self._own_layer(), train_dense=False)
        return None if output is None else adapted.finish(self._recorded(output, x))

    def _without_rooms(self) -> tuple[Tensor | None, ...]:
        """The plain weights, once adapters are gone."""
        self._low_rank.release(*self._projections())
        self._low_rank = None
        return self._plain_weights()

    def _projections(self) -> tuple[Projection | None, Projection, Projection]:
        """gate, up and down."""
        gate = None if self.gate_proj is None else Projection(self.gate_proj)
        return gate, Projection(self.up_proj), Projection(self.down_proj)

    def _plain_weights(self) -> tuple[Tensor | None, ...] | None:
        """up, down, gate, up_bias, down_bias, gate_bias; None once a projection was wrapped, parametrised,
        patched or hooked: its own forward must then run."""
        weights, biases, modules = [], [], self._modules
        for name in ("up_proj", "down_proj", "gate_proj"):
            projection = modules.get(name)  # no gate_proj if not gated
            if projection is None:
                weights.append(None)
                biases.append(None)
                continue
            # As attributes, which take as long to find as few tokens take a GPU.
            state = projection.__dict__
            if (
                type(projection) is not nn.Linear
                or state["_forward_hooks"]
                or state["_forward_pre_hooks"]
                or state["_backward_hooks"]
                or state["_backward_pre_hooks"]
                or "forward" in state
            ):
                return None
            parameters = state["_parameters"]
            if "weight" in parameters and "bias" in parameters:
                weights.append(parameters["weight"])
                biases.append(parameters["bias"])
            else:  # a replica, or FSDP1: plain tensors in place of parameters
                weights.append(projection.weight)
                biases.append(projection.bias)
        return *weights, *biases

    def _own_layer(self) -> LayerState:
        if self._layer is None:
            self._layer = LayerState()
        return self._layer

    @staticmethod
    def _say_that_l1_is_a_constant() -> None:
        if not torch.compiler.is_compiling():
            log_once(
                "the L1 of a SparseMLP in training mode was recorded without gradients: under no_grad, or in "
                "a reentrant checkpoint, where a penalty has no effect (use_reentrant=False keeps it)"
            )

    def _say_why_dense(self, reason: str) -> None:
        if not torch.compiler.is_compiling():
            log_once(f"running dense: {reason}, so its own forward is called")
            self._own_layer().note("forward", "dense", reason)

    def _forward_through_modules(self, x: Tensor) -> Tensor:
        up = self.up_proj(x)
        activated = self.activation(self.gate_proj(x) if self.gated else up)
        hidden = activated * self.activation.factor(up) if self.gated else activated
        if self.record:
            self.last_stats = stats_of(FfnOutput(hidden, *statistics_of(activated, hidden)), x)[1]
        return self.down_proj(hidden)

    def extra_repr(self) -> str:
        kind = "gated" if self.gated else "non-gated"
        plan = "" if self.plan is None else f", plan={self.plan}"
        return f"{kind}, activation={self.activation.spec}{plan}"

    def _repr_html_(self) -> str:
        """In a notebook."""
        return block_html(self)

    def __getstate__(self) -> dict[str, Any]:
        # The statistics may hang on an autograd graph, which neither copies nor pickles; a copy is a layer of
        # its own.
        return {**super().__getstate__(), "last_stats": None, "_layer": None, "_low_rank": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("_layer", None)  # pickled by an earlier version
        self.__dict__.setdefault("_low_rank", None)
        self.eager = state.get("_eager", False)  # in a new process, too


def _is_autocast(device: str) -> bool:
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def _store_neuron_major(down: nn.Linear) -> None:
    """Lay `down.weight` [D, H] out so that its transpose is contiguous; the shape stays."""
    weight = down.weight
    if not weight.mT.is_contiguous():
        # Through .data: optimisers and tied modules keep holding the same Parameter.
        weight.data = weight.data.mT.contiguous().mT


def _restore_layout(module: SparseMLP, incompatible_keys: Any) -> None:
    module._layer = None  # other weights are another layer
    # load_state_dict(assign=True) puts the stock tensor in the parameter's place.
    if module.neuron_major and type(module.down_proj) is nn.Linear:
        _store_neuron_major(module.down_proj)


def _export_layout(
    module: SparseMLP, state: dict[str, Any], prefix: str, local_metadata: dict[str, Any]
) -> None:
    # Weights sit deeper once projections are wrapped, so look at all that is below; `gate_proj` and `up_proj`
    # are not contiguous while adapters have room next to them.
    for key in [key for key in state if key.startswith(prefix)]:
        value = state[key]
        # With keep_vars=True the caller wants the parameter object itself.
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            state[key] = value.contiguous()
