"""Where flax.linen layers and products take their random bits from."""

from typing import Any

import flax.linen as flax_nn
import jax

from mx_jax.specs import MatmulRecipe

# Flax's name of the stream that stochastic recipes draw from.
RNG_STREAM = "quantize"


def layer_key(
    layer: flax_nn.Module, recipe: MatmulRecipe, stream: str = RNG_STREAM
) -> jax.Array | None:
    """A key from a bound module's stream, if the recipe draws random bits.

    Without the stream None, where only the gradients draw: they tell when they are taken.

    Raises:
      ValueError: the stream is missing, and the forward product draws.
    """
    if not recipe.is_stochastic:
        return None
    if layer.has_rng(stream):
        return layer.make_rng(stream)
    if layer.is_initializing():
        # The values that init computes are thrown away: asking for a key would only be in the way.
        return jax.random.key(0)
    if not recipe.fwd.is_stochastic:
        return None
    raise ValueError(missing_stream(type(layer).__name__, recipe, stream))


def missing_stream(layer: str, recipe: Any, stream: str = RNG_STREAM) -> str:
    """The error of a layer without the stream."""
    return (
        f"{layer}: recipe {recipe.name!r} draws random bits and needs the {stream!r} stream; "
        f"call apply(..., rngs={{{stream!r}: key}})"
    )
