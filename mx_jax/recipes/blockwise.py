"""float8 in blocks of 128: DeepSeek's recipes."""

from mx_jax.formats import (
    FLOAT8_BLOCKWISE_2D_E4M3,
    FLOAT8_BLOCKWISE_2D_E8M0,
    FLOAT8_BLOCKWISE_E4M3,
    FLOAT8_BLOCKWISE_E8M0,
)
from mx_jax.recipes.base import Recipe
from mx_jax.reference.scale_rules import AMAX_MULTIPLIER, RCEIL
from mx_jax.specs import MatmulSpec, OperandSpec, Residuals, operand


def _blockwise(name: str, line: OperandSpec, square: OperandSpec) -> Recipe:
    """Lines along the contracting axis for x and g, squares for W, the forward's codes kept."""
    forward = MatmulSpec(lhs=line, rhs=square)
    return Recipe(
        name=name,
        fwd=forward,
        dlhs=forward,
        drhs=MatmulSpec(lhs=line, rhs=line),
        residuals=Residuals.QUANTIZED,
    )


def deepseek_v3() -> Recipe:
    """Blockwise float8: E4M3 and float32 scales in all three products.

    | product | lhs | rhs |
    |---|---|---|
    | output | x: 1 x 128 | W: 128 x 128 |
    | grad_input | g: 1 x 128 | W: the output's codes |
    | grad_weight | g: 128 x 1 | x: the output's codes, dequantized and anew in 128 x 1 |

    Scales are amax / 448, and a code's value is multiplied with them. What is kept of x are its
    codes, as in the source: that second rounding costs grad_weight 1.8 dB on normal data.
    `deepseek_v3().with_(residuals="primal")` quantizes x from high precision instead. Source:
    DeepSeek-V3 technical report, arXiv 2412.19437, section 3.3.

    Examples:
      >>> from mx_jax import recipes
      >>> recipe = recipes.deepseek_v3()
      >>> recipe.fwd.lhs.format.block, recipe.fwd.rhs.format.block, recipe.fwd.lhs.format.scale.name
      ((1, 128), (128, 128), 'f32')
    """
    return _blockwise(
        "deepseek_v3",
        operand(FLOAT8_BLOCKWISE_E4M3, scale_rule=AMAX_MULTIPLIER),
        operand(FLOAT8_BLOCKWISE_2D_E4M3, scale_rule=AMAX_MULTIPLIER),
    )


def deepseek_v3_1() -> Recipe:
    """`deepseek_v3` with E8M0 scales: E4M3 in the same blocks, scales rounded up (RCEIL).

    The scale is the smallest power of two that is no less than amax / 448, so nothing clips, and
    keeping x as codes costs next to nothing: powers of two move between blocks without rounding,
    but for values near the bottom of E4M3. Source: the "ue8m0" scales of DeepGEMM (`ceil_to_ue8m0`
    in `deep_gemm/utils/math.py`), which DeepSeek-V3.1 is published with; how it was trained is not.

    Examples:
      >>> from mx_jax import recipes
      >>> spec = recipes.deepseek_v3_1().fwd.lhs
      >>> spec.format.scale.name, spec.scale_rule.name
      ('e8m0', 'rceil')
    """
    return _blockwise(
        "deepseek_v3_1",
        operand(FLOAT8_BLOCKWISE_E8M0, scale_rule=RCEIL),
        operand(FLOAT8_BLOCKWISE_2D_E8M0, scale_rule=RCEIL),
    )
