"""Weights of a GGUF file as the model's parameters, and what they are quantized to."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mx_jax.generate.config import LlamaConfig
from mx_jax.ops.packing import pack_weights
from mx_jax.ops.quantize import quantize_operand
from mx_jax.recipes import Recipe

ARCHITECTURE = "llama"


def config_from_gguf(metadata: Mapping[str, Any], names: Any) -> LlamaConfig:
    """The sizes that a GGUF file states.

    Args:
      metadata: its fields by name.
      names: those of its tensors.

    Raises:
      ValueError: a model of another family, or a field that is missing.
    """
    family = metadata.get("general.architecture")
    if family != ARCHITECTURE:
        raise ValueError(
            f"generate: reads models of the {ARCHITECTURE} family, got "
            f"general.architecture={family!r}"
        )

    def field(name: str, default: Any = None) -> Any:
        value = metadata.get(f"{ARCHITECTURE}.{name}", default)
        if value is None:
            raise ValueError(f"generate: the file lacks the field {ARCHITECTURE}.{name}")
        return value

    heads, width = int(field("attention.head_count")), int(field("embedding_length"))
    return LlamaConfig(
        vocabulary=len(metadata["tokenizer.ggml.tokens"]),
        width=width,
        layers=int(field("block_count")),
        heads=heads,
        kv_heads=int(field("attention.head_count_kv", heads)),
        head_width=int(field("rope.dimension_count", width // heads)),
        hidden=int(field("feed_forward_length")),
        rope_theta=float(field("rope.freq_base", 10000.0)),
        epsilon=float(field("attention.layer_norm_rms_epsilon", 1e-5)),
        context=int(field("context_length", 2048)),
        tied="output.weight" not in names,
    )


def params_from_gguf(tensors: Mapping[str, Any], config: LlamaConfig) -> dict[str, Any]:
    """The model's parameters, float32, from tensors by llama.cpp's names.

    Args:
      tensors: values `[out, in]`, arrays or what becomes one.
      config: sizes of the model.

    Raises:
      ValueError: a tensor that is missing or of another shape.
    """

    def values(name: str, *shape: int) -> np.ndarray:
        if name not in tensors:
            raise ValueError(f"generate: the file lacks the tensor {name!r}")
        found = np.asarray(tensors[name], np.float32)
        if found.shape != shape:
            raise ValueError(
                f"generate: tensor {name!r} must have shape={shape}, got shape={found.shape}"
            )
        return found

    width, hidden, head = config.width, config.hidden, config.head_width

    def block(index: int) -> dict[str, Any]:
        def of(name: str, *shape: int) -> np.ndarray:
            return values(f"blk.{index}.{name}.weight", *shape)

        query = of("attn_q", config.heads * head, width)
        key = of("attn_k", config.kv_heads * head, width)
        value = of("attn_v", config.kv_heads * head, width)
        qkv = [_halves(query, head), _halves(key, head), value]
        gate_up = [of("ffn_gate", hidden, width), of("ffn_up", hidden, width)]
        return {
            "attention_norm": {"scale": of("attn_norm", width)},
            "qkv": {"kernel": np.concatenate(qkv).T},
            "attention_out": {"kernel": of("attn_output", width, config.heads * head).T},
            "feed_forward_norm": {"scale": of("ffn_norm", width)},
            "gate_up": {"kernel": np.concatenate(gate_up).T},
            "down": {"kernel": of("ffn_down", width, hidden).T},
        }

    params: dict[str, Any] = {
        "embedding": values("token_embd.weight", config.vocabulary, width),
        "norm": {"scale": values("output_norm.weight", width)},
    }
    if not config.tied:
        params["head"] = values("output.weight", config.vocabulary, width)
    params |= {f"layers_{index}": block(index) for index in range(config.layers)}
    return jax.tree.map(jnp.asarray, params)


def _halves(weights: np.ndarray, head_width: int) -> np.ndarray:
    """Rows of heads whose turned pairs lie next to each other, as llama.cpp has them, put apart."""
    pairs = weights.reshape(-1, head_width // 2, 2, weights.shape[-1])
    return pairs.swapaxes(1, 2).reshape(weights.shape)


def quantize_params(params: Mapping[str, Any], recipe: Recipe) -> dict[str, Any]:
    """Parameters whose matrices are quantized as the recipe's products take them, and packed.

    Norms stay as they are. A tied embedding is the head's matrix, and is looked up in it.

    Args:
      params: of the model, as `params_from_gguf` gives them.
      recipe: its forward product says what becomes of weights; None there leaves them.
    """
    spec = recipe.fwd.rhs
    if spec is None:
        return dict(params)

    def quantized(path: Any, leaf: Any) -> Any:
        if leaf.ndim != 2:
            return leaf
        # A kernel is `[in, out]`; the embedding and the head contract their last axis.
        axis = -2 if path[-1].key == "kernel" else -1
        stored = quantize_operand(leaf, spec, ((axis, spec.format.block[1]),))
        return pack_weights(stored, recipe=recipe)

    return jax.tree_util.tree_map_with_path(quantized, dict(params))
