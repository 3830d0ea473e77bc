"""The rows of `fp4_ablation`: recipes that differ by one ingredient, and the published ones."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from benchmarks.language_model import Precision, precision
from benchmarks.residuals import choices
from examples.recipes.quartet_ii import quartet_ii
from mx_jax import recipes
from mx_jax.formats import MXFP4, MXFP4_2D
from mx_jax.recipes import Hadamard, OperandSpec, Recipe, operand

BASELINE = "float32"
EVEN = operand(MXFP4, scale_rule="even")
SQUARE = operand(MXFP4_2D, scale_rule="even")
# RCEIL never clips, which stochastic rounding needs to be right on average.
UNCLIPPED = operand(MXFP4, scale_rule="rceil")
STOCHASTIC = operand(MXFP4, scale_rule="rceil", rounding="stochastic")
RANDOM_32 = Hadamard(size=32, signs=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """One row: what it changes, of which other row, and how the model multiplies."""

    name: str
    what: str
    group: str
    precision: Precision
    against: str = BASELINE


def mxfp4(
    name: str,
    *,
    x: OperandSpec = EVEN,
    w: OperandSpec = EVEN,
    g: OperandSpec = EVEN,
    transform: Hadamard | None = None,
) -> Recipe:
    """MXFP4 in all three products; the transform is grad_weight's."""
    grad_weight = recipes.MatmulSpec(lhs=g, rhs=x, transform=transform)
    return recipes.mxfp4().with_(
        name=name, activations=x, weights=w, gradients=g, grad_weight=grad_weight
    )


def nvfp4_nearest(name: str) -> Recipe:
    """NVFP4 with 4/6 scales and nearest rounding for every operand: `nvfp4` with less error."""
    return recipes.nvfp4().with_(name=name, scale_rule="four_over_six")


def variants(layers: int) -> list[Variant]:
    """Every row, in the order of the table."""
    last, ends = (layers - 1,), (0, layers - 1)
    full, best = recipes.mxfp4_stochastic(), recipes.nvfp4_four_over_six()
    floor = operand(MXFP4, scale_rule="floor")

    def rows(
        group: str, *entries: tuple[str, str, Any], against: str | None = BASELINE
    ) -> Iterator[Variant]:
        """Each row against another one; without it, against the row before."""
        before = BASELINE
        for name, what, chosen in entries:
            chosen = Precision(recipe=chosen) if isinstance(chosen, Recipe) else chosen
            yield Variant(
                name=name, what=what, group=group, precision=chosen, against=against or before
            )
            before = name

    def high(group: str, plain: Recipe) -> Iterator[Variant]:
        """The recipe with blocks in high precision."""
        entries = [("last", "last block high", last), ("ends", "first and last block high", ends)]
        return rows(
            group,
            *(
                (f"{plain.name}+{name}", what, Precision(recipe=plain, high_blocks=blocks))
                for name, what, blocks in entries
            ),
            against=plain.name,
        )

    mxfp4_ladder, nvfp4_ladder = (
        f"{name}, each row adds to the one before" for name in ("MXFP4", "NVFP4")
    )
    ladder = rows(
        mxfp4_ladder,
        ("mxfp4_floor", "FLOOR scales", mxfp4("mxfp4_floor", x=floor, w=floor, g=floor)),
        ("mxfp4", "EVEN scales instead", recipes.mxfp4()),
        ("mxfp4+sr", "stochastic gradients (RCEIL)", mxfp4("mxfp4+sr", g=STOCHASTIC)),
        (
            "mxfp4+sr+hadamard",
            "Hadamard 32 on grad_weight",
            mxfp4("mxfp4+sr+hadamard", g=STOCHASTIC, transform=RANDOM_32),
        ),
        ("mxfp4_stochastic", "32 x 32 weight blocks", full),
        against=None,
    )
    alone = rows(
        "MXFP4 with EVEN scales and one change",
        (
            "mxfp4, head too",
            "head in MXFP4 too",
            Precision(recipe=recipes.mxfp4(), head=recipes.mxfp4()),
        ),
        ("mxfp4, rceil g", "RCEIL gradients, nearest", mxfp4("rceil_g", g=UNCLIPPED)),
        ("mxfp4, hadamard", "Hadamard 32 on grad_weight", mxfp4("hadamard", transform=RANDOM_32)),
        ("mxfp4, 2-D", "32 x 32 weight blocks", mxfp4("square", w=SQUARE)),
        ("mxfp4, ends", "both ends high", Precision(recipe=recipes.mxfp4(), high_blocks=ends)),
        ("mxfp4_hadamard", "Hadamard 16 without signs on grad_weight", recipes.mxfp4_hadamard()),
        against="mxfp4",
    )
    nvfp4 = rows(
        nvfp4_ladder,
        ("nvfp4", "plain", recipes.nvfp4()),
        ("nvfp4_pretraining", "stochastic, Hadamard 16, 2-D", recipes.nvfp4_pretraining()),
        ("nvfp4_four_over_six", "4/6 scales", best),
        against=None,
    )
    unclipped = rows(
        nvfp4_ladder,
        ("nvfp4_unbiased", "gradients that never clip", recipes.nvfp4_unbiased()),
        against="nvfp4_pretraining",
    )
    four_over_six = nvfp4_nearest("nvfp4, 4/6")
    nearest = rows(
        "NVFP4 with nearest rounding alone",
        ("nvfp4, 4/6", "4/6 scales", four_over_six),
        ("nvfp4, 4/6, ends", "both ends high", Precision(recipe=four_over_six, high_blocks=ends)),
        against=None,
    )
    published = rows(
        "Other recipes",
        ("mxfp4_backward", "high-precision forward (Tseng et al.)", recipes.mxfp4_backward()),
        ("quartet_ii", "Quartet II", quartet_ii()),
        ("deepseek_v3", "float8 in blocks of 128", recipes.deepseek_v3()),
        ("deepseek_v3_1", "the same with E8M0 scales", recipes.deepseek_v3_1()),
        ("float8_tensorwise", "torchao", recipes.float8_tensorwise()),
        ("float8_rowwise", "torchao", recipes.float8_rowwise()),
        ("float8_rowwise_with_gw_hp", "torchao", recipes.float8_rowwise_with_gw_hp()),
    )
    kept = (
        row
        for recipe in (recipes.mxfp8(), recipes.mxfp4())
        for row in rows(
            "What is kept between the passes",
            *((choice.name, what, choice) for what, choice in list(choices(recipe).items())[1:]),
            against=recipe.name,
        )
    )
    yardsticks = rows(
        "Yardsticks",
        (BASELINE, "baseline", precision(BASELINE)),
        ("bf16", "rounding alone", precision("bf16")),
        ("mxfp8", "MXFP8", recipes.mxfp8()),
    )
    return [
        *yardsticks,
        *ladder,
        *high(mxfp4_ladder, full),
        *alone,
        *nvfp4,
        *high(nvfp4_ladder, best),
        *unclipped,
        *nearest,
        *published,
        *kept,
    ]
