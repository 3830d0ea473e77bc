"""Flax nnx's own layers in four bits, by their own arguments: `python nnx_hooks.py`.

`DotGeneral` and `EinsumOp` of mx_jax.nn.nnx keep a stream for stochastic rounding; recipes that
draw nothing may as well be given as `recipe.dot_general`. Attention's `qkv_dot_general` and
`qkv_dot_general_cls` reach its projections alone. nnx names nothing in the program by itself:
`jax.named_scope` does, for the report.
"""

from typing import Any

import jax
from flax import nnx
from shared import CLASSES, FEATURES, Report, run_command, show, train_nnx

from mx_jax.nn.nnx import DotGeneral, EinsumOp
from mx_jax.recipes import mxfp8

RECIPE = "mxfp4_stochastic"


class Model(nnx.Module):
    """An attention, two layers after it, and a head in float32."""

    def __init__(self, rngs: nnx.Rngs, recipe: Any = RECIPE):
        self.attention = nnx.MultiHeadAttention(
            num_heads=2,
            in_features=FEATURES,
            qkv_dot_general=DotGeneral(recipe, rngs=rngs),
            out_dot_general_cls=lambda: mxfp8().dot_general,
            decode=False,
            rngs=rngs,
        )
        self.up = nnx.Einsum(
            "btd,df->btf",
            (FEATURES, 2 * FEATURES),
            (2 * FEATURES,),
            einsum_op=EinsumOp(recipe, rngs=rngs),
            rngs=rngs,
        )
        self.down = nnx.Linear(
            2 * FEATURES, FEATURES, dot_general=DotGeneral(recipe, rngs=rngs), rngs=rngs
        )
        self.head = nnx.Linear(FEATURES, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        with jax.named_scope("attention"):
            x = x + self.attention(x)
        with jax.named_scope("up"):
            up = nnx.gelu(self.up(x))
        with jax.named_scope("down"):
            x = x + self.down(up)
        with jax.named_scope("head"):
            return self.head(x.mean(axis=1))


def main(steps: int = 20) -> tuple[list[float], Report]:
    losses, layers = train_nnx(Model(nnx.Rngs(0, quantize=1)), steps)
    show([layers])
    return losses, layers


if __name__ == "__main__":
    run_command(main, __doc__)
