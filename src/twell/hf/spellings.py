"""Reads checkpoints with any released spelling of the feed-forward weights.

| spelling     | gate               | up                                  | down               |
|--------------|--------------------|-------------------------------------|--------------------|
| stock        | gate_proj.weight [H, D] | up_proj.weight [H, D]          | down_proj.weight [D, H] |
| `*_weight`   | gate_weight [D, H] | up_weight [H, D]; non-gated [D, H]  | down_weight [H, D] |
| upper case   | GATE [H, D]        | UP [H, D]                           | DOWN [H, D]        |

The spelling decides what is transposed; where H == D the shapes could not tell.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig
from transformers.utils import cached_file

from .._errors import reject
from .config import SparsityConfig

# Training state inside released checkpoints.
IGNORED_KEYS = [r"(^|\.)tracker\.", r"(^|\.)metrics_accumulator\."]

_IGNORED = re.compile("|".join(IGNORED_KEYS))
_MLP_KEY = re.compile(r"(?P<block>(?:.*\.)?layers\.(?P<layer>\d+)\.mlp\.)(?P<name>.+)")
# Options that locate a checkpoint's files.
HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
# Options that a config consumes but the model needs as well.
_SHARED_OPTIONS = ("dtype", "torch_dtype", "attn_implementation")


class Target(NamedTuple):
    """The stock key of a checkpoint's tensor, and whether to transpose the tensor."""

    key: str
    transposed: bool = False


def convert_state_dict(state_dict: Mapping[str, Tensor], config: SparsityConfig) -> dict[str, Tensor]:
    """Convert a state dict in any spelling to stock keys and shapes; transposed weights are views.

    Raises ValueError if feed-forward weights are missing, unknown or do not fit the config.
    """
    targets = stock_targets({key: tuple(value.shape) for key, value in state_dict.items()}, config)
    return {
        target.key: state_dict[key].mT if target.transposed else state_dict[key]
        for key, target in targets.items()
    }


def in_stock_spelling(
    weights: Iterable[tuple[str, Tensor]], config: SparsityConfig
) -> Iterator[tuple[str, Tensor]]:
    """`convert_state_dict` for weights that are read one by one; names it does not know stay as they are."""
    spellings = _spellings(config.sparsity_gated_mlp, getattr(config, "mlp_bias", False))
    for key, tensor in weights:
        if _IGNORED.search(key):
            continue
        match = _MLP_KEY.fullmatch(key)
        if match is None or match["name"] not in spellings:
            yield key, tensor
            continue
        name, transposed = spellings[match["name"]]
        yield match["block"] + name, tensor.mT if transposed else tensor


def stock_targets(shapes: Mapping[str, tuple[int, ...]], config: SparsityConfig) -> dict[str, Target]:
    """checkpoint key -> target, without ignored keys."""
    sizes = config.neurons_per_layer()
    spellings = _spellings(config.sparsity_gated_mlp, getattr(config, "mlp_bias", False))
    targets: dict[str, Target] = {}
    found: dict[int, dict[str, str]] = {layer: {} for layer in range(len(sizes))}
    for key, shape in shapes.items():
        if _IGNORED.search(key):
            continue
        match = _MLP_KEY.fullmatch(key)
        layer = int(match["layer"]) if match else -1
        if layer not in found:
            targets[key] = Target(key)
            continue
        if match["name"] not in spellings:
            reject("checkpoint", f"the unknown key {key!r}", _accepted(spellings, config))
        name, transposed = spellings[match["name"]]
        if name in found[layer]:
            reject("checkpoint", f"both {found[layer][name]!r} and {key!r}", "one spelling of each weight")
        found[layer][name] = key
        wanted = _stock_shape(name, config.hidden_size, sizes[layer])
        wanted = wanted[::-1] if transposed else wanted
        if tuple(shape) != wanted:
            reject("checkpoint", f"{key!r} of shape {tuple(shape)}", f"{wanted}, by the config")
        targets[key] = Target(match["block"] + name, transposed)
    needed = {name for name, _ in spellings.values()}
    for layer, names in found.items():
        if missing := sorted(needed - names.keys()):
            reject("checkpoint", f"layer {layer} without {missing}", _accepted(spellings, config))
    return targets


def _spellings(gated: bool, biased: bool) -> dict[str, tuple[str, bool]]:
    """Name below `mlp.` -> stock name, and whether the tensor is its transpose."""
    names = {
        "up_proj.weight": ("up_proj.weight", False),
        "up_weight": ("up_proj.weight", not gated),
        "UP": ("up_proj.weight", False),
        "down_proj.weight": ("down_proj.weight", False),
        "down_weight": ("down_proj.weight", True),
        "DOWN": ("down_proj.weight", True),
    }
    if gated:
        names["gate_proj.weight"] = ("gate_proj.weight", False)
        names["gate_weight"] = ("gate_proj.weight", True)
        names["GATE"] = ("gate_proj.weight", False)
    if biased:
        for projection in sorted({name.split(".")[0] for name, _ in names.values()}):
            names[f"{projection}.bias"] = (f"{projection}.bias", False)
    return names


