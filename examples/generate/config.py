"""A Llama's sizes and the names of its tensors, as its files state them.

A GGUF file states them in its metadata, a folder of Hugging Face's hub in its config.json.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Container, Mapping
from typing import Any

import numpy as np


def number(fields: Mapping[str, Any], name: str, default: float | None = None) -> Any:
    """A field that must be a finite number above 0; one that is None is as if it were missing."""
    value = fields.get(name)
    value = default if value is None else value
    if not isinstance(value, numbers.Real) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"generate: needs a number above 0 as {name}, got {name}={value!r:.80}")
    return value


@dataclasses.dataclass(frozen=True)
class Names:
    """A checkpoint's names of the tensors of a Llama."""

    # Names by field, those of a block with its number in braces; a head is absent where the
    # embedding is its matrix.
    tensors: Mapping[str, str]
    # Whether the pairs of rotated features lie next to each other in the rows of a head's queries
    # and keys, instead of half a head apart.
    adjacent: bool

    def of(self, field: str, index: int | None = None) -> str:
        """The name of a tensor, of the block `index` if it is in one."""
        return self.tensors[field].format(index)


# By field: llama.cpp's name, and the hub's.
TENSORS = {
    "embedding": ("token_embd", "model.embed_tokens"),
    "norm": ("output_norm", "model.norm"),
    "head": ("output", "lm_head"),
    "attention_norm": ("blk.{}.attn_norm", "model.layers.{}.input_layernorm"),
    "query": ("blk.{}.attn_q", "model.layers.{}.self_attn.q_proj"),
    "key": ("blk.{}.attn_k", "model.layers.{}.self_attn.k_proj"),
    "value": ("blk.{}.attn_v", "model.layers.{}.self_attn.v_proj"),
    "out": ("blk.{}.attn_output", "model.layers.{}.self_attn.o_proj"),
    "feed_forward_norm": ("blk.{}.ffn_norm", "model.layers.{}.post_attention_layernorm"),
    "gate": ("blk.{}.ffn_gate", "model.layers.{}.mlp.gate_proj"),
    "up": ("blk.{}.ffn_up", "model.layers.{}.mlp.up_proj"),
    "down": ("blk.{}.ffn_down", "model.layers.{}.mlp.down_proj"),
}
GGUF = Names({field: f"{name}.weight" for field, (name, _) in TENSORS.items()}, adjacent=True)
HUB = Names({field: f"{name}.weight" for field, (_, name) in TENSORS.items()}, adjacent=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """The sizes of a model of the Llama family."""

    vocabulary: int  # number of tokens
    width: int  # features of the residual stream
    layers: int  # number of blocks
    heads: int  # heads of the queries
    kv_heads: int  # heads of keys and values, each shared by `heads / kv_heads` queries
    head_width: int  # features of a head, even
    hidden: int  # features of the feed-forward layer
    rope_theta: float = 10000.0  # base of the rotary embedding's wavelengths
    # Divisors of the frequency of each pair of features, for longer contexts.
    rope_divisors: tuple[float, ...] | None = None
    epsilon: float = 1e-5  # of the norms
    context: int = 2048  # most tokens that the model was trained for
    tied: bool = True  # whether the head multiplies by the embedding


# `model_type`s whose layers are those of `Llama`.
FAMILIES = ("llama", "mistral", "smollm")
# Sizes of `LlamaConfig`: their names in config.json, and in a GGUF file.
SIZES = {
    "width": ("hidden_size", "llama.embedding_length"),
    "layers": ("num_hidden_layers", "llama.block_count"),
    "heads": ("num_attention_heads", "llama.attention.head_count"),
    "kv_heads": ("num_key_value_heads", "llama.attention.head_count_kv"),
    "head_width": ("head_dim", "llama.rope.dimension_count"),
    "hidden": ("intermediate_size", "llama.feed_forward_length"),
    "context": ("max_position_embeddings", "llama.context_length"),
}


def sizes_of(fields: Mapping[str, Any], column: int) -> dict[str, int]:
    """The sizes that a file states, by the column of its names in `SIZES`."""
    sizes: dict[str, int] = {}
    for size, names in SIZES.items():
        default = {"kv_heads": sizes.get("heads"), "context": 2048}.get(size)
        if size == "head_width":
            default = sizes["width"] // sizes["heads"]
        sizes[size] = int(number(fields, names[column], default))
    return sizes


def config_from_json(fields: Mapping[str, Any], names: Container[str]) -> LlamaConfig:
    """The sizes that a config.json states, of a checkpoint with tensors of these names."""
    sizes = sizes_of(fields, 0) if fields.get("model_type") in FAMILIES else {}
    window = fields.get("sliding_window") or 0
    facts = {
        "model_type": (fields.get("model_type"), FAMILIES),
        "hidden_act": (fields.get("hidden_act", "silu"), ("silu",)),
        "attention_bias": (bool(fields.get("attention_bias")), (False,)),
        "mlp_bias": (bool(fields.get("mlp_bias")), (False,)),
        "sliding_window": (window * (window < sizes.get("context", 0)), (0,)),
    }
    for name, (value, allowed) in facts.items():
        if value not in allowed:
            needed = " or ".join(map(repr, allowed))
            raise ValueError(f"generate: needs {name}={needed} in config.json, got {value!r}")
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    theta = number(rope, "rope_theta", number(fields, "rope_theta", 10000.0))
    return LlamaConfig(
        **sizes,
        vocabulary=int(number(fields, "vocab_size")),
        rope_theta=float(theta),
        rope_divisors=rope_divisors(rope, theta, sizes["head_width"]),
        epsilon=float(number(fields, "rms_norm_eps", 1e-6)),
        tied=HUB.of("head") not in names,
    )


def config_from_gguf(fields: Mapping[str, Any], tensors: Mapping[str, Any]) -> LlamaConfig:
    """The sizes that a GGUF file's metadata states."""
    family = fields.get("general.architecture")
    if family != "llama":
        raise ValueError(f"generate: needs general.architecture='llama', got {family!r}")
    sizes = sizes_of(fields, 1)
    # A factor for all rotary frequencies, and a tensor of one for each.
    kind = fields.get("llama.rope.scaling.type")
    scaling = {"type": None if kind == "none" else kind}
    scaling["factor"] = number(fields, "llama.rope.scaling.factor", 1.0)
    divisors = rope_divisors(scaling, 1.0, sizes["head_width"])
    if "rope_freqs.weight" in tensors:
        each = np.asarray(tensors["rope_freqs.weight"], np.float32).ravel()
        divisors = tuple(float(x) for x in each * np.float32(divisors[0] if divisors else 1.0))
    return LlamaConfig(
        **sizes,
        vocabulary=len(fields["tokenizer.ggml.tokens"]),
        rope_theta=float(number(fields, "llama.rope.freq_base", 10000.0)),
        rope_divisors=divisors,
        epsilon=float(number(fields, "llama.attention.layer_norm_rms_epsilon", 1e-5)),
        tied=GGUF.of("head") not in tensors,
    )


# Ways to extend a model's first context, by the hub's names.
SCALINGS = ("default", "linear", "llama3")


def rope_divisors(
    said: Mapping[str, Any], theta: float, head_width: int
) -> tuple[float, ...] | None:
    """What each pair's frequency is divided by."""
    kind = said.get("rope_type", said.get("type")) or "default"
    if kind not in SCALINGS:
        raise ValueError(
            f"generate: knows the rotary embeddings {', '.join(SCALINGS)}, got rope_type={kind!r}"
        )
    if kind == "default":
        return None
    factor = number(said, "factor")
    if kind == "linear":
        return (factor,) * (head_width // 2)
    # Frequencies whose waves are long are lower by the factor, short ones as they are: 0 for waves
    # that fit in the original context `low` times, 1 for `high` times.
    names = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    low, high, original = (number(said, name) for name in names)
    waves = 2 * np.pi * theta ** (2 * np.arange(head_width // 2) / head_width)
    share = np.clip((original / waves - low) / (high - low), 0, 1)
    return tuple((1 / ((1 - share) / factor + share)).tolist())
