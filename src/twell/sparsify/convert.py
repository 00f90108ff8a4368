"""`sparsify_` and `densify_`."""

from __future__ import annotations

import copy
from dataclasses import dataclass

from torch import nn

from .._errors import reject, require_positive_int
from .._html import table
from .._log import log_once
from .._text_table import aligned, terminal_width, together, wrapped
from ..plan import Plan
from .blocks import Carrier, install_carrier, install_own_forward, remove, twin_of
from .proof import is_probability
from .recognition import BlockFilter, Findings, Found, Skipped, find_blocks, places_besides
from .surroundings import Dropouts, Surroundings
from .twin import BlockTwin

_COLUMNS = ("blocks", "class", "projections", "activation", "D x H", "runs")
_NOTHING = "no feed-forward block found"


@dataclass(frozen=True)
class SparseBlockRow:
    """A block that runs on our kernels now.

    block:       its module's name in the model; of a block that is part of a layer, the layer's.
    projections: names of gate (if there is one), up and down in it.
    activation:  as `twell.Activation` spells it.
    hidden, neurons: D and H.
    """

    block: str
    kind: str
    projections: tuple[str, ...]
    activation: str
    hidden: int
    neurons: int


@dataclass(frozen=True)
class SparsifyReport:
    """What `sparsify_` found. Prints as a table.

    blocks:  those that run on our kernels now.
    skipped: modules that look like blocks and are none that we can run, with the reason and what to do.
    already: names of blocks that were sparse before.
    """

    blocks: tuple[SparseBlockRow, ...]
    skipped: tuple[Skipped, ...]
    already: tuple[str, ...] = ()

    def __str__(self) -> str:
        """As wide as the terminal; in full where the output is a file or a pipe."""
        return self.text(terminal_width())

    def text(self, width: int | None = None) -> str:
        """The table; one paragraph for each of its rows where it is wider than `width`."""
        if width is not None:
            require_positive_int("width", width)
        rows = self._rows()
        if not rows:
            return _NOTHING
        lines = aligned({title: cells for title, *cells in zip(_COLUMNS, *rows, strict=True)})
        if width is None or max(map(len, lines)) <= width:
            return "\n".join(lines)
        return "\n".join(
            f"{wrapped(blocks, width)}\n{wrapped(f'{_listed(*what)}: {runs}', width, '  ')}"
            for blocks, *what, runs in rows
        )

    def _repr_html_(self) -> str:
        """In a notebook."""
        rows = self._rows()
        return table(_COLUMNS, rows, left=range(len(_COLUMNS))) if rows else f"<p>{_NOTHING}</p>"

    def _rows(self) -> list[tuple[str, ...]]:
        """Blocks of a kind together."""
        groups: dict[tuple, list[str]] = {}
        for row in self.blocks:
            shape = f"{row.hidden} x {row.neurons}"
            key = (row.kind, ", ".join(row.projections), row.activation, shape, "sparse where it pays")
            groups.setdefault(key, []).append(row.block)
        for skipped in self.skipped:
            groups.setdefault((skipped.kind, "", "", "", f"skipped: {skipped}"), []).append(skipped.name)
        if self.already:
            groups["", "", "", "", "sparse before"] = list(self.already)
        return [(_counted(names), *key) for key, names in groups.items()]


def _counted(names: list[str]) -> str:
    if len(names) == 1:
        return names[0] or "(model)"
    few = together(names)
    return f"{len(names)}: {few if ', ' not in few else f'{names[0]} to {names[-1]}'}"


def _listed(*cells: str) -> str:
    return ", ".join(cell for cell in cells if cell)


