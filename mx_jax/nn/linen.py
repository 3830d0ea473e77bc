"""flax.linen layers that hand a recipe to the matmul; parameters, names and shapes are Flax's.

A layer of the same name loads the checkpoint of Flax's own. A kernel may also be an `MXArray`
blocked along its contracting axis, or what `pack_weights` makes of it, and is used as it is.
"""

import dataclasses
from typing import Any

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
from flax.linen import module as flax_module
from flax.linen.dtypes import promote_dtype

from mx_jax.nn.delayed import DelayedDotGeneral as DelayedDotGeneral
from mx_jax.nn.errors import named_in_errors
from mx_jax.nn.metadata import layer_recipe, linen_recipe
from mx_jax.nn.operations import DotGeneral as DotGeneral
from mx_jax.nn.operations import EinsumOp as EinsumOp
from mx_jax.nn.randomness import RNG_STREAM as RNG_STREAM
from mx_jax.nn.randomness import layer_key
from mx_jax.nn.stored import StoredParams as StoredParams
from mx_jax.ops.dot_general import dot_general
from mx_jax.ops.einsum import einsum
from mx_jax.packed import Quantized, with_dtype
from mx_jax.recipes import Recipe


def promote_operands(*args: Any, dtype: Any = None, inexact: bool = True) -> list[Any]:
    """Flax's `promote_dtype`, which only tells MXArrays what they are to be read as."""
    plain = [jnp.zeros((), arg.dtype) if isinstance(arg, Quantized) else arg for arg in args]
    promoted = promote_dtype(*plain, dtype=dtype, inexact=inexact)
    return [
        with_dtype(arg, value.dtype) if isinstance(arg, Quantized) else value
        for arg, value in zip(args, promoted, strict=True)
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _LayerDotGeneral:
    """The recipe's dot_general with a key from the layer's stream. Equal if the recipes are."""

    recipe: Recipe
    layer: Any = dataclasses.field(compare=False, repr=False)

    def __call__(self, *args: Any, **options: Any) -> jax.Array:
        with named_in_errors(_name(self.layer)):
            key = layer_key(self.layer, self.recipe)
            recipe = self.recipe
            if recipe.gather is not None:
                recipe = linen_recipe(self.layer, recipe)
            return dot_general(*args, **options, recipe=recipe, key=key)


def _name(layer: flax_nn.Module) -> str:
    return f"{'/'.join(layer.path)!r} ({type(layer).__name__})"


def _inject(layer: Any) -> None:
    """Set the recipe as the layer's dot_general, unless the user chose another.

    A name gives way to its recipe, so that equal layers have equal fields.

    Flax clones a layer, attributes and all, when it binds it: a clone's callable must draw from
    the clone.
    """
    layer.recipe = layer_recipe(layer.recipe, layer.gather, type(layer).__name__)
    if layer.dot_general_cls is not None:
        return
    if layer.dot_general is None or isinstance(layer.dot_general, _LayerDotGeneral):
        layer.dot_general = _LayerDotGeneral(recipe=layer.recipe, layer=layer)


class Dense(StoredParams, flax_nn.Dense):
    """`flax.linen.Dense` with a recipe.

    Attributes:
      recipe: what to quantize in the product and in its two gradients, or a recipe's name.
      gather: as the recipe's own, in place of it: see `mx_jax.sharding.Gather`.

    Examples:
      >>> import jax, jax.numpy as jnp, mx_jax
      >>> layer = mx_jax.nn.linen.Dense(8, recipe=mx_jax.recipes.mxfp8())
      >>> variables = layer.init(jax.random.key(0), jnp.ones((2, 64)))
      >>> jax.tree.map(jnp.shape, variables)
      {'params': {'bias': (8,), 'kernel': (64, 8)}}
    """

    promote_dtype: Any = promote_operands
    recipe: Recipe | str = dataclasses.field(kw_only=True)
    gather: Any = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self):
        _inject(self)
        super().__post_init__()


class DenseGeneral(StoredParams, flax_nn.DenseGeneral):
    """`flax.linen.DenseGeneral` with a recipe; blocks lie along the last of its `axis`.

    Attributes:
      recipe: what to quantize in the product and in its two gradients, or a recipe's name.
      gather: as the recipe's own, in place of it: see `mx_jax.sharding.Gather`.

    Examples:
      >>> import jax, jax.numpy as jnp, mx_jax
      >>> heads = mx_jax.nn.linen.DenseGeneral((4, 8), recipe="mxfp8")
      >>> variables = jax.eval_shape(heads.init, jax.random.key(0), jnp.ones((2, 64)))
      >>> jax.tree.map(jnp.shape, variables)
      {'params': {'bias': (4, 8), 'kernel': (64, 4, 8)}}
    """

    promote_dtype: Any = promote_operands
    recipe: Recipe | str = dataclasses.field(kw_only=True)
    gather: Any = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self):
        _inject(self)
        super().__post_init__()


class Einsum(StoredParams, flax_nn.Einsum):
    """`flax.linen.Einsum` with a recipe.

    Attributes:
      recipe: what to quantize in the product and in its two gradients, or a recipe's name.
      gather: as the recipe's own, in place of it: see `mx_jax.sharding.Gather`.

    Examples:
      >>> import jax, jax.numpy as jnp, mx_jax
      >>> layer = mx_jax.nn.linen.Einsum((4, 64, 8), "bgd,gdf->bgf", recipe="mxfp8")
      >>> y, _ = jax.eval_shape(layer.init_with_output, jax.random.key(0), jnp.ones((2, 4, 64)))
      >>> y.shape
      (2, 4, 8)
    """

    promote_dtype: Any = promote_operands
    recipe: Recipe | str = dataclasses.field(kw_only=True)
    gather: Any = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self):
        self.recipe = layer_recipe(self.recipe, self.gather, type(self).__name__)
        super().__post_init__()

    @flax_nn.compact
    def __call__(self, inputs: jax.Array, einsum_str: str | None = None) -> jax.Array:
        """Apply the einsum to inputs and kernel.

        Flax's own method calls jnp.einsum by name, so it cannot be injected and is restated here.

        Args:
          inputs: left operand.
          einsum_str: subscripts, unless given to the constructor.

        Returns:
          The product, plus the bias.
        """
        subscripts = flax_module.merge_param("einsum_str", self.einsum_str, einsum_str)
        subscripts = subscripts.replace(" ", "")
        assert isinstance(self.recipe, Recipe)
        if "->" not in subscripts:
            raise ValueError(f"Einsum: needs explicit subscripts with '->', got {subscripts!r}")
        if subscripts.count(",") != 1:
            raise ValueError(f"Einsum: needs exactly two operands, got {subscripts!r}")
        kernel = self.param("kernel", self.kernel_init, self.shape, self.param_dtype)
        bias = broadcast_shape = None
        if self.use_bias:
            shape, broadcast_shape = self._get_bias_shape(subscripts, inputs, kernel)
            bias = self.param("bias", self.bias_init, shape, self.param_dtype)
        inputs, kernel, bias = self.promote_dtype(inputs, kernel, bias, dtype=self.dtype)
        with named_in_errors(_name(self)):
            product = einsum(
                subscripts,
                inputs,
                kernel,
                recipe=linen_recipe(self, self.recipe),
                precision=self.precision,
                preferred_element_type=self.preferred_element_type,
                key=layer_key(self, self.recipe),
            )
        return product if bias is None else product + jnp.reshape(bias, broadcast_shape)
