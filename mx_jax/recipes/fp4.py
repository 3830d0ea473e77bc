"""Published recipes that train with 4-bit products.

Each docstring says what happens to each operand of each product. Source facts are cited; where a
paper leaves a choice open, the docstring says which one was taken.
"""

import dataclasses

from mx_jax.formats import MXFP4, MXFP4_2D, NVFP4, NVFP4_2D
from mx_jax.recipes.base import Recipe
from mx_jax.reference.hadamard import Hadamard
from mx_jax.reference.scale_rules import (
    AMAX_HEADROOM,
    AMAX_SUBNORMAL,
    EVEN,
    FOUR_OVER_SIX,
    GAUSSIAN,
    MS_EDEN,
    RCEIL,
)
from mx_jax.specs import MatmulSpec, Residuals, operand

_HIGH = MatmulSpec(lhs=None, rhs=None)

# Stochastic rounding is right on average only where nothing clips.
_THREE_QUARTERS = operand(MXFP4, scale_rule=RCEIL, rounding="stochastic", prescale=0.75)

# One fixed vector of 16 signs, as a public reference of the NVFP4 recipe has it.
_NVFP4_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def mxfp4_backward() -> Recipe:
    """High-precision forward, MXFP4 backward with stochastic rounding and Hadamard transform.

    | product | lhs | rhs |
    |---|---|---|
    | output | high precision | high precision |
    | grad_input | g: MXFP4, RCEIL of 3/4 g, stochastic | W: the same |
    | grad_weight | g: the same | x: the same |

    Both backward products go through a block Hadamard transform of 64 with random signs, and are
    multiplied by 16/9. The paper takes FLOOR's scale of g for 3/4 g, whose block maxima then lie in
    [3, 6) and never clip; RCEIL's scale of 3/4 g puts them in (3, 6], which differs for powers of
    two alone. Needs a key. Source: Tseng et al., Training LLMs with MXFP4, arXiv 2502.20586.

    Examples:
      >>> import jax, jax.numpy as jnp, mx_jax
      >>> x, w = jnp.full((4, 64), 0.1), jnp.full((64, 8), 5.1)
      >>> y = mx_jax.matmul(x, w, recipe="mxfp4_backward", key=jax.random.key(0))
      >>> print(f"{y[0, 0] / 64 / 0.1:.1f}")
      5.1
      >>> print(mx_jax.recipes.mxfp4_backward().dlhs.lhs)
      mxfp4 (rceil, stochastic, times 0.75)
    """
    backward = MatmulSpec(
        lhs=_THREE_QUARTERS, rhs=_THREE_QUARTERS, transform=Hadamard(size=64, signs=None)
    )
    return Recipe(
        name="mxfp4_backward",
        fwd=_HIGH,
        dlhs=backward,
        drhs=backward,
        residuals=Residuals.PRIMAL,
    )


def mxfp4_stochastic() -> Recipe:
    """MXFP4 in all three products, with what the literature adds: this library's own mixture.

    | product | lhs | rhs |
    |---|---|---|
    | output | x: MXFP4, EVEN, nearest | W: MXFP4 in blocks of 32 x 32, EVEN, nearest |
    | grad_input | g: MXFP4, RCEIL, stochastic | W: as in the forward product |
    | grad_weight | g: MXFP4, RCEIL, stochastic | x: MXFP4, EVEN, nearest |

    grad_weight goes through a block Hadamard transform of 32 with random signs. RCEIL never clips,
    so stochastic gradients are unbiased; square blocks give both products the same weight, so the
    gradient belongs to the function that was computed. Unbiased is not better everywhere: in the
    small runs of docs/training.md plain `mxfp4` ends no higher. Needs a key.

    Examples:
      >>> from mx_jax import recipes
      >>> recipe = recipes.mxfp4_stochastic()
      >>> print(recipe.dlhs)
      mxfp4 (rceil, stochastic) x mxfp4_2d (even, nearest)
      >>> recipe.is_stochastic, recipe.fwd.is_stochastic
      (True, False)
    """
    nearest = operand(MXFP4, scale_rule=EVEN)
    weight = operand(MXFP4_2D, scale_rule=EVEN)
    gradient = operand(MXFP4, scale_rule=RCEIL, rounding="stochastic")
    return Recipe(
        name="mxfp4_stochastic",
        fwd=MatmulSpec(lhs=nearest, rhs=weight),
        dlhs=MatmulSpec(lhs=gradient, rhs=weight),
        drhs=MatmulSpec(lhs=gradient, rhs=nearest, transform=Hadamard(size=32, signs=None)),
        residuals=Residuals.PRIMAL,
    )


