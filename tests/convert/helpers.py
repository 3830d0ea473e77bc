"""What tests of conversion share: recipes, a layer, what a report says and a program makes."""

import collections
from typing import Any

import jax
from flax import nnx

from mx_jax import convert, recipes
from mx_jax.jaxpr.read import walk

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


def products(function: Any, *args: Any) -> dict[str, int]:
    """How many products of each kind a program has, in every region: `mx_matmul` is converted."""

    program = jax.make_jaxpr(function)(*args)
    counts = collections.Counter(site.eqn.primitive.name for site in walk(program))
    known = ("dot_general", "conv_general_dilated", "mx_matmul")
    return {name: counts[name] for name in known if counts[name]}


def as_function(model: nnx.Module) -> tuple[Any, Any]:
    """An nnx model as a function of its state and of arguments, and that state."""
    graph, state = nnx.split(model)
    return lambda state, *args, **kwargs: nnx.merge(graph, state)(*args, **kwargs), state
