"""Products for Flax's own linen layers that own their random stream.

Flax calls what its `*_cls` arguments hold to make the product, and then calls that. Here both are
one module: called without arguments it gives itself.
"""

from typing import Any

import flax.linen as flax_nn
import jax

from mx_jax.nn.randomness import RNG_STREAM, layer_key
from mx_jax.ops.arguments import as_recipe
from mx_jax.ops.dot_general import RecipeDotGeneral
from mx_jax.ops.einsum import einsum
from mx_jax.recipes import Recipe


class Operation(flax_nn.Module):
    """What the two have in common.

    Attributes:
      recipe: what to quantize in the product and in its two gradients, or a recipe's name.
      stream: name of the stream that keys come from; a stack that hands its modules no stream of
        that name may have another, such as `"params"`.
    """

    recipe: Recipe | str
    stream: str = RNG_STREAM

    def __post_init__(self):
        # A name gives way to its recipe, so that equal layers have equal fields.
        self.recipe = as_recipe(self.recipe, type(self).__name__, Recipe)
        super().__post_init__()

    def _recipe_and_key(self) -> tuple[Recipe, jax.Array | None]:
        assert isinstance(self.recipe, Recipe)
        return self.recipe, layer_key(self, self.recipe, self.stream)


class DotGeneral(Operation):
    """A `dot_general_cls` for Flax's own linen layers, for stochastic recipes too.

    `recipe.dot_general` has no stream; this has one of its own, `"quantize"`, at its place in the
    model. Give it as it is: equal recipes make equal modules, so that a rebuilt model is not
    retraced. It has no parameters; a checkpoint is the one of the layer without it.

    Attributes:
      recipe: what to quantize in the product and in its two gradients, or a recipe's name.
      stream: name of the stream that keys come from.

    Examples:
      >>> import flax.linen as nn, jax, jax.numpy as jnp, mx_jax
      >>> recipe = mx_jax.recipes.mxfp4_stochastic()
      >>> layer = nn.Dense(8, dot_general_cls=mx_jax.nn.linen.DotGeneral(recipe))
      >>> x = jnp.ones((2, 64))
      >>> variables = layer.init(jax.random.key(0), x)
      >>> layer.apply(variables, x, rngs={"quantize": jax.random.key(1)}).shape
      (2, 8)
    """

    def __call__(self, *args: Any, **options: Any) -> Any:
        """See `mx_jax.dot_general`; without arguments, the module itself."""
        if not args and not options:
            return self
        recipe, key = self._recipe_and_key()
        return RecipeDotGeneral(recipe=recipe)(*args, **options, key=key)


class EinsumOp(Operation):
    """An einsum for Flax's own linen layers, for stochastic recipes too.

    Flax's attention takes it as `qk_attn_weights_einsum_cls` and `attn_weights_value_einsum_cls`.

    Attributes:
      recipe: what to quantize in the product and in its two gradients, or a recipe's name.
      stream: name of the stream that keys come from.

    Examples:
      >>> import flax.linen as nn, jax, jax.numpy as jnp, mx_jax
      >>> einsum = mx_jax.nn.linen.EinsumOp(mx_jax.recipes.mxfp8())
      >>> attention = nn.MultiHeadDotProductAttention(
      ...     num_heads=2, qk_attn_weights_einsum_cls=einsum, attn_weights_value_einsum_cls=einsum
      ... )
      >>> attention.init_with_output(jax.random.key(0), jnp.ones((1, 5, 64)))[0].shape
      (1, 5, 64)
    """

    def __call__(self, *args: Any, **options: Any) -> Any:
        """See `mx_jax.einsum`; without arguments, the module itself."""
        if not args and not options:
            return self
        recipe, key = self._recipe_and_key()
        return einsum(*args, **options, recipe=recipe, key=key)
