"""Where flax.linen layers and products take their random bits from."""

import flax.linen as flax_nn
import jax

from mx_jax.specs import MatmulRecipe

# Flax's name of the stream that stochastic recipes draw from.
RNG_STREAM = "quantize"


def layer_key(
    layer: flax_nn.Module,
    recipe: MatmulRecipe,
    stream: str = RNG_STREAM,
    *,
    name: str | None = None,
) -> jax.Array | None:
    """A key from a bound module's stream, if the recipe draws random bits.

    As everywhere in Flax, `"params"` stands in for a stream that is not there: nn.scan and nn.vmap
    pass on only the streams that they list, and every model lists that one. Without either None,
    where only the gradients draw: they say when they are taken.

    Args:
      layer: the module.
      recipe: its recipe.
      stream: name of the stream.
      name: what the error calls the layer; None: its type.

    Raises:
      ValueError: both streams are missing, and the forward product draws.
    """
    if not recipe.is_stochastic:
        return None
    if layer.has_rng(stream):
        return layer.make_rng(stream)
    if layer.is_initializing():
        # The values that init computes are thrown away. Drawing from "params" here would change
        # what the next parameter is drawn from.
        return jax.random.key(0)
    if layer.has_rng("params"):
        return layer.make_rng("params")
    if not recipe.fwd.is_stochastic:
        return None
    raise ValueError(
        f"{name or type(layer).__name__}: recipe {recipe.name!r} draws random bits and needs the "
        f"{stream!r} stream; call apply(..., rngs={{{stream!r}: key}}). Below nn.scan or nn.vmap, "
        f"list {stream!r} in split_rngs, or pass the key as 'params', a stream that they list "
        "already"
    )
