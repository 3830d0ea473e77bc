"""Products for nnx layers, Flax's own and ours.

Flax's nnx layers hand no key to what they multiply with. So an operation is a module, which keeps a
stream and so is part of the model's state, as dropout is. `RecipeEinsum` keeps none: our layers and
converted ones hand it a key.
"""

import dataclasses
from typing import Any

import jax
from flax import nnx

from mx_jax.nn.randomness import RNG_STREAM
from mx_jax.ops.arguments import as_recipe
from mx_jax.ops.dot_general import RecipeDotGeneral
from mx_jax.ops.einsum import einsum
from mx_jax.recipes import Recipe


class Operation(nnx.Module):
    """What the two have in common.

    Attributes:
      recipe: what to quantize in the product and in its two gradients.
      stream: where keys come from; None for a recipe that draws nothing.
    """

    def __init__(self, recipe: Recipe | str, *, rngs: nnx.Rngs | None = None):
        """Make it.

        Args:
          recipe: what to quantize in the product and in its two gradients, or a recipe's name.
          rngs: with a stream `"quantize"`, which is drawn from once; only a recipe that draws
            random bits needs it.

        Raises:
          ValueError: the recipe draws random bits, and there is no such stream.
        """
        name = type(self).__name__
        self.recipe: Any = nnx.static(as_recipe(recipe, name, Recipe))
        self.stream = nnx.data(_own_stream(rngs, name, self.recipe))

    def _key(self) -> jax.Array | None:
        if self.stream is None:
            return None
        stacked = self.stream.key.shape
        if stacked:
            raise ValueError(
                f"{type(self).__name__}: a layer of a stack got the streams {RNG_STREAM!r} of all "
                f"its layers, of shape={stacked}; where the stack is run, map them with the "
                "parameters, e.g. StateAxes({(nnx.Param, nnx.RngState): 0, ...: None})"
            )
        return self.stream()


def _own_stream(rngs: nnx.Rngs | None, name: str, recipe: Recipe) -> nnx.RngStream | None:
    """A stream that nothing else draws from: default streams would give two operations one key."""
    if not recipe.is_stochastic:
        return None
    if rngs is None or RNG_STREAM not in rngs:
        streams = "no rngs" if rngs is None else f"rngs with {', '.join(map(repr, rngs))}"
        raise ValueError(
            f"{name}: recipe {recipe.name!r} draws random bits and needs the {RNG_STREAM!r} "
            f"stream, got {streams}; pass rngs=nnx.Rngs(..., {RNG_STREAM}=seed)"
        )
    return nnx.RngStream(rngs[RNG_STREAM](), tag=RNG_STREAM)


class DotGeneral(Operation):
    """A `dot_general` for Flax's own nnx layers, for stochastic recipes too.

    `recipe.dot_general` has no stream; this keeps one, and every use of it takes the next key.
    Where layers share one, as the projections of an attention do, no two products have the same.

    Attributes:
      recipe: what to quantize in the product and in its two gradients.
      stream: where keys come from; None for a recipe that draws nothing.

    Examples:
      >>> import jax.numpy as jnp, mx_jax
      >>> from flax import nnx
      >>> rngs = nnx.Rngs(0, quantize=1)
      >>> product = mx_jax.nn.nnx.DotGeneral("mxfp4_stochastic", rngs=rngs)
      >>> layer = nnx.Linear(64, 8, dot_general=product, rngs=rngs)
      >>> layer(jnp.ones((2, 64))).shape, int(product.stream.count[...])
      ((2, 8), 1)
    """

    def __call__(self, *args: Any, **options: Any) -> jax.Array:
        """See `mx_jax.dot_general`."""
        return RecipeDotGeneral(recipe=self.recipe)(*args, **options, key=self._key())


class EinsumOp(Operation):
    """An `einsum_op` for Flax's own `nnx.Einsum`, for stochastic recipes too.

    Attributes:
      recipe: what to quantize in the product and in its two gradients.
      stream: where keys come from; None for a recipe that draws nothing.

    Examples:
      >>> import jax.numpy as jnp, mx_jax
      >>> from flax import nnx
      >>> product = mx_jax.nn.nnx.EinsumOp("mxfp8")
      >>> layer = nnx.Einsum("td,dhk->thk", (64, 2, 4), einsum_op=product, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((5, 64))).shape
      (5, 2, 4)
    """

    def __call__(self, *args: Any, **options: Any) -> jax.Array:
        """See `mx_jax.einsum`."""
        return einsum(*args, **options, recipe=self.recipe, key=self._key())


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class RecipeEinsum:
    """A drop-in for `jnp.einsum` of two operands; equal recipes make equal instances."""

    recipe: Recipe

    def __post_init__(self):
        object.__setattr__(self, "recipe", as_recipe(self.recipe, "RecipeEinsum", Recipe))

    def __call__(self, subscripts: str, lhs: Any, rhs: Any, **options: Any) -> jax.Array:
        """See `mx_jax.einsum`."""
        return einsum(subscripts, lhs, rhs, recipe=self.recipe, **options)
