"""Quartet II, a recipe that comes from outside: one scale rule and one recipe, both plain values.

| product | lhs | rhs |
|---|---|---|
| output | x: NVFP4 1 x 16, 4/6, nearest | W: the same |
| grad_input | g: NVFP4 1 x 16, MS-EDEN | W: the output's codes, anew with MS-EDEN |
| grad_weight | g: NVFP4 1 x 16, MS-EDEN | x: the output's codes, anew with MS-EDEN |

Gradients are unbiased, with half of stochastic rounding's error. MS-EDEN rounds elements to nearest
after a block Hadamard transform of 128 with new random signs, and block scales stochastically,
after each was corrected for what its block lost. Needs a key:

    y = mx_jax.matmul(x, w, recipe=quartet_ii(), key=key)

Source: Quartet II, arXiv 2601.22813; constants from its training code (255.99, 17/16 * 0.93), from
which this differs: each block of 16 is corrected by itself, as in the authors' kernels (there
groups of 128, 4 % more error and a mean 0.05 % too short); each product draws its own signs (there
both share them); ties round to even (there away from zero); blocks below the smallest scale use it
(there they become zeros).
"""

import dataclasses

import jax
import jax.numpy as jnp

from mx_jax.codecs import element as element_codec
from mx_jax.codecs.rounding import STOCHASTIC, Rounding
from mx_jax.codecs.scale import is_nan_scale, over_float_scale, true_divide
from mx_jax.recipes import Hadamard, MatmulSpec, Recipe, Residuals, operand
from mx_jax.reference.scale_rules import AmaxBecomes, BlockData, FromAmax, ScaleRule


@dataclasses.dataclass(frozen=True)
class Eden:
    """Scales that make up for the error of rounding elements to nearest (MS-EDEN).

    Stored are `round(scale * <x, x> / <x, q>)` of codes q that were made with `scale`. Rounding to
    nearest shortens or lengthens a vector in its own direction; with this factor its codes have the
    right length again, and after a random rotation their expected value is x. Scales are rounded
    stochastically, so the factor is kept on average. The sums are float sums, whose last bits
    depend on their order. EDEN without blocks: Vargaftik et al., arXiv 2108.08842.
    """

    rounding: Rounding = STOCHASTIC

    def __call__(
        self,
        data: BlockData,
        scales: jax.Array,
        codes: jax.Array,
        random_bits: jax.Array | None,
    ) -> jax.Array:
        """The scales that are stored, of those that elements were divided by and their codes."""
        of = data.format.scale.element
        assert of is not None, "the rule fills scales in an element format"
        x = over_float_scale(
            data.values.astype(jnp.float32), scales, data.format, data.tensor_scale
        )
        q = element_codec.decode(codes, data.format.element)
        lost = is_nan_scale(scales, data.format.scale)
        length, along = (
            jnp.sum(jnp.where(lost, 0, x * other), axis=data.inside, keepdims=True)
            for other in (x, q)
        )
        factor = jnp.where(along == 0, jnp.float32(1), true_divide(length, along))
        corrected = element_codec.decode(scales, of) * factor
        return element_codec.encode(corrected, of, rounding=self.rounding, random_bits=random_bits)


# 0.93 loses least of what the rotation makes of a tensor. A scale that rounds to nearest in E4M3 is
# up to 17/16 too small. Above a block scale of 255.99 there is room for the correction.
LARGEST = 6 / (17 / 16 * 0.93)
MS_EDEN = ScaleRule(
    name="ms_eden",
    kinds=("element",),
    scales=FromAmax(AmaxBecomes(LARGEST)),
    largest_scale=255.99,
    largest_element=LARGEST,
    correction=Eden(),
)


def quartet_ii() -> Recipe:
    """NVFP4 in all three products, as above."""
    forward = operand("nvfp4", scale_rule="four_over_six")
    gradient = operand("nvfp4", scale_rule=MS_EDEN)
    backward = MatmulSpec(lhs=gradient, rhs=gradient, transform=Hadamard(size=128, signs=None))
    return Recipe(
        name="quartet_ii",
        output=MatmulSpec(lhs=forward, rhs=forward),
        grad_input=backward,
        grad_weight=backward,
        residuals=Residuals.QUANTIZED,
    )
