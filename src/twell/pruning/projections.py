"""Cuts the weights of a block down to some of its neurons."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from .._errors import reject
from ..nn import SparseMLP
from ..projections import is_bare_projection
from ..sparsify.proof import NotABlockError, prove_block
from ..sparsify.roles import Place, Role, Roles, why_unsuitable
from ..sparsify.twin import BlockTwin

# Attributes in which stock modules keep their number of neurons. Their code may split by it.
_SIZE_NAMES = (
    "intermediate_size",
    "intermediate_dim",
    "ffn_dim",
    "ffn_hidden_size",
    "d_ff",
    "inner_dim",
    "n_inner",
    "hidden_dim",
    "mlp_dim",
    "dim_feedforward",
)


class Changes:
    """Assignments that can be undone."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def assign(self, owner: Any, name: str, value: Any) -> None:
        old = getattr(owner, name)
        self._undo.append(lambda: setattr(owner, name, old))
        setattr(owner, name, value)

    def undo(self) -> None:
        for step in reversed(self._undo):
            step()
        self._undo.clear()


class Cut:
    """A block with fewer neurons, computed and not yet in place.

    owner:  the module under the block's name: the `SparseMLP`, or the stock module that runs it.
    kept:   int64 [n], ascending.
    """

    def __init__(self, name: str, owner: nn.Module, block: SparseMLP, kept: Tensor) -> None:
        self.name, self._owner, self._block = name, owner, block
        self._before, self._after = block.intermediate_size, len(kept)
        self._roles = roles_of(block)
        self._parameters = _cut_parameters(self._roles, kept) if self._after < self._before else []

    @property
    def shapes(self) -> dict[nn.Parameter, tuple[int, ...]]:
        """New shapes, by the parameters that are replaced."""
        return {getattr(module, name): tuple(new.shape) for module, name, new in self._parameters}

    def apply(self, changes: Changes) -> None:
        if not self._parameters:
            return
        for module, name, parameter in self._parameters:
            changes.assign(module, name, parameter)
        for role in _all_roles(self._roles):
            self._resize_projection(role, changes)
        changes.assign(self._block, "intermediate_size", self._after)
        if isinstance(self._block, BlockTwin):
            changes.assign(self._block, "roles", _resized(self._roles, self._after))
        holders = (role.place.holder for role in _all_roles(self._roles))
        for module in dict.fromkeys((self._owner, *holders)):
            self._resize_owner(module, changes)
        changes.assign(self._block, "_layer", None)
        changes.assign(self._block, "last_stats", None)
        if isinstance(self._block, BlockTwin) and "_twell_block" in self._owner.__dict__:
            self._prove()
            *_, surroundings = self._owner.__dict__["_twell_block"]
            changes.assign(surroundings, "settings", surroundings.settings_now())

    @staticmethod
    def _resize_projection(role: Role, changes: Changes) -> None:
        module = role.place.module
        outputs, inputs = module.weight.shape if role.linear else module.weight.shape[::-1]
        for name, size in (
            ("out_features", outputs),
            ("nf", outputs),
            ("in_features", inputs),
            ("nx", inputs),
        ):
            if name in module.__dict__:
                changes.assign(module, name, size)

    def _resize_owner(self, module: nn.Module, changes: Changes) -> None:
        for name in _SIZE_NAMES:
            is_hidden_size = name == "hidden_dim" and self._block.hidden_size == self._before
            if module.__dict__.get(name) == self._before and not is_hidden_size:
                changes.assign(module, name, self._after)

    def _prove(self) -> None:
        """That the stock module's own code still is this block: it may have kept its size anywhere."""
        places = list(dict.fromkeys(role.place for role in _all_roles(self._block.roles)))
        try:
            proven = prove_block(self._owner, places)
        except NotABlockError as reason:
            refuse_block(self.name, f"with {self._after} neurons {reason}")
        if proven.roles != self._block.roles:
            refuse_block(self.name, f"its code computes something else with {self._after} neurons")


def roles_of(block: SparseMLP) -> Roles:
    if isinstance(block, BlockTwin):
        return block.roles
    gate, up, down = (Role(Place(block, f"{name}_proj")) for name in ("gate", "up", "down"))
    return Roles(gate if block.gated else None, up, down)