def _stock_shape(name: str, hidden: int, neurons: int) -> tuple[int, ...]:
    outputs, inputs = (hidden, neurons) if name.startswith("down") else (neurons, hidden)
    return (outputs,) if name.endswith("bias") else (outputs, inputs)


def _accepted(spellings: Mapping[str, Any], config: SparsityConfig) -> str:
    kind = "gated" if config.sparsity_gated_mlp else "non-gated"
    return f"each weight of a {kind} block in one spelling: {', '.join(sorted(spellings))}"


def load_pretrained(
    model_class: type, load_stock: Callable[..., Any], name_or_path: Any, *model_args: Any, **kwargs: Any
) -> tuple[Any, dict[str, Any]]:
    """`from_pretrained` for every spelling: the model and transformers' loading info.

    load_stock:  transformers' own `from_pretrained`.
    """
    state_dict = kwargs.get("state_dict")
    if isinstance(state_dict, dict) and isinstance(kwargs.get("config"), SparsityConfig):
        kwargs["state_dict"] = convert_state_dict(state_dict, kwargs["config"])
        return load_stock(name_or_path, *model_args, output_loading_info=True, **kwargs)
    files = _safetensors_files(name_or_path, kwargs)
    if files:
        config, unused = _config_of(model_class.config_class, name_or_path, kwargs)
        if isinstance(config, SparsityConfig) and getattr(config, "quantization_config", None) is None:
            targets = stock_targets(_shapes_in(files), config)
            if any(key != target.key for key, target in targets.items()):
                return _load_converted(load_stock, name_or_path, model_args, config, unused, kwargs, files)
    model, info = load_stock(name_or_path, *model_args, output_loading_info=True, **kwargs)
    if missing := sorted(key for key in info["missing_keys"] if _MLP_KEY.fullmatch(key)):
        reject("checkpoint", f"no {missing[0]!r}, {len(missing)} missing in all", "all feed-forward weights")
    return model, info


def _load_converted(
    load_stock: Callable[..., Any],
    name_or_path: Any,
    model_args: tuple[Any, ...],
    config: PreTrainedConfig,
    unused: dict[str, Any],
    kwargs: dict[str, Any],
    files: list[Path],
) -> tuple[Any, dict[str, Any]]:
    tensors = {key: tensor for file in files for key, tensor in load_file(file).items()}
    options = {key: value for key, value in unused.items() if key not in (*HUB_OPTIONS, "variant")}
    model, info = load_stock(
        None,
        *model_args,
        config=config,
        state_dict=convert_state_dict(tensors, config),
        output_loading_info=True,
        **options,
    )
    model.name_or_path = model.config.name_or_path = str(name_or_path)
    if model.can_generate() and kwargs.get("generation_config") is None:
        try:
            hub = {option: kwargs[option] for option in HUB_OPTIONS if option in kwargs}
            model.generation_config = GenerationConfig.from_pretrained(name_or_path, **hub)
        except OSError:
            pass  # a checkpoint need not have one
    return model, info


def _config_of(
    config_class: type[PreTrainedConfig], name_or_path: Any, kwargs: dict[str, Any]
) -> tuple[PreTrainedConfig, dict[str, Any]]:
    """The config as transformers would find it, and the remaining options for the model."""
    options = dict(kwargs)
    config = options.pop("config", None)
    if isinstance(config, PreTrainedConfig):
        return config, options
    for option in ("dtype", "torch_dtype"):
        if options.get(option) == "auto":
            options.pop(option)
    source = name_or_path if config is None else config
    config, unused = config_class.from_pretrained(source, return_unused_kwargs=True, **copy.deepcopy(options))
    return config, unused | {key: kwargs[key] for key in _SHARED_OPTIONS if key in kwargs}


def _safetensors_files(name_or_path: Any, kwargs: Mapping[str, Any]) -> list[Path]:
    """The safetensors files of a checkpoint; none if transformers should load another kind of file."""
    if name_or_path is None or kwargs.get("gguf_file") or kwargs.get("quantization_config"):
        return []
    if kwargs.get("use_safetensors") is False:
        return []
    options = {option: kwargs[option] for option in HUB_OPTIONS if option in kwargs}
    variant = f".{kwargs['variant']}" if kwargs.get("variant") else ""
    if single := _file(name_or_path, f"model{variant}.safetensors", options):
        return [single]
    index = _file(name_or_path, f"model.safetensors.index{variant}.json", options)
    if index is None:
        return []
    shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    files = [_file(name_or_path, shard, options) for shard in shards]
    return [] if None in files else files


def _file(name_or_path: Any, name: str, options: Mapping[str, Any]) -> Path | None:
    if os.path.isdir(name_or_path):
        path = Path(name_or_path, options.get("subfolder") or "", name)
        return path if path.is_file() else None
    try:
        found = cached_file(name_or_path, name, **options)
    except OSError:
        return None
    return None if found is None else Path(found)


def _shapes_in(files: list[Path]) -> dict[str, tuple[int, ...]]:
    """Shapes from the files' headers, by key."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for key in tensors.keys():  # noqa: SIM118, it is no mapping
                    shapes[key] = tuple(tensors.get_slice(key).get_shape())
        except SafetensorError as error:
            raise OSError(f"{file}: no whole safetensors file ({error}); save or download it again") from None
    return shapes
