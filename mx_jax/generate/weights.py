"""Tensors of a checkpoint as the model's parameters, and what they are quantized to."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mx_jax.calibrate.ways import Way
from mx_jax.generate.config import GGUF, LlamaConfig, Names
from mx_jax.generate.model import PARTS
from mx_jax.mxarray import MXArray
from mx_jax.ops.packing import pack_weights
from mx_jax.ops.quantize import quantize_operand
from mx_jax.recipes import Recipe


def params_from_gguf(tensors: Mapping[str, Any], config: LlamaConfig) -> dict[str, Any]:
    """`params_of` of tensors by llama.cpp's names."""
    return params_of(tensors, config, GGUF)


def params_of(
    tensors: Mapping[str, Any], config: LlamaConfig, names: Names, *, stored: bool = False
) -> dict[str, Any]:
    """The model's parameters from a checkpoint's tensors.

    Args:
      tensors: values `[out, in]`, arrays, MXArrays or what becomes an array.
      config: sizes of the model.
      names: of the tensors.
      stored: whether MXArrays stay what they are; else all become float32 arrays.

    Returns:
      Parameters of `Llama`. Kernels that read the same input are one where their codes can be: not
      where each has a tensor scale of its own, or another format.

    Raises:
      ValueError: a tensor that is missing or of another shape.
    """

    def values(field: str, index: int | None = None) -> Any:
        name = names.of(field, index)
        if name not in tensors:
            raise ValueError(f"generate: the file lacks the tensor {name!r}")
        found = tensors[name]
        if not (stored and isinstance(found, MXArray)):
            found = np.asarray(found, np.float32)
        if found.shape != (needed := config.shape(field)):
            raise ValueError(
                f"generate: tensor {name!r} must have shape={needed}, got shape={found.shape}"
            )
        turned = names.adjacent and field in ("query", "key")
        return _halves(found, config.head_width) if turned else found

    params: dict[str, Any] = {
        "embedding": values("embedding"),
        "norm": {"scale": values("norm")},
    }
    if not config.tied:
        params["head"] = values("head")
    for index in range(config.layers):
        params[f"layers_{index}"] = _block(functools.partial(values, index=index))
    return jax.tree.map(jnp.asarray, params)


def _block(values: Callable[[str], Any]) -> dict[str, Any]:
    """Parameters of a `Block`, from its tensors by the fields of `Names`."""
    params: dict[str, Any] = {
        "attention_norm": {"scale": values("attention_norm")},
        "attention_out": {"kernel": values("out").T},
        "feed_forward_norm": {"scale": values("feed_forward_norm")},
        "down": {"kernel": values("down").T},
    }
    for name, parts in PARTS.items():
        params |= _kernels(name, {part: values(part) for part in parts})
    return params


def _kernels(name: str, parts: Mapping[str, Any]) -> dict[str, Any]:
    """Parts of a product, `[out, in]` each, as one kernel, or where that cannot be as several."""
    whole = joined(list(parts.values()))
    if whole is not None:
        return {name: {"kernel": whole.T}}
    return {part: {"kernel": kernel.T} for part, kernel in parts.items()}


def joined(parts: Sequence[Any]) -> Any:
    """Matrices below each other; None of MXArrays whose tensor scales differ, or their formats."""
    quantized = [part for part in parts if isinstance(part, MXArray)]
    if not quantized:
        return np.concatenate(parts)
    kinds = {(x.format, x.blocks, x.dtype) for x in quantized}
    axes = {axis % x.ndim for x in quantized for axis, _ in x.blocks}
    # One for the whole matrix, the same for all: the one that the joined codes keep.
    whole = {
        None if x.tensor_scale is None else np.asarray(x.tensor_scale).tobytes() for x in quantized
    }
    if len(quantized) < len(parts) or len(kinds) > 1 or axes != {1} or len(whole) > 1:
        return None
    return dataclasses.replace(
        quantized[0],
        codes=jnp.concatenate([part.codes for part in quantized]),
        scales=jnp.concatenate([part.scales for part in quantized]),
    )


def _halves(weights: Any, head_width: int) -> Any:
    """Rows of heads whose turned pairs lie next to each other, as llama.cpp has them, put apart."""
    pairs = weights.reshape(-1, head_width // 2, 2, weights.shape[-1])
    return pairs.transpose(0, 2, 1, 3).reshape(weights.shape)


def quantize_params(
    params: Mapping[str, Any], recipe: Recipe, by: Way | None = None
) -> dict[str, Any]:
    """Parameters whose matrices are quantized as the recipe's products take them, and packed.

    Norms stay as they are. A tied embedding is the head's matrix, and is looked up in it.

    Args:
      params: of the model, as `params_of` gives them.
      recipe: its forward product says what becomes of weights; None there leaves them, and packs
        what is quantized already.
      by: how codes are chosen, if not as the products would: see `mx_jax.calibrate`.
    """
    spec = recipe.fwd.rhs

    def quantized(path: Any, leaf: Any) -> Any:
        if isinstance(leaf, MXArray):
            return pack_weights(leaf, recipe=recipe)
        if spec is None or leaf.ndim != 2:
            return leaf
        # A kernel is `[in, out]`; the embedding and the head contract their last axis.
        *layer, last = (key.key for key in path)
        axis = -2 if last == "kernel" else -1
        if by is None:
            stored = quantize_operand(leaf, spec, ((axis, spec.format.block[1]),))
        else:
            name = "/".join(layer) if last == "kernel" else last
            stored = by((name,), leaf, spec.format, axis, looked_up=last == "embedding")
        return pack_weights(stored, recipe=recipe)

    return jax.tree_util.tree_map_with_path(
        quantized, dict(params), is_leaf=lambda leaf: isinstance(leaf, MXArray)
    )
