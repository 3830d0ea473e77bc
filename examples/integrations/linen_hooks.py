"""Flax linen's own layers in four bits, by their own arguments: `python linen_hooks.py`.

Recipes with stochastic rounding too: `DotGeneral` and `EinsumOp` draw from the stream "quantize".
"""

from typing import Any

import flax.linen as nn
import jax
from shared import CLASSES, FEATURES, Report, run_command, show, train_linen

from mx_jax.nn.linen import DotGeneral, EinsumOp

RECIPE = "mxfp4_stochastic"


class Model(nn.Module):
    """An attention, a layer after it, and a head in float32."""

    recipe: Any = RECIPE

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        product = DotGeneral(self.recipe)
        attention = nn.MultiHeadDotProductAttention(
            num_heads=2,
            qkv_dot_general_cls=product,
            out_dot_general_cls=product,
            qk_attn_weights_einsum_cls=EinsumOp("mxfp8"),
            attn_weights_value_einsum_cls=EinsumOp("mxfp8"),
            name="attention",
        )
        x = x + attention(nn.LayerNorm()(x))
        x = x + nn.gelu(nn.Dense(FEATURES, dot_general_cls=product, name="mlp")(x))
        return nn.Dense(CLASSES, name="head")(x.mean(axis=1))


def main(steps: int = 20) -> tuple[list[float], Report]:
    losses, layers = train_linen(Model(), steps)
    show([layers])
    return losses, layers


if __name__ == "__main__":
    run_command(main, __doc__)
