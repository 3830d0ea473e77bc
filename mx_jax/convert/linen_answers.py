"""flax.linen: layers that call jax.numpy by name, answered in their place."""

import contextvars
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import meta
from flax.linen.dtypes import promote_dtype
from flax.linen.module import merge_param

from mx_jax.convert import linen_products as products
from mx_jax.convert.foreign import ForeignProduct, with_products
from mx_jax.convert.kinds import EINSUM, EMBED, foreign_facts
from mx_jax.convert.lending import lent
from mx_jax.convert.products import cast_table
from mx_jax.convert.rules import Decision
from mx_jax.nn import linen as mx_linen
from mx_jax.nn.layers import linen_recipe, ungathered
from mx_jax.nn.stored import quantized_in
from mx_jax.packed import rows_of
from mx_jax.recipes import high_precision

# Paths of foreign layers whose products are being made anew.
_rewriting: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar(
    "rewriting", default=()
)


def _answer_einsum(
    lender: products.Lender,
    call: Callable[..., Any],
    inputs: jax.Array,
    einsum_str: str | None = None,
) -> jax.Array:
    """flax.linen.Einsum: with a recipe, its twin of mx_jax.nn.linen runs in its scope."""
    layer: Any = lender.layer
    subscripts = merge_param("einsum_str", layer.einsum_str, einsum_str)
    facts = EINSUM.facts(layer, tuple(layer.shape), subscripts)
    decision = lender.decide(**facts)
    recipe = decision.recipe
    kernel = quantized_in(layer.get_variable("params", "kernel"))
    if recipe is None and facts["shape"] is not None and kernel is not None:
        # A stored kernel is what it is; only the input stays in high precision.
        recipe = high_precision()
    if recipe is None:
        return call(inputs, einsum_str)
    fields = {
        field.name: getattr(layer, field.name)
        for field in dataclasses.fields(nn.Einsum)
        if field.init and field.name != "parent"
    }
    if layer.promote_dtype is promote_dtype:
        fields["promote_dtype"] = mx_linen.promote_operands
    twin = mx_linen.Einsum(**fields, recipe=recipe, parent=layer.scope)
    with products.named(decision):
        return twin(inputs, einsum_str)


def _answer_lookup(
    lender: products.Lender, call: Callable[..., Any], inputs: jax.Array
) -> jax.Array:
    """flax.linen.Embed: rows of the quantized table."""
    recipe = _decide_embed(lender).recipe
    layer: Any = lender.layer
    table = quantized_in(layer.get_variable("params", "embedding"))
    if table is not None:
        # Only the rows that are asked for are decoded.
        dtype = layer.dtype or table.dtype
        return rows_of(table, jnp.asarray(inputs)).dequantize(dtype)
    if recipe is None:
        return call(inputs)
    key = lender.key(recipe)

    def promote(table: Any, **options: Any) -> list[Any]:
        return [cast_table(entry, recipe, key) for entry in layer_promote(table, **options)]

    layer_promote = layer.promote_dtype
    with lent(layer, {"promote_dtype": promote}):
        return call(inputs)


def _answer_attend(
    lender: products.Lender, call: Callable[..., Any], query: jax.Array
) -> jax.Array:
    """flax.linen.Embed.attend: the query times the table, both along the features."""
    decision = _decide_embed(lender)
    recipe = decision.recipe
    layer: Any = lender.layer
    promote = layer.promote_dtype
    if quantized_in(layer.get_variable("params", "embedding")) is not None:
        recipe, promote = recipe or high_precision(), mx_linen.promote_operands
    if recipe is None:
        return call(query)
    query, table = promote(query, layer.embedding, dtype=layer.dtype)
    dimensions = (((query.ndim - 1,), (1,)), ((), ()))
    with products.named(decision):
        key = lender.key(recipe)
        recipe = linen_recipe(layer, recipe, "embedding")
        return recipe.dot_general(query, table, dimensions, key=key)


def _decide_embed(lender: products.Lender):
    layer: Any = lender.layer
    return lender.decide(**EMBED.facts(layer, (layer.num_embeddings, layer.features)))


# By the functions themselves, below Flax's wrappers: what an interceptor is told it intercepts.
ANSWERS: dict[Any, Callable[..., Any]] = {
    inspect.unwrap(nn.Einsum.__call__): _answer_einsum,
    inspect.unwrap(nn.Embed.__call__): _answer_lookup,
    inspect.unwrap(nn.Embed.attend): _answer_attend,
}


def run_foreign(
    lender: products.Lender, call: Callable[..., Any], args: Any, kwargs: Any, method: str
) -> Any:
    """A module without an attribute for its product: somebody's layer, or a container.

    Args:
      lender: of the module.
      call: its method.
      args: the method's.
      kwargs: the method's.
      method: the method's name.
    """
    path = lender.path
    if path in _rewriting.get():
        return call(*args, **kwargs)
    layer = lender.layer
    reported = any(record.reports for record in products.recorders_of(lender.rules))
    named = any(rule.types and issubclass(type(layer), rule.types) for rule in lender.rules)
    if layer.is_initializing():
        # What init computes is thrown away, and it makes parameters, which only the trace that
        # Flax began may do.
        result = call(*args, **kwargs)
        if named or reported:
            _decide_foreign(lender)
        return result
    decision = _decide_foreign(lender) if named or reported else None
    if decision is None or decision.recipe is None:
        return call(*args, **kwargs)
    recipe = ungathered(layer, decision.recipe)

    def multiply(*operands: Any, **options: Any) -> jax.Array:
        return ForeignProduct(recipe)(*operands, **options, key=lender.key(recipe))

    token = _rewriting.set((*_rewriting.get(), path))
    try:
        with products.named(decision):
            run = with_products(call, multiply, repr(path), strict=method == "__call__")
            return run(*args, **kwargs)
    finally:
        _rewriting.reset(token)


def _decide_foreign(lender: products.Lender) -> Decision | None:
    """The rules' decision, or None if the module has no matrix of its own."""
    own = lender.layer.variables.get("params", {})
    kernels = [
        tuple(value.shape)
        for value in map(meta.unbox, own.values())
        if getattr(value, "ndim", 0) >= 2
    ]
    inner = [name for name, value in own.items() if isinstance(value, Mapping)]
    facts = foreign_facts(lender.layer, kernels, inner)
    return None if facts is None else lender.decide(**facts)
