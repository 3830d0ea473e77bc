"""Recipes that tests of conversion share, and what a report says in short."""

from typing import Any

from mx_jax import convert, recipes

MXFP8 = recipes.mxfp8()
WEIGHT_ONLY = recipes.weight_only("mxfp4")
# One operand of one product: little to compile.
STOCHASTIC = WEIGHT_ONLY.with_(
    weights={"rounding": "stochastic", "scale_rule": "even"}, name="stochastic weight"
)


def recipe_names(model: Any, rules: Any, *args: Any, **options: Any) -> dict[str, str]:
    """Recipe's name, or the reason why there is none, of each path."""
    report = convert.report(model, rules, *args, **options)
    return {d.layer.path: d.recipe.name if d.recipe else d.reason for d in report.decisions}