def sparsify_(
    model: nn.Module, *, plan: Plan | None = None, filter_fn: BlockFilter | None = None
) -> SparsifyReport:
    """Run the feed-forward blocks of `model` on our kernels, in place and with the same results.

        model = AutoModelForCausalLM.from_pretrained("facebook/opt-1.3b", dtype="auto")
        print(twell.sparsify_(model))

    Blocks are recognised by what their code computes, not by names: gated or not, with ReLU, squared ReLU,
    fatrelu, a shifted ReLU or dReLU. Everything else stays stock, and so do parameters, names and keys:
    `save_pretrained`, optimisers, `torch.compile` and `generate` go on as before. Where a block cannot run on
    our kernels, because of hooks, a dropout in training or mixed dtypes, its stock forward runs. peft's LoRA,
    put on before or after, runs on our kernels too. Weights may be laid out otherwise in memory;
    `state_dict()` then has contiguous copies, so change weights through the parameters.

    plan:       how to run the blocks, also those that were sparsified before; None decides by itself.
    filter_fn:  called with a block's name and module; False leaves the block as it is.
    Returns what was found and what was skipped, and why. An error leaves the model as it was.
    """
    if not isinstance(model, nn.Module):
        reject("model", f"a {type(model).__name__}", "a torch.nn.Module")
    if plan is not None and not isinstance(plan, Plan):
        reject("plan", f"a {type(plan).__name__}", "a twell.Plan or None")
    if filter_fn is not None and not callable(filter_fn):
        reject("filter_fn", f"a {type(filter_fn).__name__}", "a function of a name and a module, or None")
    if any(parameter.is_meta for parameter in model.parameters()):
        reject("model", "parameters on the meta device", "a model whose weights are loaded")
    findings = find_blocks(model, filter_fn)
    if plan is not None:
        for name in findings.already:
            twin = twin_of(model.get_submodule(name))
            if twin is not None:
                twin.plan = plan
    installed: list[Found] = []
    try:
        for found in findings.blocks:
            installed.append(found)
            _install(found, plan)
    except BaseException:
        for found in installed:
            for module in found.owner.modules():
                remove(module)
        raise
    if not findings.blocks and not findings.already:
        log_once(
            f"sparsify_ found no block to run in {type(model).__name__}; print its report for the reasons"
        )
    return _report(findings)


def densify_(model: nn.Module) -> int:
    """Make every block stock again that `sparsify_` changed. Returns how many there were."""
    if not isinstance(model, nn.Module):
        reject("model", f"a {type(model).__name__}", "a torch.nn.Module")
    twins = {id(twin) for module in model.modules() if (twin := twin_of(module)) is not None}
    for module in list(model.modules()):
        remove(module)
    return len(twins)


def _install(found: Found, plan: Plan | None) -> None:
    twin = BlockTwin(found.proven.roles, found.proven.recognised, plan, found.proven.one_dtype)
    owner, split, always = found.owner, found.split, found.proven.random_in_training
    if split is None:
        others = places_besides(owner, found.proven.roles.modules)
        dropouts = [place.module for place in others if isinstance(place.module, nn.Dropout)]
        numbers = [name for name, value in vars(owner).items() if is_probability(name, value)]
        surroundings = Surroundings(owner, others, owner_settings=True)
        install_own_forward(owner, twin, Dropouts(owner, dropouts, numbers, always), surroundings)
        return
    activation = split.activation
    if activation is not None and found.shares_activation:
        activation.holder._modules[activation.name] = copy.copy(activation.module)
    watched = [place for place in (activation, *split.through) if place is not None]
    dropouts = Dropouts(owner, list(split.dropouts), list(split.numbers), always)
    surroundings = Surroundings(owner, watched, owner_settings=False)
    install_carrier(
        Carrier(twin, owner, dropouts, surroundings, split.first, split.last, activation, split.through)
    )


def _report(findings: Findings) -> SparsifyReport:
    return SparsifyReport(
        tuple(map(_row, findings.blocks)), tuple(findings.skipped), tuple(reversed(findings.already))
    )


def _row(found: Found) -> SparseBlockRow:
    roles = found.proven.roles
    neurons, hidden = roles.up.size
    names = {id(module): name for name, module in found.owner.named_modules()}
    return SparseBlockRow(
        found.name,
        type(found.owner).__name__,
        tuple(names[id(module)] for module in roles.modules),
        found.proven.recognised.spec,
        hidden,
        neurons,
    )
