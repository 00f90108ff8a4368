"""Which fields of a config hold the sizes of blocks, so that a pruned model loads back.

A field is found by trying it: the model's class is built on the meta device with another value there, and
what changes its shape is what the field sizes. So no list of models is needed, and a field that sizes
anything besides blocks is noticed.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from .._errors import reject
from ..nn import SparseMLP
from .projections import Changes, roles_of

_PER_LAYER = "sparsity_layer_sizes"  # of `twell.hf`'s configs
_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.mlp")
# Fields whose None stands for a multiple of the hidden size.
_MAY_BE_NONE = ("n_inner", "ffn_dim", "intermediate_size", "ffn_hidden_size", "inner_dim", "d_ff")

Shape = tuple[int, ...]
Shapes = dict[str, Shape]


class Field(NamedTuple):
    """path: names of the configs inside the model's config that lead to the field."""

    path: tuple[str, ...]
    name: str

    def config(self, root: Any) -> Any:
        for name in self.path:
            root = getattr(root, name)
        return root

    def __str__(self) -> str:
        return ".".join((*self.path, self.name))


@dataclass
class StoredModel:
    """A transformers model, whose config says how large its blocks are.

    name:    of the model inside of that which is pruned; "" for the whole.
    blocks:  by name, as in the whole.
    fields:  what sizes which blocks; none if its config has a size for every layer.
    """

    name: str
    model: nn.Module
    blocks: dict[str, SparseMLP]
    fields: dict[Field, list[str]] = field(default_factory=dict)
    built: Shapes = field(default_factory=dict)

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def sizes_layers(self) -> bool:
        return hasattr(self.config, _PER_LAYER)

    def groups(self) -> list[list[str]]:
        """Blocks that must have one size."""
        return [[name] for name in self.blocks] if self.sizes_layers else list(self.fields.values())

    def new_values(self, sizes: Mapping[str, int]) -> dict[Field, Any]:
        if not self.sizes_layers:
            return {place: sizes[names[0]] for place, names in self.fields.items()}
        layers = self.config.neurons_per_layer()
        for name in self.blocks:
            match = _LAYER.fullmatch(name)
            if match is None or int(match[1]) >= len(layers):
                reject("model", f"block {name!r}", f"a block layers.N.mlp, which {_PER_LAYER} can size")
            layers[int(match[1])] = sizes[name]
        values = {"intermediate_size": max(layers), "sparsity_new_intermediate_size": None}
        values[_PER_LAYER] = None if len(set(layers)) == 1 else layers
        return {Field((), name): value for name, value in values.items()}

    def check(self, sizes: Mapping[str, int], planned: Mapping[nn.Parameter, Shape]) -> None:
        """That the new config makes a model of the planned shapes; planned: of parameters that change."""
        shapes, own = self._shapes(self.new_values(sizes)), self._parameters_of_blocks()
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            wanted = planned.get(parameter, tuple(parameter.shape)) if name in own else self.built.get(name)
            if shapes.get(name) != wanted:
                reject(
                    "model",
                    f"a {type(self.model).__name__} whose config makes {name!r} {shapes.get(name)}",
                    f"{wanted}: a class that its config builds as it is",
                )

    def apply(self, sizes: Mapping[str, int], changes: Changes) -> None:
        self._own_configs(changes)
        for place, value in self.new_values(sizes).items():
            for config in self._configs(place):
                changes.assign(config, place.name, value)

    def _own_configs(self, changes: Changes) -> None:
        """Configs of its own: other models may have been built from the same ones."""
        copies: dict[int, Any] = {}  # one for all: what modules share stays shared
        for module in self.model.modules():
            if "config" in module.__dict__:
                changes.assign(module, "config", copy.deepcopy(module.config, copies))

    def _configs(self, place: Field) -> list[Any]:
        """The config that is saved, and copies of it that modules keep, as T5's do."""
        saved = place.config(self.config)
        tree = {id(config) for _, config in _configs_in(self.config)}
        old = getattr(saved, place.name)
        kept = {
            id(m.config): m.config for m in self.model.modules() if _is_config(getattr(m, "config", None))
        }
        copies = [
            config
            for root in kept.values()
            for _, config in _configs_in(root)
            if id(config) not in tree
            and type(config) is type(saved)
            and getattr(config, place.name, None) == old
        ]
        return [saved, *copies]

    def find_fields(self) -> None:
        """Which fields size which blocks; ValueError if that is not clear for one of them."""
        self.built = self._shapes({})
        if self.sizes_layers:
            return
        own, spoilt = self._parameters_of_blocks(), {}
        for place in self._candidates():
            config = place.config(self.config)
            probe = (getattr(config, place.name) or self._largest()) + 8
            try:
                shapes = self._shapes({place: probe})
            except ValueError:
                continue  # no number of neurons: nothing else would be built with it
            changed = [name for name in self.built if shapes.get(name) != self.built[name]]
            sized = dict.fromkeys(own[name] for name in changed if name in own)
            others = [name for name in changed if name not in own]
            if sized and others:
                spoilt.update(dict.fromkeys(sized, f"{place} sizes {others[0]!r} as well"))
            elif sized:
                self.fields[place] = list(sized)
        for name, block in self.blocks.items():
            sizing = [place for place, names in self.fields.items() if name in names]
            if len(sizing) != 1:
                neurons = block.intermediate_size
                found = spoilt.get(name) if not sizing else f"fields {' and '.join(map(str, sizing))}"
                reject(
                    "model",
                    f"a {type(self.config).__name__} with {found or 'no field'} for the {neurons} neurons of "
                    f"block {name!r}",
                    "a config with one field for the neurons of sparse blocks alone",
                )

    def _largest(self) -> int:
        return max(block.intermediate_size for block in self.blocks.values())

    def _candidates(self) -> Iterator[Field]:
        sizes = {block.intermediate_size for block in self.blocks.values()}
        for path, config in _configs_in(self.config):
            for name, value in list(vars(config).items()):
                known = type(value) is int and value in sizes
                if not name.startswith("_") and (known or (value is None and name in _MAY_BE_NONE)):
                    yield Field(path, name)

    def _parameters_of_blocks(self) -> dict[str, str]:
        """Parameter, as its model names it -> block."""
        owners = {
            id(parameter): name
            for name, block in self.blocks.items()
            for module in roles_of(block).modules
            for parameter in module.parameters()
        }
        named = self.model.named_parameters(remove_duplicate=False)
        return {name: owners[id(parameter)] for name, parameter in named if id(parameter) in owners}

    def _shapes(self, values: Mapping[Field, Any]) -> Shapes:
        """Shapes of the parameters of a model with these values in its config."""
        config = copy.deepcopy(self.config)
        kind = getattr(type(self.model), "_twell_stock", type(self.model))
        try:
            for place, value in values.items():
                setattr(place.config(config), place.name, value)
            with torch.device("meta"), torch.no_grad(), torch.random.fork_rng(devices=[]):
                model = kind(config)
        except Exception as error:  # any code may run here, and fail in any way
            first = str(error).partition("\n")[0]
            reject(
                "model", f"a {kind.__name__} that cannot be built: {first}", "a class that its config builds"
            )
        return {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}


def stored_models(model: nn.Module, blocks: Mapping[str, SparseMLP]) -> list[StoredModel]:
    """The transformers models that blocks are in, outermost ones; blocks outside of them are left out."""
    found: dict[str, StoredModel] = {}
    for name, block in blocks.items():
        parts = name.split(".") if name else []
        for length in range(len(parts) + 1):
            prefix = ".".join(parts[:length])
            module = model.get_submodule(prefix)
            if hasattr(module, "save_pretrained") and _is_config(getattr(module, "config", None)):
                found.setdefault(prefix, StoredModel(prefix, module, {})).blocks[name] = block
                break
    for stored in found.values():
        stored.find_fields()
    return list(found.values())


def _is_config(value: Any) -> bool:
    """transformers' configs, known by what they have so that nothing imports transformers."""
    return hasattr(value, "to_dict") and hasattr(value, "model_type")


def _configs_in(config: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, config
    for name, value in list(vars(config).items()):
        if _is_config(value):
            yield from _configs_in(value, (*path, name))
