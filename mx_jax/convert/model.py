"""What conversion offers for models of both frameworks, and for functions, alike."""

import inspect
from collections.abc import Sequence
from typing import Any

import flax.linen
import flax.nnx

from mx_jax.convert import functions, linen_model, nnx_model
from mx_jax.convert.rules import Report, Rule, as_rules

_LINEN = (flax.linen.Module, linen_model.ConvertedModule)


def report(
    model: object,
    rules: Rule | Sequence[Rule],
    /,
    *args: object,
    strict: bool = False,
    **options: object,
) -> Report:
    """Every layer's decision, as a table to print, and the rules that matched nothing.

    Nothing is computed: the call is traced abstractly.

    Args:
      model: of flax.linen or flax.nnx, or a function, converted or not.
      rules: as `convert.linen`, `nnx` or `function` takes them.
      *args: example arguments, arrays or `jax.ShapeDtypeStruct`.
      strict: whether a rule that matched nothing is an error instead of an `UnusedRuleWarning`.
      **options: flax.linen: keyword arguments of the module, `method`, and `rngs` for its init.
        flax.nnx, function: its keyword arguments, and `weights` as `convert.function` takes them.

    Raises:
      TypeError: another kind of model.
      ValueError: with strict, a rule that matched nothing.

    Examples:
      >>> import flax.linen as nn, jax.numpy as jnp
      >>> from mx_jax import convert, recipes
      >>> rules = [
      ...     convert.Rule(".*/qk", None),
      ...     convert.Rule("attention/.*", recipes.mxfp8()),
      ... ]
      >>> class Model(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x):
      ...         x = nn.MultiHeadAttention(num_heads=2, name="attention")(x)
      ...         return nn.Dense(10, name="head")(x)
      >>> print(convert.report(Model(), rules, jnp.ones((1, 8, 64))))
      layer            type                kernel   rule  recipe
      attention/query  DenseGeneral        64x2x32  1     mxfp8
      attention/key    DenseGeneral        64x2x32  1     mxfp8
      attention/value  DenseGeneral        64x2x32  1     mxfp8
      attention/qk     MultiHeadAttention  -        0     (kept by its rule)
      attention/av     MultiHeadAttention  -        1     mxfp8
      attention/out    DenseGeneral        2x32x64  1     mxfp8
      head             Dense               64x10    -     (no rule matches)
      5 of 7 layers converted
    """
    rules = as_rules(rules, "convert.report")
    decisions: Any = nnx_model.decisions
    if isinstance(model, _LINEN):
        decisions = linen_model.decisions
    elif not isinstance(model, flax.nnx.Module):
        if not args:
            linen_model.refuse_wrapper(model, "convert.report")
        decisions = functions.decisions if callable(model) else decisions
    result = Report(rules=rules, decisions=decisions(model, rules, *args, **options))
    result.check("convert.report", strict)
    return result


def original(model: object) -> Any:
    """The model before conversion: the way back from `convert.linen`, `nnx` and `function`.

    Args:
      model: of flax.linen or flax.nnx, or a function; one that was never converted is all right.

    Returns:
      flax.linen: the module that was converted. flax.nnx: a copy that shares the Variables, with
      the products that its layers had.

    Raises:
      TypeError: another kind of model.

    Examples:
      >>> import flax.linen as nn
      >>> from mx_jax import convert, recipes
      >>> model = nn.Dense(8)
      >>> convert.original(convert.linen(model, convert.Rule(".*", recipes.mxfp8()))) == model
      True
    """
    if isinstance(model, _LINEN):
        return linen_model.original(model)
    if isinstance(model, functions.ConvertedFunction):
        return model.function
    if inspect.isroutine(model):
        return model
    return nnx_model.original(model)  # pyright: ignore[reportArgumentType]
