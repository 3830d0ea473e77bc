"""MS-EDEN: scales that make up for what rounding to nearest did to the elements.

Rounding to nearest shortens or lengthens a vector in its own direction. Multiplied by
`<x, x> / <x, q>`, its codes have the right length again, and after a random rotation their expected
value is x: with half the error of stochastic rounding. The factor goes into the scales of blocks,
which are rounded stochastically, so it is kept on average. Source: Quartet II, arXiv 2601.22813;
EDEN without blocks: Vargaftik et al., arXiv 2108.08842.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from mx_jax.codecs import blocks as block_shapes
from mx_jax.codecs import element as element_codec
from mx_jax.codecs.explicit_axes import broadcast_like
from mx_jax.codecs.rounding import Rounding
from mx_jax.codecs.scale import is_nan_scale, over_float_scale, true_divide
from mx_jax.reference.scale_functions import BlockData


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eden:
    """Stored scales `round(scale * <x, x> / <x, q>)` of codes that were made with `scale`.

    Attributes:
      group: elements along the blocked axis that share a factor: as many whole blocks as it
        holds, at least one. Over several blocks, each counts as its elements are over its scale.
      rounding: how the product of scale and factor is rounded.
    """

    group: int
    rounding: Rounding

    def __call__(
        self,
        data: BlockData,
        scales: jax.Array,
        codes: jax.Array,
        random_bits: jax.Array | None,
    ) -> jax.Array:
        """The stored scales.

        The sums are float sums, whose last bits depend on their order.

        Args:
          data: what was quantized; scales are in an element format.
          scales: stored scales that the elements were divided by, of amax's shape.
          codes: what became of the elements.
          random_bits: int32 of amax's shape, for stochastic rounding.
        """
        of = data.format.scale.element
        assert of is not None, data.format
        values = data.values.astype(jnp.float32)
        x = over_float_scale(values, scales, data.format, data.tensor_scale)
        q = element_codec.decode(codes, data.format.element)
        # A block of NaN leaves the scales of its neighbours alone.
        lost = is_nan_scale(scales, data.format.scale)
        length = self._total(jnp.where(lost, 0, x * x), data.inside)
        along = self._total(jnp.where(lost, 0, x * q), data.inside)
        factor = jnp.where(along == 0, jnp.float32(1), true_divide(length, along))
        return element_codec.encode(
            element_codec.decode(scales, of) * factor,
            of,
            rounding=self.rounding,
            random_bits=random_bits,
        )

    def _total(self, terms: jax.Array, inside: tuple[int, ...]) -> jax.Array:
        """Sums over each group, at every block of it: float32 of amax's shape."""
        num_blocks = max(self.group // terms.shape[inside[-1]], 1)
        sums = jnp.sum(terms, axis=inside)
        if num_blocks == 1:
            return lax.expand_dims(sums, inside)
        axis = inside[-1] - len(inside) - sums.ndim
        groups, within = block_shapes.split(sums, ((axis, num_blocks),), fill=True)
        totals = broadcast_like(jnp.sum(groups, axis=within, keepdims=True), groups)
        return lax.expand_dims(block_shapes.merge(totals, sums.shape, within), inside)
