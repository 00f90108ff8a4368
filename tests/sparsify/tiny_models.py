"""Tiny models of every family of transformers, with ReLU where their config allows it, and inputs for them.

Sizes go by the names of a config's fields, so that a family nobody has listed is built like any other.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCABULARY, ROWS, LENGTH = 160, 2, 12
_LANGUAGE = ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM")

# (names of fields, their value), the first match counts. Only larger integers are changed.
_SIZES = tuple(
    (re.compile(pattern), value)
    for pattern, value in (
        (r"(.*_)?vocab_size(_.*)?", VOCABULARY),
        (r"max_.*positions?(_.*)?|.*max_position_embeddings|n_positions|max_seq_len|n_ctx", 64),
        (r"first_k_dense.*|(n|num_expert|topk)_group|decoder_sparse_step|.*moe_layer_start_index", 1),
        (r"(moe|shared|expert|routed|dense|share).*(intermediate|ffn|hidden|mlp|expert).*(size|dim)", 48),
        (r".*(intermediate|inner|ffn|feed_?forward|mlp|linear_units).*(size|dim|units|forward)(_mlp)?", 96),
        (r".*linear_units|d_ff|dff|dim_ff|d_inner|n_inner|.*ffn_dim|mlp_dim|.*dim_feedforward", 96),
        (r"mamba_(n|num)_heads", 8),
        (r"num_self_attends_per_block|(num_|n_)?(.*_)?(layers?|blocks|depth)", 2),
        (r"num_latents|d_latents", 32),
        (r"(num_|n_)?(.*_)?(key_value|kv|query_groups|key).*(heads|groups)", 2),
        (r"(num_|n_)?(.*_)?heads?", 4),
        (r"rotary_dim", 8),
        (r"(.*_)?(head_dim|d_kv|d_head|dim_head|kv_channels|attention_head_size|head_size)", 16),
        (r".*lora_rank", 16),
        (r".*(per_tok|topk|top_k|num_selected_experts|moe_k)", 2),
        (r"(num_|n_).*experts|moe_num_experts|zero_expert_num", 4),
        (r"(sliding|attention)_window.*|local_attention", 8),
        (r"(.*_)?(hidden_size|d_model|n_embd|embed_dim|emb_dim|embedding_size|embedding_dim|hidden_dim)", 64),
        (r"dim|.*(hidden_size|projection_dim|project_dim|emb_size|proj_dim|width|projection_size).*", 64),
    )
)
_ACTIVATION = re.compile(r"(.*_)?(act|activation|act_fn|act_func|activation_function|afn)")
_OTHER_ACTIVATION = re.compile(r".*(pool|classif|summary|conv|mamba|feat_extract|scor|gate|stem|csp).*")
_TOKEN = re.compile(
    r".*(token|pad|bos|eos|sep|cls|mask|image|video|audio|img|im)_?(token)?_?(ids?|index)(_.*)?"
)

# Where names do not say enough.
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16}
_EXCEPTIONS: dict[str, dict[str, Any]] = {
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": None, "sliding_attention": _ROPE}},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 128},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["mamba", "attention"], "num_local_experts": 0},
    "deepseek_v2": {"num_experts_per_tok": 2, "topk_group": 1, "n_group": 1},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "esm": {"pad_token_id": 1, "mask_token_id": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "num_experts": 4},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "mobilebert": {"intra_bottleneck_size": 32, "true_hidden_size": 32, "embedding_size": 32},
    "reformer": {"is_decoder": True, "axial_pos_shape": (4, 4), "axial_pos_embds_dim": (32, 32)},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "qwen4_exp_text": {"output_gate_type": "silu"},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "xmod": {"languages": ("en_XX",), "default_language": "en_XX"},
}


# Fields that some families leave empty and none works without.
_NEEDED = {"head_dim": 16, "num_key_value_heads": 4, "vocab_size": VOCABULARY}


def model_types() -> list[str]:
    return sorted({name for tables in _tables() for name in tables[0]} & set(CONFIG_MAPPING))


def is_language_model(model_type: str) -> bool:
    """Whether it has a causal, sequence-to-sequence or masked language model."""
    return any(model_type in names for names, _ in _tables()[:-1])


def _tables() -> list[tuple]:
    """(names of model types, config class -> model class): language models, then base models."""
    tables = [f"MODEL_FOR_{kind}_MAPPING" for kind in _LANGUAGE] + ["MODEL_MAPPING"]
    return [(getattr(auto, f"{name}_NAMES"), getattr(auto, name)) for name in tables]


def model_class(model_type: str) -> type[PreTrainedModel]:
    for names, classes in _tables():
        if model_type in names:
            found = classes[CONFIG_MAPPING[model_type]]
            return found[0] if isinstance(found, tuple | list) else found
    raise KeyError(model_type)


def tiny_config(model_type: str) -> PreTrainedConfig:
    """A small config with ReLU, or squared ReLU where that is the family's own, wherever it names one."""
    kind = CONFIG_MAPPING[model_type]
    return kind(**_tiny_fields(kind))


