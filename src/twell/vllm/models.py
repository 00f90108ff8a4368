"""vLLM's Llama and Qwen2 with `SparseBlock`s where the activation has exact zeros."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.logger import init_logger
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.utils import PPMissingLayer, WeightsMapper, maybe_prefix

from .._version import __version__
from ..hf.config import SparsityConfig
from ..hf.spellings import in_stock_spelling
from ..kernels.gpu.sizes import WEIGHT_STEP
from ..plan import ENVIRONMENT_VARIABLE
from ..shares import stored_shares
from .block import BlockConfig, SparseBlock

_log = init_logger("vllm.twell")  # vLLM shows its own loggers only


class _Sparse:
    """Comes before vLLM's class among the bases. A model without zeros is that class in all but name."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_config
        blocks = BlockConfig.of(config)
        if blocks is None:
            super().__init__(vllm_config=vllm_config, prefix=prefix)
            return
        with _silu_blocks(config, small=vllm_config.quant_config is None):
            super().__init__(vllm_config=vllm_config, prefix=prefix)
        for place, (layer, neurons) in enumerate(zip(self.model.layers, blocks.sizes, strict=True)):
            if not isinstance(layer, PPMissingLayer):
                name = maybe_prefix(prefix, f"model.layers.{place}.mlp")
                layer.mlp = SparseBlock(config.hidden_size, neurons, blocks, vllm_config.quant_config, name)
        if not blocks.gated:
            stacked = self.hf_to_vllm_mapper.orig_to_new_stacked
            attention = {
                name: place for name, place in stacked.items() if name not in (".gate_proj", ".up_proj")
            }
            self.model.hf_to_vllm_mapper = WeightsMapper(orig_to_new_stacked=attention)
            self.packed_modules_mapping = {
                name: parts for name, parts in self.packed_modules_mapping.items() if name != "gate_up_proj"
            }
        _distinguish_compiled_code(vllm_config)

    def _sparse_blocks(self) -> dict[int, SparseBlock]:
        """By layer; those of this rank's part of a pipeline."""
        blocks = {place: getattr(layer, "mlp", None) for place, layer in enumerate(self.model.layers)}
        return {place: block for place, block in blocks.items() if isinstance(block, SparseBlock)}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        if isinstance(self.config, SparsityConfig):
            weights = in_stock_spelling(weights, self.config)
        return super().load_weights(weights)

    def process_weights_after_loading(self) -> None:
        """vLLM calls it once all weights are in place."""
        blocks = self._sparse_blocks()
        if not blocks:
            return
        shares = stored_shares(self.config)
        for place, block in blocks.items():
            block.prepare(shares[place] if shares else {})
        known = "known from the checkpoint" if shares else "unknown; `twell explain --save` measures them"
        plan = os.environ.get(ENVIRONMENT_VARIABLE) or "auto"
        _log.info("twell: %d sparse blocks, plan %s, shares of active neurons %s", len(blocks), plan, known)


@contextmanager
def _silu_blocks(config: PreTrainedConfig, small: bool) -> Iterator[None]:
    """vLLM builds its own blocks meanwhile, soon replaced, which refuse other activations.

    small:  so that they take no memory; quantised ones may need to be large.
    """
    fields: dict[str, Any] = {"hidden_act": "silu"}
    if small:
        fields["intermediate_size"] = WEIGHT_STEP * get_tensor_model_parallel_world_size()
    before = {name: getattr(config, name) for name in fields}
    _set(config, fields)
    try:
        yield
    finally:
        _set(config, before)


def _set(config: PreTrainedConfig, fields: dict[str, Any]) -> None:
    for name, value in fields.items():
        setattr(config, name, value)


def _distinguish_compiled_code(vllm_config: VllmConfig) -> None:
    """Compiled code has our plan in it, which vLLM's cache of such code knows nothing of."""
    if isinstance(vllm_config.additional_config, dict):
        plan = os.environ.get(ENVIRONMENT_VARIABLE, "")
        vllm_config.additional_config["twell"] = {"version": __version__, "plan": plan}


class Llama(_Sparse, LlamaForCausalLM):
    """`LlamaForCausalLM` of vLLM."""


class Qwen2(_Sparse, Qwen2ForCausalLM):
    """`Qwen2ForCausalLM` of vLLM."""
