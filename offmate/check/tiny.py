"""Configurations of Hugging Face models in a tiny size: the same architecture, with few and narrow layers."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

_WORDS = 96  # of a tiny vocabulary; every token that a configuration names lies within it
_POSITIONS = 512
_HEADS = 2  # in each stage, where a list gives the heads of several stages

# Of architectures whose layers differ: how both kinds come to be among the first two. And sizes that have no default.
_OWN: dict[str, dict[str, Any]] = {
    "autoformer": {"prediction_length": 4, "context_length": 8},
    "bamba": {"attn_layer_indices": [1]},
    "esm": {"vocab_size": 33, "pad_token_id": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "attention_layers": ["global", "local"]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "informer": {"prediction_length": 4, "context_length": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "time_series_transformer": {"prediction_length": 4, "context_length": 8},
}

# What a whole number in a configuration means is known by its name only. The first pattern that a name matches gives
# the most that it may be in a tiny model; None leaves it as it is.
_LIMITS: tuple[tuple[str, int | None], ...] = (
    (
        r"(max|min)_(length|new_tokens)|num_labels|.*seed|chunk_size.*|.*(kernel|stride|rate|dilation|feat_extract).*",
        None,
    ),
    (r".*codebook_size", 64),
    (r".*(vocab|vocab_size|vocabulary_size|num_embeddings|num_embeds|vocab_sizes?)(_per_layer_input)?", _WORDS),
    (r".*(position_embeddings|n_positions|source_positions|target_positions|max_seq_len|seq_length|n_ctx)", _POSITIONS),
    (r".*(kv_heads|key_value_heads|num_key_heads|num_value_heads|index_n_heads|head_count_kv)", 2),
    (r".*(attention_heads|num_heads|n_heads?|attn_heads|num_head|heads)", 4),
    (r".*(head_dim|d_kv|dim_head|d_head|dim_per_head|rotary_dim)", 8),
    (r".*(_rank|rank)", 8),
    (r".*(num|n)_(hidden_|encoder_|decoder_|dense_|conv_|lstm_|residual_)*(layers?|blocks)(_.*)?", 2),
    (r"(.*_)?(layers|depth|n_layer|num_layers|num_hidden_layers|hidden_layers|encoder_blocks)", 2),
    (r".*(experts_per_tok(en)?|moe_k|moe_topk|top_k|topk|experts_top_k|num_selected_experts)", 2),
    (r".*(num_experts|local_experts|routed_experts|n_experts|moe_num_experts)", 4),
    (r"(n_groups?|mamba_n_groups|topk_group|num_expert_group)", 1),
    (
        r".*(intermediate_size|intermediate_dim|ffn_dim|d_ff|ffn_hidden_size|mlp_dim|ffn_size|linear_units|inner_dim)",
        64,
    ),
    (r".*(hidden_size|d_model|n_embd|embed_dim|hidden_dim|projection_dim|embedding_size|embedding_dim|output_dim)", 32),
    (r"(.*_)?(dim|width|hidden_channels|d_inner|hidden_sizes|embed_dims|model_dim|conv_dim|feature_size|units)", 32),
    (r".*(image_size|input_size|img_size)", 32),
    (r".*patch_size", 8),
    (r".*(num_queries|num_query_tokens|num_latents|num_frames|num_denoising)", 8),
)
_PATTERNS = tuple((re.compile(pattern), limit) for pattern, limit in _LIMITS)
_SCALES = {"width_coefficient": 0.5, "depth_coefficient": 0.25, "channel_shrink_ratio": 4}
_TOKEN = re.compile(r".*(token|_id|_ids|_index|_idx)s?")
_DEPTHS = re.compile(r"(.*_)?(depths?|layers|num_blocks|blocks_per_stage)")


def shrunk(config: Any, widths: bool = True) -> Any:
    """Return a configuration of the same class in a tiny size.

    Parameters
    ----------
    config: a transformers configuration; it is not changed. widths: whether layers become narrow, too; if not, there
        are only fewer of them and fewer words.
    """
    small = copy.deepcopy(config)
    _shrink(small, widths)
    return small


def _shrink(config: Any, widths: bool) -> None:
    """Shrink a configuration in place, together with those that it holds."""
    values = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    full = values.get("num_hidden_layers")
    for name, value in values.items():
        if _is_config(value):
            _shrink(value, widths)
        elif isinstance(value, Mapping):
            if any(isinstance(key, int) for key in value) and not name.startswith("id2"):
                # One entry per layer.
                setattr(config, name, {key: entry for key, entry in value.items() if not isinstance(key, int)})
        elif isinstance(value, list | tuple) and isinstance(full, int) and len(value) == full > 2:
            setattr(config, name, _few(list(value), 2))
        else:
            limited = _limited(name, value, widths)
            if limited != value:
                setattr(config, name, limited)
    for name, value in _OWN.get(getattr(config, "model_type", ""), {}).items():
        setattr(config, name, value)
    if widths:
        _fit_heads(config, values)


def _is_config(value: Any) -> bool:
    return hasattr(value, "to_diff_dict")


def _few(entries: list[Any], number: int) -> list[Any]:
    """Return the first entries, the last of them of another kind if there is one."""
    other = next((entry for entry in entries if entry != entries[0]), entries[0])
    return [*entries[: number - 1], other]


def _fit_heads(config: Any, before: dict[str, Any]) -> None:
    """Make sizes of heads agree again, where their classes ask for it.

    Parameters
    ----------
    before: the values of the attributes before the configuration became tiny.
    """

    def number(name: str) -> int:
        value = vars(config).get(name)
        return value if _whole(value) else 0

    if before.get("num_key_value_heads") and before["num_key_value_heads"] == before.get("num_attention_heads"):
        config.num_key_value_heads = number("num_attention_heads")
    if number("qk_head_dim"):
        config.qk_head_dim = number("qk_nope_head_dim") + number("qk_rope_head_dim")
    if number("mamba_n_heads") and number("mamba_d_head") and number("mamba_expand"):
        config.mamba_d_head = number("mamba_expand") * number("hidden_size") // number("mamba_n_heads")
    if number("expand") and number("num_heads") and number("head_dim"):
        config.head_dim = number("expand") * number("hidden_size") // number("num_heads")
    if "head_dim" in before and before["head_dim"] is None and number("num_attention_heads"):
        config.head_dim = number("hidden_size") // number("num_attention_heads")
    width = number("head_dim") or number("hidden_size") // max(number("num_attention_heads"), 1)
    _fit_sections(before.get("rope_parameters"), width, vars(config).get("partial_rotary_factor") or 1.0)


def _fit_sections(rope: Any, width: int, part: float) -> None:
    """Make the sections of rotary embeddings in several dimensions fill a head, half of which turns.

    Parameters
    ----------
    rope: the parameters of the embeddings, or one dictionary of them for each kind of layer; changed in place.
    width: of a head. part: of a head that turns, unless the parameters say it.
    """
    if not isinstance(rope, dict):
        return
    for inner in rope.values():
        _fit_sections(inner, width, part)
    if "rope_type" in rope:
        # Models with such sections have a default for them, in which three sections fill a wide head.
        half, count = int(width * rope.get("partial_rotary_factor", part)) // 2, len(rope.get("mrope_section", "thw"))
        rope["mrope_section"] = [(half + count - 1 - place) // count for place in range(count)]


def _limited(name: str, value: Any, widths: bool) -> Any:
    if name in _SCALES and isinstance(value, float | int):
        return min(value, _SCALES[name])
    if isinstance(value, list | tuple) and value and all(map(_whole, value)):
        if _DEPTHS.fullmatch(name):
            return type(value)(min(entry, 1) for entry in value)
        if name.endswith("heads"):
            return type(value)(min(entry, _HEADS) for entry in value) if widths else value
        return value
    return _number(name, value, widths) if _whole(value) else value


def _number(name: str, value: int, widths: bool) -> int:
    if _TOKEN.fullmatch(name):
        return value if value < _WORDS else value % (_WORDS - 16) + 8
    for pattern, limit in _PATTERNS:
        if pattern.fullmatch(name):
            if limit is None or value <= limit or not (widths or limit in (2, _WORDS)):
                return value
            return limit
    return value


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
