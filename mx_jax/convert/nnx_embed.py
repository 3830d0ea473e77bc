"""flax.nnx's Embed with a table of codes: rows decoded when they are looked up, and a tied head."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mx_jax.convert.nnx_products import Injected
from mx_jax.nn.layers import named_in_errors
from mx_jax.nn.nnx import promote_operands
from mx_jax.nn.stored import quantized_in
from mx_jax.ops.dot_general import dot_general
from mx_jax.packed import rows_of
from mx_jax.recipes import high_precision


class StoredEmbed(nnx.Embed):
    """An Embed whose table is an MXArray, packed or not; `convert.weights` makes it of Flax's.

    Only the rows that are asked for are decoded. `attend` multiplies by the codes, and leaves its
    query in high precision, as a converted Embed does.
    """

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Rows of the table, `[*inputs, features]`."""
        table = quantized_in(self.embedding[...])
        if table is None:
            return super().__call__(inputs, out_sharding)
        if not jnp.issubdtype(inputs.dtype, jnp.integer):
            raise ValueError(f"Embed: needs integers, got inputs.dtype={inputs.dtype}")
        values = rows_of(table, jnp.asarray(inputs)).dequantize(self.dtype or table.dtype)
        return values if out_sharding is None else jax.sharding.reshard(values, out_sharding)

    def attend(self, query: jax.Array, out_sharding: Any = None) -> jax.Array:
        """The query times the table, along the features."""
        table = quantized_in(self.embedding[...])
        if table is None:
            return super().attend(query, out_sharding)
        query, table = promote_operands((query, table), dtype=self.dtype)
        dimensions = (((query.ndim - 1,), (1,)), ((), ()))
        product = self.promote_dtype
        if not isinstance(product, Injected):
            return _product(query, table, dimensions, out_sharding)
        with named_in_errors(product.layer), product.name.context():
            return _product(query, table, dimensions, out_sharding)


def _product(query: Any, table: Any, dimensions: Any, out_sharding: Any) -> jax.Array:
    return dot_general(query, table, dimensions, recipe=high_precision(), out_sharding=out_sharding)
