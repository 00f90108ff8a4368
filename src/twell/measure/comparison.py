"""Whether the contenders of a training step compute the same thing: each one's own model, as it is timed.

Hidden states of the whole model show what is grossly wrong in any contender; in 16 bits they round too much
to show more. Blocks, one by one, show the rest: outputs, gradients and the L1 term, against a wider dtype.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import reference
from .._errors import ran_out_of_memory
from .._log import Ran, recorded_paths
from ..nn import SparseMLP
from .contest import Contender, Setting, doubt, sparse_share
from .models import ModelPair, decoder_layers, free_bytes
from .processes import NOTE

_DOUBTFUL, _ROUNDED = 3.0, 1e-5  # errors beyond so many times dense PyTorch's, and this, are no rounding
_SEQUENCES = 2  # whose hidden states are compared
_NEAR = 8  # units of rounding next to a threshold

Errors = dict[str, float]


def compare_steps(
    pair: ModelPair,
    steps: dict[str, Any],
    running: list[Contender],
    ids: Tensor,
    setting: Setting,
    *,
    precision: str,
) -> None:
    """Note errors in the details of `running`, and doubt what is no rounding.

    steps:  by contender, its `Step`; "dense-eager" among them, also if it does not run.
    """
    alive = [one for one in running if one.failure is None]
    comparison = _Comparison(pair, steps, alive, ids, setting, precision)
    for what, compare in (("hidden states", comparison.of_hidden), ("blocks", comparison.of_blocks)):
        try:
            compare()
        except RuntimeError as error:
            if not ran_out_of_memory(error):
                raise
            setting.say(f"{NOTE}{what} are not compared: that does not fit")
        setting.release()


@dataclass(frozen=True)
class _Comparison:
    pair: ModelPair
    steps: dict[str, Any]
    alive: list[Contender]
    ids: Tensor
    setting: Setting
    precision: str

    @property
    def _wider(self) -> torch.dtype:
        return torch.float64 if self.precision == "float32" else torch.float32

    @property
    def _autocast(self) -> bool:
        return self.precision == "mixed"

    def of_hidden(self) -> None:
        """The last hidden states of every contender."""
        dense, free = self.pair.dense, free_bytes(self.setting.device)
        if free is not None and free < 1.5 * self._wider.itemsize * sum(
            p.numel() for p in dense.parameters()
        ):
            self.setting.say(f"{NOTE}hidden states are not compared: a wider model does not fit")
            return
        with torch.no_grad():
            wide = copy.deepcopy(dense).to(self._wider)
            exact = wide.model(self.ids[:_SEQUENCES], use_cache=False).last_hidden_state
        del wide
        self.setting.release()

        def error_of(name: str) -> float:
            return reference.relative_error(self.steps[name].hidden_states()[:_SEQUENCES], exact)

        most = max(_DOUBTFUL * error_of("dense-eager"), _ROUNDED)
        for one in self.alive:
            one.error = one.details["hidden_error"] = error_of(one.name)
            doubt(one, "hidden states", one.error, most, self.setting)

    def of_blocks(self) -> None:
        """Of contenders whose blocks are ours; compiled dense ones have theirs inside of graphs."""
        dense = decoder_layers(self.pair.dense)
        places = sorted({0, len(dense) // 2, len(dense) - 1})
        blocks = {
            one.name: [decoder_layers(self.steps[one.name].model)[place].mlp for place in places]
            for one in self.alive
        }
        blocks = {name: found for name, found in blocks.items() if isinstance(found[0], SparseMLP)}
        errors: dict[str, Errors] = {name: {} for name in ("dense-eager", *blocks)}
        ran: dict[str, list[Ran]] = {name: [] for name in blocks}
        for number, given in enumerate(_inputs(self.pair.dense, places, self.ids, self._autocast)):
            stock = dense[places[number]].mlp
            wide, x = self._widened(stock, given)
            grad_y, weight = _gradients(wide, x.to(self._wider))
            exact = _computed(_written_out(wide), wide, x.to(self._wider), grad_y, weight)
            found = _computed(_written_out(stock), stock, x, grad_y, weight, self._autocast)
            _note(errors["dense-eager"], found, exact)
            for name, own in blocks.items():
                block = own[number]
                with _recording(block), recorded_paths() as pieces:
                    found = _computed(_ours(block), block, x, grad_y, weight, self._autocast)
                ran[name] += pieces
                _note(errors[name], found, exact)
            del exact, found
            self.setting.release()
        for one in self.alive:
            if one.name in errors:
                worst = _largest(errors[one.name].values())
                if math.isfinite(worst):  # records hold numbers
                    one.details["block_error"] = worst
            if ran.get(one.name):
                one.details["compared_sparse_share"] = sparse_share(ran[one.name])
            if one.name in blocks:
                self._doubt_blocks(one, errors[one.name], errors["dense-eager"])

    def _widened(self, stock: nn.Module, x: Tensor) -> tuple[nn.Module, Tensor]:
        """A dense block in the wider dtype, and the input for all contenders."""
        wide = copy.deepcopy(stock)
        if self._autocast:  # which rounds both before it multiplies
            wide, x = wide.to(torch.bfloat16), x.to(torch.bfloat16).to(x.dtype)
        wide = wide.to(self._wider)
        return wide, clear_of_thresholds(wide, x) if self.precision == "float32" else x

    def _doubt_blocks(self, one: Contender, errors: Errors, stock: Errors) -> None:
        for name, error in errors.items():
            most = max(_DOUBTFUL * stock[name], _ROUNDED)
            if name == "l1" and self.precision != "float32":
                most = max(most, torch.finfo(torch.bfloat16).eps)  # one number: stock's may be right by luck
            if not error <= most:
                doubt(one, f"blocks ({name})", error, most, self.setting)
                return


def _note(errors: Errors, found: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    for name, value in exact.items():
        error = reference.relative_error(found[name], value)
        errors[name] = _largest((errors.get(name, 0.0), error))


def _largest(values: Any) -> float:
    return torch.tensor(list(values), dtype=torch.float64).max().item()  # NaN wins


@torch.no_grad()
def _inputs(model: nn.Module, places: list[int], ids: Tensor, autocast: bool) -> list[Tensor]:
    """What the blocks of some layers get."""
    found: list[Tensor] = []
    layers = decoder_layers(model)
    hooks = [layers[i].mlp.register_forward_pre_hook(lambda _, args: found.append(args[0])) for i in places]
    try:
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=autocast):
            model.model(ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return found


@torch.no_grad()
def clear_of_thresholds(block: nn.Module, x: Tensor) -> Tensor:
    """x [..., D], with tokens that are next to a threshold of `block`, a wide one, replaced by another token.

    Two ways to round may disagree on whether a neuron fires there, or on the sign of its value, and its
    gradient is then there or not. In 16 bits that is so for every token, and for dense PyTorch too.
    """
    tokens = x.reshape(-1, x.shape[-1])
    wide = tokens.to(block.up_proj.weight.dtype)

    def near(projection: nn.Module) -> Tensor:
        size = wide.norm(dim=-1, keepdim=True) * projection.weight.norm(dim=1)
        return projection(wide).abs() <= _NEAR * torch.finfo(x.dtype).eps * size

    selector = getattr(block, "gate_proj", None) or block.up_proj
    unclear = (near(selector) | (near(block.up_proj) & (selector(wide) > 0))).any(-1)
    if unclear.all():
        return x
    other = tokens[~unclear][0]
    return torch.where(unclear[:, None], other, tokens).view(x.shape)


@torch.no_grad()
def _gradients(block: nn.Module, x: Tensor) -> tuple[Tensor, float]:
    """Gradients of the output and of the L1 term that change a hidden value by about as much."""
    generator = torch.Generator("cpu").manual_seed(0)
    tokens = x[..., 0].numel()
    features = torch.randn(x.shape[-1], generator=generator).to(x)
    grad_y = features * torch.linspace(0.5, 1.5, tokens).view(*x.shape[:-1], 1).to(x)
    of_hidden = block.down_proj.weight.mT @ features
    return grad_y, tokens * of_hidden.abs().mean().item()


Run = Callable[[Tensor], tuple[Tensor, Tensor]]


def _written_out(block: nn.Module) -> Run:
    """Output and L1 term of a dense block, in plain PyTorch."""

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        if hasattr(block, "hidden"):
            hidden = block.hidden(x)
        else:
            hidden = block.act_fn(block.gate_proj(x)) * block.up_proj(x)
        return block.down_proj(hidden), hidden.abs().float().sum(-1).mean()

    return run


def _ours(block: SparseMLP) -> Run:
    return lambda x: (block(x), block.last_stats.l1)


@contextmanager
def _recording(block: SparseMLP) -> Iterator[None]:
    """As in a timed step, which has the L1 term and statistics."""
    before = block.record
    block.record = True
    try:
        yield
    finally:
        block.record, block.last_stats = before, None


def _computed(
    run: Run, block: nn.Module, x: Tensor, grad_y: Tensor, l1_weight: float, autocast: bool = False
) -> dict[str, Tensor]:
    """Output, L1 term and gradients of a block."""
    weights = dict(block.named_parameters())
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
            y, l1 = run(x)
        grads = torch.autograd.grad([y, l1], [x, *weights.values()], [grad_y.to(y), l1.new_tensor(l1_weight)])
    return {"y": y.detach(), "l1": l1.detach(), "x": grads[0], **dict(zip(weights, grads[1:], strict=True))}
