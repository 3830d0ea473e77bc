"""Weights that stay in their format: in trees, in linen's parameters, in `flax.serialization`.

Codes have no gradient: `jax.grad` of a tree that holds them fails on their integers. So the tree is
split, and the gradient is taken of the part of floating-point arrays.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as flax_nn
import jax
from flax import serialization
from flax.errors import ScopeParamShapeError
from flax.typing import PathParts

from mx_jax.mxarray import MXArray
from mx_jax.nn.cache import CacheRows, KVCache
from mx_jax.packed import Quantized


def quantized_in(value: object) -> Quantized | None:
    """The quantized weights that a parameter is, within Flax's boxes or without; else None."""
    leaves = jax.tree.leaves(value, is_leaf=lambda leaf: isinstance(leaf, Quantized))
    return leaves[0] if len(leaves) == 1 and isinstance(leaves[0], Quantized) else None


def split_stored(params: object) -> tuple[Any, Any]:
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


def join_stored(trained: object, stored: object) -> Any:
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

    def is_leaf(x: object) -> bool:
        return x is None or _is_stored(x)

    places, other = (jax.tree.structure(tree, is_leaf=is_leaf) for tree in (trained, stored))
    if places != other:
        raise ValueError(
            "join_stored: both trees must come from one split_stored, got structures "
            f"trained={places} and stored={other}"
        )
    return jax.tree.map(lambda x, y: y if x is None else x, trained, stored, is_leaf=is_leaf)


def trainable(path: PathParts, value: object) -> bool:
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
    # Late: programs of flax.linen alone need not wait for it.
    from flax import nnx

    return nnx.OfType(nnx.Param)(path, value) and quantized_in(value) is None


# The module of JAX's own initializers.
_OF_JAX = jax.nn.initializers.lecun_normal().__module__


def _is_stored(x: object) -> bool:
    return isinstance(x, Quantized)


def stored_param(
    layer: flax_nn.Module,
    param: Callable[..., Any],
    name: str,
    init_fn: Callable[..., Any],
    *init_args: object,
    **options: object,
) -> Any:
    """`Module.param`, as Flax has it, whose value may be an MXArray or PackedMXArray.

    Flax compares the arrays that a value consists of with those of its initializer. Quantized
    weights consist of others, so it is their own shape that has to agree.

    Raises:
      flax.errors.ScopeParamShapeError: weights of another shape.
    """
    scope = layer.scope
    value = None
    if scope is not None and scope.has_variable("params", name):
        value = scope.get_variable("params", name)
    weights = quantized_in(value)
    if scope is None or weights is None:
        return param(name, init_fn, *init_args, **options)
    unbox = options.pop("unbox", True)
    if init_args and getattr(init_fn, "__module__", None) == _OF_JAX:
        # Those take it as it is; their random numbers take longer to trace than the layer.
        shape = init_args[0]
    else:
        declared = jax.eval_shape(lambda: init_fn(jax.random.key(0), *init_args, **options))
        (shape,) = (leaf.shape for leaf in jax.tree.leaves(declared))
    if weights.shape != shape:
        raise ScopeParamShapeError(name, scope.path_text, weights.shape, shape)
    return param(name, lambda key: value, unbox=unbox)


class StoredParams:
    """A mixin for linen modules that use quantized weights, packed or not, as they are.

    Put it before `flax.linen.Module` in the bases of a layer of your own whose parameters go to
    `mx_jax.matmul`, `dot_general` or `einsum`. Modules that `convert.linen` has converted, and all
    modules in them, need it not.

    Examples:
      >>> import flax.linen as nn, jax.numpy as jnp, mx_jax
      >>> recipe = mx_jax.recipes.weight_only("mxfp4")
      >>> class Up(mx_jax.nn.linen.StoredParams, nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x):
      ...         kernel = self.param("kernel", nn.initializers.ones, (64, 8))
      ...         return mx_jax.matmul(x, kernel, recipe=recipe)
      >>> kernel = mx_jax.pack_weights(mx_jax.quantize(jnp.ones((64, 8)), "mxfp4", axis=0))
      >>> Up().apply({"params": {"kernel": kernel}}, jnp.ones((2, 64))).shape
      (2, 8)
    """

    @flax_nn.nowrap
    def param(
        self, name: str, init_fn: Callable[..., Any], *init_args: object, **options: object
    ) -> Any:
        """See `flax.linen.Module.param`."""
        layer: Any = self
        return stored_param(layer, super().param, name, init_fn, *init_args, **options)  # pyright: ignore[reportAttributeAccessIssue]


# flax.serialization -------------------------------------------------------------------------------
#
# State dicts hold the arrays of MXArrays and caches, and of MXArrays what they are: a cache needs a
# target. Linen takes every attribute of a module apart and puts it together again this way, also
# while it is traced: so nothing is computed here, and codes are one in a byte.


def _state(x: MXArray) -> dict[str, Any]:
    # Late, as below: whoever imports the layers pays for no reader of checkpoints.
    from mx_jax.checkpoint import wire

    state = {
        wire.DESCRIPTION: wire.description(x, packed=False),
        wire.CODES: x.codes,
        wire.SCALES: x.scales,
    }
    return state if x.tensor_scale is None else state | {wire.TENSOR_SCALE: x.tensor_scale}


def _restored(target: MXArray, state: Mapping[str, Any]) -> MXArray:
    """What was saved; its shape must be the target's, its format may be another."""
    from mx_jax.checkpoint import wire

    own = {
        wire.CODES: target.codes,
        wire.SCALES: target.scales,
        wire.TENSOR_SCALE: target.tensor_scale,
    }
    if all(state.get(name) is array for name, array in own.items()):
        return target
    found = wire.from_wire(state)
    if not isinstance(found, MXArray) or found.shape != target.shape:
        raise ValueError(
            f"flax.serialization: needs the state of an MXArray of shape={target.shape}, got "
            f"{type(found).__name__} of shape={getattr(found, 'shape', None)}"
        )
    return found


def _arrays(x: object) -> dict[str, Any]:
    """The state dict of a cache, or of its rows: what of it is arrays."""
    children, _ = jax.tree_util.default_registry.flatten_one_level_with_keys(x)
    return {
        key.name: serialization.to_state_dict(child) for key, child in children if child is not None
    }


def _with_arrays(target: KVCache | CacheRows, state: Mapping[str, Any]) -> KVCache | CacheRows:
    """What was saved; the target's own fields say what it is."""
    own = _arrays(target)
    if own.keys() != state.keys():
        raise ValueError(
            f"flax.serialization: needs the state of a {type(target).__name__} with the fields "
            f"{sorted(own)}, got {sorted(state)}; take a target of the same format"
        )
    restored = {
        name: serialization.from_state_dict(getattr(target, name), part, name)
        for name, part in state.items()
    }
    return dataclasses.replace(target, **restored)


def register_serialization() -> None:
    """Register MXArrays and key-value caches with `flax.serialization`."""
    serialization.register_serialization_state(MXArray, _state, _restored, override=True)
    for own in (CacheRows, KVCache):
        serialization.register_serialization_state(own, _arrays, _with_arrays, override=True)
