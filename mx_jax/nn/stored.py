"""Weights that stay in their format: told apart from what is trained, and joined with it again.

Codes have no gradient: `jax.grad` of a tree that holds them fails on their integers. So the tree is
split, and the gradient is taken of the part of floating-point arrays.
"""

from typing import Any

import jax
from flax import nnx

from mx_jax.packed import Quantized


def quantized_in(value: Any) -> Quantized | None:
    """The quantized weights that a parameter is, within Flax's boxes or without; else None."""
    leaves = jax.tree.leaves(value, is_leaf=lambda leaf: isinstance(leaf, Quantized))
    return leaves[0] if len(leaves) == 1 and isinstance(leaves[0], Quantized) else None


def split_stored(params: Any) -> tuple[Any, Any]:
    """Parameters as two trees of their structure: arrays to train, and quantized weights.

    Args:
      params: a tree whose quantized weights are `MXArray` or `PackedMXArray`, as `convert.weights`
        gives it.

    Returns:
      (trained, stored), with None in each where the other has something. Optimizers and `jax.grad`
      take the first as it is.

    Raises:
      ValueError: nothing to train.

    Examples:
      >>> import jax, jax.numpy as jnp, mx_jax
      >>> kernel = mx_jax.quantize(jnp.ones((64, 8)), "mxfp4", axis=0)
      >>> trained, stored = mx_jax.nn.split_stored({"kernel": kernel, "bias": jnp.zeros(8)})
      >>> def loss(trained):
      ...     params = mx_jax.nn.join_stored(trained, stored)
      ...     recipe = mx_jax.recipes.weight_only("mxfp4")
      ...     x = jnp.ones((2, 64))
      ...     return (mx_jax.matmul(x, params["kernel"], recipe=recipe) + params["bias"]).sum()
      >>> jax.grad(loss)(trained)["bias"]
      Array([2., 2., 2., 2., 2., 2., 2., 2.], dtype=float32)
    """
    trained = jax.tree.map(lambda x: None if _is_stored(x) else x, params, is_leaf=_is_stored)
    stored = jax.tree.map(lambda x: x if _is_stored(x) else None, params, is_leaf=_is_stored)
    if not jax.tree.leaves(trained):
        count = len(jax.tree.leaves(stored, is_leaf=_is_stored))
        raise ValueError(
            f"split_stored: nothing to train, all {count} parameters are quantized weights, which "
            "have no gradient; add adapters (nnx.LoRA), leave some layers to no rule of "
            "convert.weights, or train arrays straight through their cast, by a recipe "
            "weight_only(format)"
        )
    return trained, stored


def join_stored(trained: Any, stored: Any) -> Any:
    """The parameters of which `split_stored` made two trees.

    Raises:
      ValueError: trees of two structures.

    Examples:
      >>> import jax, jax.numpy as jnp, mx_jax
      >>> kernel = mx_jax.quantize(jnp.ones((64, 8)), "mxfp4", axis=0)
      >>> trained, stored = mx_jax.nn.split_stored({"kernel": kernel, "bias": jnp.zeros(8)})
      >>> stepped = jax.tree.map(lambda x: x + 1, trained)
      >>> params = mx_jax.nn.join_stored(stepped, stored)
      >>> params["kernel"] is kernel, float(params["bias"][0])
      (True, 1.0)
    """

    def is_leaf(x: Any) -> bool:
        return x is None or _is_stored(x)

    places, other = (jax.tree.structure(tree, is_leaf=is_leaf) for tree in (trained, stored))
    if places != other:
        raise ValueError(
            "join_stored: both trees must come from one split_stored, got structures "
            f"trained={places} and stored={other}"
        )
    return jax.tree.map(lambda x, y: y if x is None else x, trained, stored, is_leaf=is_leaf)


def trainable(path: Any, value: Any) -> bool:
    """A filter of nnx: parameters that have a gradient, so all but quantized weights.

    Examples:
      >>> import jax.numpy as jnp, mx_jax, optax
      >>> from flax import nnx
      >>> rule = mx_jax.convert.Rule(".*", mx_jax.recipes.weight_only("mxfp4"))
      >>> model = mx_jax.convert.weights(nnx.LoRALinear(64, 8, lora_rank=2, rngs=nnx.Rngs(0)), rule)
      >>> trained = mx_jax.nn.nnx.trainable
      >>> optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=trained)
      >>> loss = lambda model: model(jnp.ones((2, 64))).sum()
      >>> gradients = nnx.grad(loss, argnums=nnx.DiffState(0, trained))(model)
      >>> sorted(gradients)
      ['bias', 'lora']
    """
    return nnx.OfType(nnx.Param)(path, value) and quantized_in(value) is None


def _is_stored(x: Any) -> bool:
    return isinstance(x, Quantized)
