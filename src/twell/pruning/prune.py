"""`prune_` and its report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .._errors import reject, require_positive_int
from ..nn import SparseMLP
from ..sparsify.blocks import named_blocks
from .firing import Firing, checked_firing, firing_on
from .projections import Changes, Cut, check_blocks
from .selection import firing_neurons, most_firing, rounded_size
from .stored_sizes import StoredModel, stored_models

_SHARES = "twell_sparsity"  # of active neurons, as `twell.shares` keeps them: of fewer, they are others


@dataclass(frozen=True)
class PrunedBlock:
    """A block before and after.

    block:         its name in the model.
    before, after: neurons.
    never_fired:   of those before.
    """

    block: str
    before: int
    after: int
    never_fired: int


@dataclass(frozen=True)
class PruneReport:
    """What `prune_` removed. Prints as a table.

    parameters_before, parameters_after: of the whole model, tied ones once.
    """

    blocks: tuple[PrunedBlock, ...]
    parameters_before: int
    parameters_after: int

    def __str__(self) -> str:
        rows = [("block", "neurons", "pruned to", "never fired")]
        rows += [
            (row.block or "(model)", f"{row.before:,}", f"{row.after:,}", f"{row.never_fired:,}")
            for row in self.blocks
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
            for row in rows
        ]
        share = self.parameters_after / self.parameters_before
        counts = f"{self.parameters_before:,} -> {self.parameters_after:,}"
        return "\n".join([*lines, f"parameters: {counts} ({share:.1%})"])


def prune_(
    model: nn.Module,
    firing: Firing | None = None,
    *,
    data: Iterable[Mapping[str, Any] | Tensor] | None = None,
    min_fires: int = 1,
) -> PruneReport:
    """Remove the neurons that never fired, or fired fewer than `min_fires` times, in place.

        print(twell.prune_(model, data=batches))
        model.save_pretrained("pruned")

    A neuron that does not fire adds nothing: with min_fires=1 the model computes the same on what was
    counted, except for rounding. On other text it may have fired, so count on enough of it.

    firing:     for how many tokens each neuron was active: int [H] by the names of blocks, or in their order
                (as `output.firing` of our models); or
    data:       batches to count on: dicts for model(**batch) or tensors for model(batch). They run without
                gradients and in eval mode.
    min_fires:  how often a neuron has to fire to stay.

    What stays is rounded up for the kernels, to a multiple of 8 and from 1,024 neurons on of 128; the rest
    that fired most fills it up. Neurons keep their order. Models of `twell.hf` and plain modules get a size
    for each block. Stock transformers classes have one size for all blocks: the largest that any needs. The
    config changes along, so that the model loads back.

    The weights are new parameters without gradients: make optimisers afterwards. ValueError, with nothing
    changed, where blocks share weights, where projections are wrapped, hooked, sharded or quantised, and
    where no field of a config holds the size.
    """
    if not isinstance(model, nn.Module):
        reject("model", f"a {type(model).__name__}", "a torch.nn.Module")
    require_positive_int("min_fires", min_fires)
    if (firing is None) == (data is None):
        reject("firing, data", "neither" if firing is None else "both", "one of the two")
    blocks = dict(named_blocks(model))
    if not blocks:
        reject("model", "no sparse block", "one with SparseMLPs, or a stock one after twell.sparsify_(model)")
    check_blocks(model, blocks)
    neurons = {name: block.intermediate_size for name, block in blocks.items()}
    counts = checked_firing(firing, neurons) if data is None else firing_on(model, data)
    kept = {name: firing_neurons(counts[name], min_fires) for name in blocks}
    sizes = {name: rounded_size(kept[name], neurons[name]) for name in blocks}
    before = _parameters(model)
    if sizes != neurons:
        _shrink(model, blocks, counts, sizes)
    return PruneReport(
        tuple(
            PrunedBlock(name, neurons[name], sizes[name], neurons[name] - firing_neurons(counts[name], 1))
            for name in blocks
        ),
        before,
        _parameters(model),
    )


def _shrink(
    model: nn.Module, blocks: dict[str, SparseMLP], counts: dict[str, Tensor], sizes: dict[str, int]
) -> None:
    """Cut every block to its size, and where a config has one size for several, `sizes` to the largest."""
    stored = stored_models(model, blocks)
    for group in (names for one in stored for names in one.groups()):
        sizes.update(dict.fromkeys(group, max(sizes[name] for name in group)))
    cuts = [
        Cut(name, model.get_submodule(name), block, most_firing(counts[name], sizes[name]))
        for name, block in blocks.items()
    ]
    _check(stored, cuts, sizes)
    changes = Changes()
    try:
        for cut in cuts:
            cut.apply(changes)
        for one in stored:
            one.apply(sizes, changes)
    except BaseException:
        changes.undo()
        raise
    for one in stored:
        one.config.__dict__.pop(_SHARES, None)


def _check(stored: list[StoredModel], cuts: list[Cut], sizes: dict[str, int]) -> None:
    planned = {parameter: shape for cut in cuts for parameter, shape in cut.shapes.items()}
    for one in stored:
        one.check(sizes, planned)


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