def check_blocks(model: nn.Module, blocks: dict[str, SparseMLP]) -> None:
    """Refuse blocks whose weights cannot be cut, or are not theirs alone."""
    if any(isinstance(m, (nn.DataParallel, nn.parallel.DistributedDataParallel)) for m in model.modules()):
        reject("model", "a model in (Distributed)DataParallel", "the module inside: model.module")
    users: dict[nn.Module, str] = {}
    holders = defaultdict(list)
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and not parameter.is_meta:
                holders[parameter.device, parameter.data_ptr()].append(module)
    for name, block in blocks.items():
        for module in roles_of(block).modules:
            if reason := _why_uncuttable(module):
                refuse_block(name, reason)
            if module in users:
                refuse_block(name, f"a projection belongs to block {users[module]!r} too")
            users[module] = name
            for parameter in module._parameters.values():
                if parameter is not None and len(holders[parameter.device, parameter.data_ptr()]) > 1:
                    refuse_block(name, "a weight is tied to that of another module")


def refuse_block(name: str, reason: str) -> NoReturn:
    accepted = "blocks of plain nn.Linear or Conv1D projections that belong to them alone"
    reject("model", f"block {name!r}: {reason}", accepted)


def _why_uncuttable(module: nn.Module | None) -> str | None:
    if module is None or not is_bare_projection(module):
        return f"a projection is a {type(module).__name__}: wrapped, adapted or quantised"
    if reason := why_unsuitable(module):
        return reason
    parameters = {name: value for name, value in module._parameters.items() if value is not None}
    if "weight" not in parameters or not parameters.keys() <= {"weight", "bias"}:
        return f"a projection has the parameters {sorted(parameters)}"
    if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters.values()):
        return "a weight has hooks"
    return None


def _all_roles(roles: Roles) -> list[Role]:
    return [role for role in (roles.gate, roles.up, roles.down) if role is not None]


@torch.no_grad()
def _cut_parameters(roles: Roles, kept: Tensor) -> list[tuple[nn.Module, str, nn.Parameter]]:
    rows: dict[Place, list[Tensor]] = defaultdict(list)
    by_row = {role.place: role.linear for role in _all_roles(roles)}
    for role in filter(None, (roles.gate, roles.up)):
        outputs = torch.arange(role.place.module.weight.shape[0 if role.linear else 1])
        rows[role.place].append(outputs[role.rows or slice(None)][kept.cpu()])
    cut = []
    for place, parts in rows.items():
        module, some = place.module, torch.cat(parts).sort().values
        cut.append((module, "weight", _selected(module.weight, 0 if by_row[place] else 1, some)))
        if module.bias is not None:
            cut.append((module, "bias", _selected(module.bias, 0, some)))
    down = roles.down.place.module
    cut.append((down, "weight", _selected(down.weight, 1 if roles.down.linear else 0, kept)))
    return cut


def _selected(parameter: nn.Parameter, dim: int, kept: Tensor) -> nn.Parameter:
    """Those rows or columns, stored as before: by rows or by columns."""
    kept = kept.to(parameter.device)
    if parameter.dim() == 2 and not parameter.is_contiguous() and parameter.mT.is_contiguous():
        values = parameter.mT.index_select(1 - dim, kept).mT
    else:
        values = parameter.index_select(dim, kept)
    cut = nn.Parameter(values, requires_grad=parameter.requires_grad)
    cut.__dict__.update(parameter.__dict__)  # what libraries note on parameters
    return cut


def _resized(roles: Roles, size: int) -> Roles:
    def resized(role: Role) -> Role:
        return role._replace(rows=_resized_rows(role.rows, size))

    return Roles(roles.gate and resized(roles.gate), resized(roles.up), roles.down)


def _resized_rows(rows: slice | None, size: int) -> slice | None:
    """Halves begin at 0 and at H; alternating rows stay as they are."""
    if rows is None or rows.step is not None:
        return rows
    return slice(size if rows.start else 0, None if rows.stop is None else size)
