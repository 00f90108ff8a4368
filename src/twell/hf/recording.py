"""Records the sparsity of a causal language model, and adds its L1 term to the loss."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .._errors import reject
from .._log import log_once
from ..functional import FfnStats
from ..nn import SparseMLP
from ..sparsify.blocks import dropouts_inside
from .layers import sparse_mlps

_NOT_A_LABEL = -100
# Training searches this many masks for padding. Padded batches show it in the first one or two.
_FIRST_MASKS = 4


@dataclass
class SparseCausalLMOutput(CausalLMOutputWithPast):
    """transformers' output, and the sparsity of the call where it was recorded (else None).

    loss:     []                 ce_loss + l1_weight * l1_loss in training mode, ce_loss in eval mode; with
                                 `labels` only.
    ce_loss:  []                 the stock loss; with `labels` only.
    l1:       [layers]           mean over tokens of sum |hidden|; differentiable.
    l1_loss:  []                 mean of l1 over layers.
    l0:       [layers]           active neurons per token.
    firing:   int64 [H], a tuple over layers: for how many tokens each neuron was active.

    l1, l0 and firing count padding tokens like any others.
    """

    ce_loss: Tensor | None = None
    l1_loss: Tensor | None = None
    l1: Tensor | None = None
    l0: Tensor | None = None
    firing: tuple[Tensor, ...] | None = None


class RecordsSparsity:
    """For causal language models; comes before the stock class among their bases."""

    def start_recording(self, l1_weight: float) -> None:
        self.l1_weight = l1_weight
        self._masks_to_look_at = _FIRST_MASKS
        self._recording = False  # whether the last forward recorded statistics

    @property
    def l1_weight(self) -> float:
        """Weight of the L1 term. It may change every step: compiled code does not recompile."""
        return self._l1_weight.item()

    @l1_weight.setter
    def l1_weight(self, weight: float) -> None:
        if not 0 <= weight < math.inf:
            reject("l1_weight", repr(weight), "a finite number >= 0")
        if "_l1_weight" in self.__dict__:
            self._l1_weight.fill_(weight)  # in place: wrappers may run a shallow copy of the model
        else:
            # A tensor: a compiler treats a float as a constant. float64 keeps the value as given.
            with torch.inference_mode(False):  # an inference tensor could not be changed later
                self._l1_weight = torch.tensor(weight, dtype=torch.float64, device="cpu")

    def recorded_blocks(self) -> list[SparseMLP]:
        """The blocks whose sparsity counts, first layer first."""
        return sparse_mlps(self)

    def forward_recorded(
        self, stock_forward: Callable[..., Any], record_sparsity: bool, **arguments: Any
    ) -> SparseCausalLMOutput:
        """The stock forward on `arguments`, with the L1 term in the training loss and the sparsity."""
        labels = arguments.get("labels")
        if self.training and labels is not None:
            self._warn_of_padding(arguments.get("attention_mask"))
            if arguments.get("use_cache") is None:
                arguments["use_cache"] = (
                    False  # nobody reads it, and each compiled layer would be guarded on it
                )
        record = self.training or labels is not None or record_sparsity
        # Generation skips this: visiting every block takes as long as a layer takes for one token.
        mlps = self.recorded_blocks() if record or self._recording else []
        for mlp in mlps:
            # Stays on until the next call: a checkpointed backward runs the block once more, the same way.
            if mlp.record != record:
                mlp.record = record
        self._recording = record
        stock = stock_forward(return_dict=True, **arguments)
        output = SparseCausalLMOutput(
            loss=stock.loss,
            logits=stock.logits,
            past_key_values=stock.get("past_key_values"),
            hidden_states=stock.get("hidden_states"),
            attentions=stock.get("attentions"),
        )
        if not record:
            return output
        output.ce_loss = stock.loss
        stats = _take_stats(mlps)
        missing = sum(layer is None for layer in stats)
        if missing or not stats:
            if labels is not None and self.training and self.l1_weight > 0:
                self._reject_missing(missing, len(stats))
            return output
        self._check_l1_gradient(mlps, stats)
        device = stock.logits.device  # layers may be spread over devices
        output.l1 = torch.stack([layer.l1.to(device) for layer in stats])
        output.l1_loss = output.l1.mean()
        output.l0 = torch.stack([layer.l0.to(device) for layer in stats])
        output.firing = tuple(layer.firing for layer in stats)
        if labels is not None and self.training:
            # A copy: the next step's weight may be set before this one's backward.
            weight = self._l1_weight.to(output.l1_loss.dtype, copy=True)
            num_items = arguments.get("num_items_in_batch")
            if num_items is not None:
                shifted = arguments.get("shift_labels")
                shifted = labels[..., 1:] if shifted is None else shifted
                weight = weight * _share_of(shifted, num_items, arguments).to(output.l1_loss)
            output.loss = stock.loss + weight * output.l1_loss
        return output

    def _reject_missing(self, missing: int, blocks: int) -> None:
        if not blocks:
            reject("model", "no sparse block, for the L1 term", "one after twell.sparsify_; or l1_weight = 0")
        found = f"{missing} of {blocks} blocks that ran their stock forward"
        dropouts = dropouts_inside(self)
        if dropouts:
            name, value = dropouts[0]
            number = f"dropout {name} = {value:g}" + (f" and {len(dropouts) - 1} more" * (len(dropouts) > 1))
            reject("model", f"{found}: {number}", "dropouts of 0 inside the blocks; or l1_weight = 0")
        reject(
            "model",
            found,
            "blocks that record their sparsity, without hooks or wrapped projections (twell.explain says "
            "why); or l1_weight = 0",
        )

    def _warn_of_padding(self, attention_mask: Any) -> None:
        """Search the first readable masks for padding. Few, since reading one on a GPU waits for it."""
        if torch.compiler.is_compiling() or not self._masks_to_look_at or not _is_readable(attention_mask):
            return
        self._masks_to_look_at -= 1
        if not attention_mask.all():
            self._masks_to_look_at = 0
            log_once(
                "training on padding: the attention mask has zeros, but the L1 term and the statistics (l1, "
                "l0, firing) count padding tokens like others; pack sequences, or group them by length"
            )

    def _check_l1_gradient(self, mlps: list[SparseMLP], stats: list[FfnStats]) -> None:
        if torch.compiler.is_compiling() or not (self.training and torch.is_grad_enabled()):
            return
        lost = any(
            mlp.up_proj.weight.requires_grad and not layer.l1.requires_grad
            for mlp, layer in zip(mlps, stats, strict=True)
        )
        if lost and self.l1_weight > 0:
            reject(
                "use_reentrant",
                "True: gradient checkpointing loses the gradient of the L1 term",
                "gradient_checkpointing_kwargs={'use_reentrant': False}, or l1_weight = 0",
            )


def _is_readable(mask: Any) -> bool:
    """Whether `mask` is a padding mask [batch, tokens] that the host may read now."""
    return (
        type(mask) is Tensor
        and mask.dim() == 2
        and not mask.is_meta
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._are_functorch_transforms_active()
        and not torch.jit.is_tracing()
        and not (mask.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def _take_stats(mlps: list[SparseMLP]) -> list[FfnStats | None]:
    """The statistics of a forward, None of a block that ran its stock code. The blocks release them and the
    graph behind them."""
    stats = [mlp.last_stats for mlp in mlps]
    for mlp in mlps:
        mlp.last_stats = None
    return stats


def _share_of(shifted_labels: Tensor, num_items: Tensor | int, loss_options: dict[str, Any]) -> Tensor:
    """This micro-batch's share of a step's label tokens, counted as the stock loss does."""
    here = (shifted_labels != loss_options.get("ignore_index", _NOT_A_LABEL)).sum().to(torch.float32)
    return here / (num_items.to(here.device) if isinstance(num_items, Tensor) else num_items)


def record_sparsity_of(model: PreTrainedModel, l1_weight: float) -> None:
    """Give a stock causal language model with sparse blocks the L1 term and the outputs of ours.

    Its class becomes a subclass with the same name, so that it saves and loads as stock.
    """
    model.__class__ = _recording_class(type(model))
    model.start_recording(l1_weight)


@cache
def _recording_class(stock: type[PreTrainedModel]) -> type[PreTrainedModel]:
    def reduce(self: PreTrainedModel, protocol: int) -> tuple:
        return _rebuild, (stock,), self.__getstate__()

    names = {"__module__": stock.__module__, "__qualname__": stock.__qualname__, "__doc__": stock.__doc__}
    more = {"forward": _recorded_forward(stock), "__reduce_ex__": reduce}
    return type(stock.__name__, (RecordsSparsity, stock), {**names, **more})


def _rebuild(stock: type[PreTrainedModel]) -> PreTrainedModel:
    recording = _recording_class(stock)
    return recording.__new__(recording)


def _recorded_forward(stock: type[PreTrainedModel]) -> Callable[..., Any]:
    positional = list(inspect.signature(stock.forward).parameters)[1:]

    @wraps(stock.forward)  # generation and the Trainer look at its parameters
    def forward(self: Any, *inputs: Any, record_sparsity: bool = False, **named: Any) -> Any:
        arguments = {**dict(zip(positional, inputs, strict=False)), **named}
        as_tuple = arguments.pop("return_dict", None) is False
        output = self.forward_recorded(partial(stock.forward, self), record_sparsity, **arguments)
        return output.to_tuple() if as_tuple else output

    return forward
