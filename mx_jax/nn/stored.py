"""flax.linen parameters that hold quantized weights instead of the arrays they are declared as."""

from collections.abc import Callable
from typing import Any

import flax.linen as flax_nn
import jax
from flax.errors import ScopeParamShapeError

from mx_jax.packed import Quantized


def stored_param(
    layer: flax_nn.Module,
    param: Callable[..., Any],
    name: str,
    init_fn: Callable[..., Any],
    *init_args: Any,
    **options: Any,
) -> Any:
    """`Module.param` whose value may be an MXArray or PackedMXArray of the declared shape.

    Flax compares the arrays that a value consists of with those of its initializer. Quantized
    weights consist of others, so it is their own shape that has to agree.

    Args:
      layer: the module.
      param: its `param`, as Flax has it.
      name: the parameter's.
      init_fn: its initializer.
      *init_args: arguments of the initializer.
      **options: `unbox`, and keyword arguments of the initializer.

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
    declared = jax.eval_shape(lambda: init_fn(jax.random.key(0), *init_args, **options))
    (shape,) = (leaf.shape for leaf in jax.tree.leaves(declared))
    if weights.shape != shape:
        raise ScopeParamShapeError(name, scope.path_text, weights.shape, shape)
    return param(name, lambda key: value, unbox=unbox)


def quantized_in(value: Any) -> Quantized | None:
    """The quantized weights that a parameter is, within Flax's boxes or without; else None."""
    leaves = jax.tree.leaves(value, is_leaf=lambda leaf: isinstance(leaf, Quantized))
    return leaves[0] if len(leaves) == 1 and isinstance(leaves[0], Quantized) else None


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
    def param(self, name: str, init_fn: Callable[..., Any], *init_args: Any, **options: Any) -> Any:
        """See `flax.linen.Module.param`."""
        layer: Any = self
        return stored_param(layer, super().param, name, init_fn, *init_args, **options)  # pyright: ignore[reportAttributeAccessIssue]
