"""The feed-forward block inside vLLM: its parallel linear layers hold the weights, `ffn` multiplies.

Every rank has a part of the neurons and is sparse on its own part; the ranks' outputs are then summed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedConfig
from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_reduce
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization import QuantizationConfig

from .._errors import reject
from .._log import log_once
from ..activations import Activation
from ..functional import ffn
from ..hf.config import EXACT_ZEROS, SparsityConfig
from ..kernels.gpu.sizes import WEIGHT_STEP
from ..layer_state import layer_of


class BlockConfig(NamedTuple):
    """The blocks of a model.

    sizes:  neurons of every layer.
    """

    sizes: list[int]
    gated: bool
    activation: Activation
    bias: bool

    @staticmethod
    def of(config: PreTrainedConfig) -> BlockConfig | None:
        """None for a stock model whose activation has no exact zeros."""
        bias = getattr(config, "mlp_bias", False)
        if isinstance(config, SparsityConfig):
            activation = Activation.parse(config.sparsity_activation)
            return BlockConfig(config.neurons_per_layer(), config.sparsity_gated_mlp, activation, bias)
        activation = EXACT_ZEROS.get(getattr(config, "hidden_act", None))
        if activation is None:
            return None
        sizes = [config.intermediate_size] * config.num_hidden_layers
        return BlockConfig(sizes, True, Activation.parse(activation), bias)


class SparseBlock(nn.Module):
    """A feed-forward block of one rank; x [M, D] -> [M, D].

    neurons: H of the whole layer; every rank has as many.
    Quantised projections, and those with LoRA around them, run densely as vLLM runs them.
    """

    def __init__(
        self,
        hidden: int,
        neurons: int,
        blocks: BlockConfig,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        self.ranks = get_tensor_model_parallel_world_size()
        if neurons % (self.ranks * WEIGHT_STEP):
            reject(
                "tensor_parallel_size",
                f"{self.ranks} for the {neurons} neurons of {prefix}",
                f"a number of ranks that leaves each a multiple of {WEIGHT_STEP} neurons",
            )
        self.activation, self.neurons = blocks.activation, neurons // self.ranks
        options = {"bias": blocks.bias, "quant_config": quant_config}
        self.gate_up_proj = self.up_proj = None
        if blocks.gated:
            sizes = [neurons, neurons]
            name = f"{prefix}.gate_up_proj"
            self.gate_up_proj = MergedColumnParallelLinear(hidden, sizes, **options, prefix=name)
        else:
            self.up_proj = ColumnParallelLinear(hidden, neurons, **options, prefix=f"{prefix}.up_proj")
        self.down_proj = RowParallelLinear(neurons, hidden, **options, prefix=f"{prefix}.down_proj")
        for projection in (self._inputs, self.down_proj):
            projection._cpu_skip_gemm_dispatch = True  # else vLLM packs weights for CPUs, and drops them

    @property
    def _inputs(self) -> nn.Module:
        return self.up_proj if self.gate_up_proj is None else self.gate_up_proj

    def is_plain(self) -> bool:
        """Whether the projections hold weights as they are, and nothing is added to what they compute."""
        return _is_plain(self._inputs) and _is_plain(self.down_proj)

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_plain():
            return self._forward_dense(x)
        up, up_bias, gate, gate_bias = self._input_weights()
        down = self.down_proj
        y = ffn(
            x,
            up,
            down.weight.data,
            gate,
            activation=self.activation,
            up_bias=up_bias,
            gate_bias=gate_bias,
            # The sum over ranks must have it once.
            down_bias=None if down.bias is None or down.tp_rank else down.bias.data,
        )
        return tensor_model_parallel_all_reduce(y) if self.ranks > 1 else y

    def _input_weights(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """up, its bias, gate, its bias: plain tensors, views of the merged ones."""
        projection = self._inputs
        weight, bias = projection.weight.data, None if projection.bias is None else projection.bias.data
        if self.gate_up_proj is None:
            return weight, bias, None, None
        gate, up = weight[: self.neurons], weight[self.neurons :]
        if bias is None:
            return up, None, gate, None
        return up, bias[self.neurons :], gate, bias[: self.neurons]

    def _forward_dense(self, x: Tensor) -> Tensor:
        inputs, _ = self._inputs(x)
        if self.gate_up_proj is None:
            hidden = self.activation(inputs)
        else:
            gate, up = inputs.chunk(2, dim=-1)
            hidden = self.activation(gate) * up
        return self.down_proj(hidden)[0]

    def prepare(self, shares: Mapping[int, float]) -> None:
        """Lay `down` out neuron by neuron, which sparse kernels read, once its weights are loaded.

        shares:  of active neurons, by number of tokens. Graphs are captured on made-up input, whose share
                 says nothing, so nothing is read where these are empty.
        """
        if not self.is_plain():
            log_once("running dense: quantised blocks in vLLM, so vLLM's own products are called")
            return
        weight = self.down_proj.weight
        weight.data = weight.data.mT.contiguous().mT
        up, _, gate, _ = self._input_weights()
        layer_of(up if gate is None else gate).expect(shares)


def _is_plain(projection: nn.Module) -> bool:
    return isinstance(projection, LinearBase) and isinstance(projection.quant_method, UnquantizedLinearMethod)