def mxfp4_hadamard() -> Recipe:
    """MXFP4 in all three products, and nothing random: a plain Hadamard transform for grad_weight.

    | product | lhs | rhs |
    |---|---|---|
    | output | x: MXFP4, EVEN, nearest | W: the same |
    | grad_input | g: the same | W: the same |
    | grad_weight | g: the same | x: the same |

    grad_weight goes through a block Hadamard transform of 16 without signs. Its authors saw
    training diverge once grad_weight was quantized; this transform kept it stable, where random
    signs and stochastic rounding did not, which is what `mxfp4_stochastic` has. Their scale rule
    is not known to us: EVEN is this library's for MXFP4. Needs no key. Source: Pretraining LLMs
    with MXFP4 on native FP4 hardware, arXiv 2605.09825 (16 points: AMD's notes on MLPerf 6.0).

    Examples:
      >>> from mx_jax import recipes
      >>> recipe = recipes.mxfp4_hadamard()
      >>> recipe.is_stochastic, recipe.fwd.transform, recipe.drhs.transform.size
      (False, None, 16)
    """
    nearest = operand(MXFP4, scale_rule=EVEN)
    plain = MatmulSpec(lhs=nearest, rhs=nearest)
    return Recipe(
        name="mxfp4_hadamard",
        fwd=plain,
        dlhs=plain,
        drhs=dataclasses.replace(plain, transform=Hadamard(size=16, signs=(1,) * 16)),
        residuals=Residuals.PRIMAL,
    )


def nvfp4_pretraining() -> Recipe:
    """NVFP4 in all three products, as NVIDIA pre-trained with it.

    | product | lhs | rhs |
    |---|---|---|
    | output | x: NVFP4 1 x 16, nearest | W: NVFP4 16 x 16, nearest |
    | grad_input | g: NVFP4 1 x 16, stochastic | W: as in the forward product |
    | grad_weight | g: NVFP4 1 x 16, stochastic | x: NVFP4 1 x 16, nearest |

    grad_weight goes through a block Hadamard transform of 16 with one fixed vector of signs. The
    paper also keeps about 15 % of the linear layers (the last ones most of all), embeddings, head
    and attention products in high precision: give those layers another recipe. Block scales keep
    E4M3's subnormals, as in the source. Half of the gradient's block maxima clip there, and its
    mean is 0.3 % too short: see `nvfp4_unbiased`. Needs a key.
    Source: Pretraining LLMs with NVFP4, arXiv 2509.25149.

    Examples:
      >>> import flax.linen as nn, jax.numpy as jnp
      >>> from mx_jax import convert
      >>> rules = [convert.Rule("layers_2", None), convert.Rule(".*", "nvfp4_pretraining")]
      >>> model = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(10)])
      >>> print(convert.report(model, rules, jnp.ones((4, 32))))
      layer     type   kernel  rule  recipe
      layers_0  Dense  32x64   1     nvfp4_pretraining
      layers_2  Dense  64x10   0     (kept by its rule)
      1 of 2 layers converted
    """
    nearest = operand(NVFP4, scale_rule=AMAX_SUBNORMAL)
    weight = operand(NVFP4_2D, scale_rule=AMAX_SUBNORMAL)
    gradient = operand(NVFP4, scale_rule=AMAX_SUBNORMAL, rounding="stochastic")
    transform = Hadamard(size=16, signs=_NVFP4_SIGNS)
    return Recipe(
        name="nvfp4_pretraining",
        fwd=MatmulSpec(lhs=nearest, rhs=weight),
        dlhs=MatmulSpec(lhs=gradient, rhs=weight),
        drhs=MatmulSpec(lhs=gradient, rhs=nearest, transform=transform),
        residuals=Residuals.PRIMAL,
    )


def nvfp4_unbiased() -> Recipe:
    """NVFP4 pre-training whose stochastic gradients are right on average: none of them clips.

    As `nvfp4_pretraining`, but a block of the gradient has its largest value at 6 * 16/17. No scale
    rounds down by more than 17/16, so nothing clips. It costs 1 dB of the gradient. Needs a key.
    Source: the NVFP4 baseline of Quartet II, arXiv 2601.22813 (its training code's 17/16; there
    the signs are random).

    Examples:
      >>> from mx_jax import recipes
      >>> print(recipes.nvfp4_unbiased().dlhs)
      nvfp4 (amax_headroom, stochastic) x nvfp4_2d (amax_subnormal, nearest)
    """
    gradients = {"scale_rule": AMAX_HEADROOM}
    return nvfp4_pretraining().with_(gradients=gradients, name="nvfp4_unbiased")


