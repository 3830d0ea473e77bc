"""float8 in blocks of 128: DeepSeek-V3's recipe."""

from mx_jax.formats import FLOAT8_BLOCKWISE_2D_E4M3, FLOAT8_BLOCKWISE_E4M3
from mx_jax.recipes.base import Recipe
from mx_jax.specs import MatmulSpec, Residuals, operand


def deepseek_v3() -> Recipe:
    """Blockwise float8: E4M3 and float32 scales in all three products.

    | product | lhs | rhs |
    |---|---|---|
    | output | x: 1 x 128 | W: 128 x 128 |
    | grad_input | g: 1 x 128 | W: 128 x 128 |
    | grad_weight | g: 1 x 128 | x: 1 x 128 |

    Scales are amax / 448, and a code's value is multiplied with them. Source: DeepSeek-V3 technical
    report, arXiv 2412.19437, section 3.3.
    """
    line, square = operand(FLOAT8_BLOCKWISE_E4M3), operand(FLOAT8_BLOCKWISE_2D_E4M3)
    return Recipe(
        name="deepseek_v3",
        fwd=MatmulSpec(lhs=line, rhs=square),
        dlhs=MatmulSpec(lhs=line, rhs=square),
        drhs=MatmulSpec(lhs=line, rhs=line),
        residuals=Residuals.PRIMAL,
    )
