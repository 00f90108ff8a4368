"""Sparse feed-forward blocks inside vLLM, on its attention, scheduler, paged cache and tensor parallelism.

vLLM finds `register` through the entry point group `vllm.general_plugins` and calls it in each of its
processes: `vllm serve FOLDER` needs nothing else. It then runs these architectures with `SparseBlock`s:

    SparseLlamaForCausalLM, SparseQwen2ForCausalLM    ours
    LlamaForCausalLM, Qwen2ForCausalLM                stock models whose activation has exact zeros; any other
                                                      stays vLLM's own, block by block
"""

from __future__ import annotations

import importlib.util

from .._errors import missing_extra

if importlib.util.find_spec("vllm") is None:
    raise missing_extra("twell.vllm needs vllm", "vllm")

__all__ = ["ARCHITECTURES", "register"]

ARCHITECTURES = {
    "SparseLlamaForCausalLM": "Llama",
    "LlamaForCausalLM": "Llama",
    "SparseQwen2ForCausalLM": "Qwen2",
    "Qwen2ForCausalLM": "Qwen2",
}
"""Name in a checkpoint's config -> class in `twell.vllm.models`."""


def register() -> None:
    """Register configs with transformers and models with vLLM; calling it again changes nothing."""
    from vllm import ModelRegistry

    from .. import hf as _hf  # noqa: F401 - registers the configs

    for architecture, name in ARCHITECTURES.items():
        # By name: importing the models here would initialise CUDA in processes that fork later.
        ModelRegistry.register_model(architecture, f"{__name__}.models:{name}")