def nvfp4_four_over_six() -> Recipe:
    """NVFP4 pre-training with adaptive block scales.

    As `nvfp4_pretraining`, but each block's largest value is scaled to 6 or to 4, whichever loses
    less, gradients included. Needs a key. Differs from the source in what chooses the gradient's
    scales: the error of rounding to nearest (there that of the rounding that was drawn, which
    prefers small draws). Source: Four Over Six, arXiv 2512.02010, and its library's defaults.

    Examples:
      >>> from mx_jax import recipes
      >>> recipe = recipes.nvfp4_four_over_six()
      >>> print(recipe.fwd.lhs, "|", recipe.dlhs.lhs)
      nvfp4 (four_over_six, nearest) | nvfp4 (four_over_six, stochastic)
    """
    return nvfp4_pretraining().with_(scale_rule=FOUR_OVER_SIX, name="nvfp4_four_over_six")


def quartet() -> Recipe:
    """MXFP4 in all three products after Hadamard transforms of 32.

    | product | lhs | rhs |
    |---|---|---|
    | output | x: MXFP4, GAUSSIAN, nearest | W: the same |
    | grad_input | g: MXFP4, RCEIL of 3/4 g, stochastic | W: the output's codes, anew as g |
    | grad_weight | g: the same | x: the output's codes, anew as g |

    No transform has signs: the authors' code draws some for the backward products, but multiplies
    by them after the transform, where they change no magnitude and cancel in the product. The
    backward products multiply what the output's product did, transformed along its axis: so their
    results are gradients of transformed operands. Those of values that the output's product
    clipped are zero, and the rest is turned back. Needs a key, for stochastic rounding. Source:
    Quartet, arXiv 2505.14669.

    Examples:
      >>> from mx_jax import recipes
      >>> recipe = recipes.quartet()
      >>> recipe.fwd.transform.size, recipe.mask_clipped, recipe.residuals.value
      (32, True, 'quantized')
    """
    forward = operand(MXFP4, scale_rule=GAUSSIAN)
    transform = Hadamard(size=32, signs=(1,) * 32)
    backward = MatmulSpec(lhs=_THREE_QUARTERS, rhs=_THREE_QUARTERS, transform=transform)
    return Recipe(
        name="quartet",
        fwd=MatmulSpec(lhs=forward, rhs=forward, transform=transform),
        dlhs=backward,
        drhs=backward,
        residuals=Residuals.QUANTIZED,
        mask_clipped=True,
    )


def quartet_ii() -> Recipe:
    """NVFP4 in all three products, with unbiased gradients of half stochastic rounding's error.

    | product | lhs | rhs |
    |---|---|---|
    | output | x: NVFP4 1 x 16, 4/6, nearest | W: the same |
    | grad_input | g: NVFP4 1 x 16, MS-EDEN | W: the output's codes, anew with MS-EDEN |
    | grad_weight | g: NVFP4 1 x 16, MS-EDEN | x: the output's codes, anew with MS-EDEN |

    MS-EDEN rounds elements to nearest after a block Hadamard transform of 128 with new random
    signs, and block scales stochastically, after each was corrected for what its block lost. Needs
    a key. Differs from the authors' training code in these: each block of 16 is corrected by
    itself, as in their kernels (there groups of 128); each product draws its own signs (there both
    share them); ties round to even (there away from zero); blocks below the smallest scale use it
    (there they become zeros). Source: Quartet II, arXiv 2601.22813.

    Examples:
      >>> from mx_jax import recipes
      >>> recipe = recipes.quartet_ii()
      >>> recipe.dlhs.lhs.scale_rule.name, recipe.dlhs.transform.size
      ('ms_eden', 128)
    """
    forward = operand(NVFP4, scale_rule=FOUR_OVER_SIX)
    gradient = operand(NVFP4, scale_rule=MS_EDEN)
    backward = MatmulSpec(lhs=gradient, rhs=gradient, transform=Hadamard(size=128, signs=None))
    return Recipe(
        name="quartet_ii",
        fwd=MatmulSpec(lhs=forward, rhs=forward),
        dlhs=backward,
        drhs=backward,
        residuals=Residuals.QUANTIZED,
    )