def _tiny_fields(kind: type[PreTrainedConfig]) -> dict[str, Any]:
    default, fields = kind(), _kinds_of_layers(kind())
    layers = {len(v) for n, v in vars(default).items() if n.startswith("layer_types") and isinstance(v, list)}
    layers |= {v for n, v in vars(default).items() if isinstance(v, int) and n.endswith(("layers", "layer"))}
    for field in dataclasses.fields(kind):
        if not field.init or field.name not in vars(default):
            continue
        name, value = field.name, vars(default)[field.name]
        if name in fields:
            continue
        if value is None and name in _NEEDED:
            fields[name] = _NEEDED[name]
        elif isinstance(value, PreTrainedConfig):
            fields[name] = type(value)(**_tiny_fields(type(value)))
        elif field.default is None:
            continue  # worked out from others
        elif isinstance(value, str) and (relu := _relu(name, value)) is not None:
            fields[name] = relu
        elif name == "gelu_activation":
            fields[name] = False  # XLM says so that it is ReLU
        elif isinstance(value, int) and not isinstance(value, bool):
            fields[name] = _tiny_number(name, value)
            if name == "num_key_value_heads" and value == getattr(default, "num_attention_heads", None):
                fields[name] = fields.get("num_attention_heads", 4)
        elif isinstance(value, list | tuple) and len(value) > 2 and len(value) in layers:
            fields[name] = value[:2]
    return fields | _EXCEPTIONS.get(kind.model_type, {})


def _kinds_of_layers(config: PreTrainedConfig) -> dict[str, Any]:
    """Two layers at least, and one of each kind that the family has."""
    fields = {}
    for name in ("layer_types", "layers_block_type", "mlp_layer_types"):
        value = vars(config).get(name)
        if isinstance(value, list | tuple) and value:
            kinds = list(dict.fromkeys(value))
            fields[name] = (kinds * 2)[: max(2, len(kinds))]
    count = max(map(len, fields.values()), default=2)
    fields = {name: (value * count)[:count] for name, value in fields.items()}
    if count > 2:
        fields["num_hidden_layers"] = count
    return {name: type(vars(config)[name])(v) if name in vars(config) else v for name, v in fields.items()}


def _relu(name: str, value: str) -> str | None:
    """The ReLU that an activation becomes; None for other fields."""
    if name == "feed_forward_proj":
        return "gated-relu" if value.startswith("gated-") else "relu"
    if value not in ACT2FN or not _ACTIVATION.fullmatch(name) or _OTHER_ACTIVATION.fullmatch(name):
        return None
    return "relu2" if value == "relu2" else "relu"


def _tiny_number(name: str, value: int) -> int:
    if _TOKEN.fullmatch(name):
        return value if value < VOCABULARY else 1 + sum(map(ord, name)) % 8
    for pattern, small in _SIZES:
        if pattern.fullmatch(name):
            return min(small, value)
    return value


def build(model_type: str) -> PreTrainedModel:
    """In eval mode, with random weights, biases and norms that all matter."""
    torch.manual_seed(0)
    kind, config = model_class(model_type), tiny_config(model_type)
    if not isinstance(config, kind.config_class):
        config = config.get_text_config(decoder=True)  # of a family whose language model is a part
    model = kind(config).float().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() < 2:
                parameter.nan_to_num_().add_(0.1 * noise)
            else:
                parameter.copy_(noise * (parameter.numel() / parameter.shape[0]) ** -0.5)
    return model


def candidate_inputs(model: PreTrainedModel) -> Iterator[dict[str, Tensor]]:
    """Inputs to try, likely ones first."""
    accepted = inspect.signature(model.forward).parameters
    known = {name: make(model.config) for name, make in _INPUTS.items() if name in accepted}
    main = model.main_input_name
    texts = ("input_ids", "decoder_input_ids", "attention_mask")
    for names in (
        [main],
        [main, "decoder_input_ids"],
        [main, "input_ids"],
        [main, "attention_mask"],
        texts[:1],
        texts[:2],
        texts,
        ["pixel_values"],
        ["pixel_values", *texts],
        ["input_features", *texts],
        ["input_values", *texts],
        list(known),
    ):
        if all(name in known or name in texts for name in names):
            yield {name: known[name] for name in names if name in known}


def _ids(config: PreTrainedConfig) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(12, _smallest_vocabulary(config), (ROWS, LENGTH), generator=generator)


def _smallest_vocabulary(config: PreTrainedConfig) -> int:
    sizes = [v for n, v in vars(config).items() if n.endswith("vocab_size") and isinstance(v, int) and v > 12]
    return min([VOCABULARY, *sizes])


def _sub_value(config: PreTrainedConfig, names: tuple[str, ...], otherwise: Any) -> Any:
    for name in names:
        if getattr(config, name, None) is not None:
            return getattr(config, name)
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            found = _sub_value(value, names, None)
            if found is not None:
                return found
    return otherwise


def _noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def _pixels(config: PreTrainedConfig) -> Tensor:
    size = _sub_value(config, ("image_size", "img_size", "input_size"), 64)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return _noise(ROWS, _sub_value(config, ("num_channels", "in_channels", "in_chans"), 3), height, width)


def _features(config: PreTrainedConfig) -> Tensor:
    bins = _sub_value(config, ("num_mel_bins", "input_feat_per_channel", "feature_size", "input_dim"), 80)
    return _noise(ROWS, 2 * LENGTH, bins)


_INPUTS = {
    "input_ids": _ids,
    "decoder_input_ids": _ids,
    "attention_mask": lambda config: torch.ones(ROWS, LENGTH, dtype=torch.long),
    "pixel_values": _pixels,
    "input_features": _features,
    "input_values": lambda config: _noise(ROWS, 4000),
}
