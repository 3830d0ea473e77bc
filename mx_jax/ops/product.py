"""The one differentiable product: every kind, dense, ragged or delayed, is a parameter of it.

An operand enters as the value that has a gradient, or as codes, or as both: codes that were made of
a value in the same trace multiply, and the value gets their cotangent. So each side has one.
"""

import dataclasses
import functools
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from mx_jax.axes import Side
from mx_jax.backends.calls import AnyOperand
from mx_jax.codecs.explicit_axes import explicit_sharding
from mx_jax.mxarray import MXArray
from mx_jax.ops.sample import Free
from mx_jax.ops.varying import sum_over, varying
from mx_jax.packed import Quantized


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class Bar:
    """What the cotangent of a value has to be.

    Attributes:
      dtype: the value's dtype.
      out_sharding: where the value lies, on a mesh with explicit axes.
      varying: the shard_map axes along which the value differs.
    """

    dtype: np.dtype
    out_sharding: Any
    varying: frozenset[str]

    @classmethod
    def of(cls, value: jax.Array) -> "Bar":
        """The cotangent of a value."""
        return cls(
            dtype=np.dtype(value.dtype),
            out_sharding=explicit_sharding(value),
            varying=varying(value),
        )


class Product(Protocol):
    """One kind of product: a frozen value, static under `jit`.

    `extra` is whatever else it depends on: a key, group sizes, scale states.
    """

    def forward(self, lhs: Any, rhs: Any, extra: Any, stored: tuple[Side, ...] = ()) -> Any:
        """The product of operands as they came, or as `keep` gives them; `stored` names those that
        came quantized: weights could have come packed."""
        ...

    def keep(self, lhs: Any, rhs: Any, extra: Any) -> tuple[Any, Any, Any]:
        """The operands as they are saved for the backward pass, and what is saved of `extra`."""
        ...

    def cotangents(self, g: Any, saved: Any, both: bool) -> tuple[tuple[Any, Any], Any]:
        """g as the products for lhs and for rhs take it, and the cotangent of `extra`.

        Args:
          g: cotangent of what `forward` gives.
          saved: what `keep` saved.
          both: whether both products are wanted.
        """
        ...

    def gradient(self, side: Side, g: Any, other: Any, bar: Bar, saved: Any) -> jax.Array:
        """The cotangent of one operand: the product of g and the other operand."""
        ...

    def casts(self, lhs: Any, rhs: Any, extra: Any) -> "Casts":
        """What `forward` quantizes of operands as they came."""
        ...

    def gradient_casts(self, side: Side, g: Any, other: Any, bar: Bar, saved: Any) -> "Casts":
        """What `gradient` quantizes, g first."""
        ...

    def in_high_precision(self) -> "Product":
        """The same product of values as they are, in float32."""
        ...

    def free(self, side: Side | None) -> tuple[Free, ...]:
        """The axes that the product, or the cotangent of a side, has from one operand alone, along
        which parts of it can be computed; g is the first operand of a cotangent."""
        ...

    def masked(self, side: Side, bar: jax.Array, own: Any, saved: Any) -> jax.Array:
        """An operand's cotangent without what the forward product clipped of it."""
        ...


class Cast(NamedTuple):
    """One operand of a product, as it is quantized.

    Attributes:
      before: what the cast is given: transformed and prescaled, if the recipe does so.
      after: what it gives.
      rule: name of the scale rule.
      axis: that blocks lie along, from the end.
    """

    before: jax.Array
    after: MXArray
    rule: str
    axis: int


Casts = tuple[Cast | None, Cast | None]


class Given(NamedTuple):
    """An operand as it enters a product.

    Attributes:
      value: what has a gradient; None if nothing has.
      codes: what multiplies; None if the value does.
    """

    value: jax.Array | None
    codes: Quantized | None

    @classmethod
    def of(cls, operand: AnyOperand) -> "Given":
        """An MXArray that was quantized in the same trace hands its cotangent to what it was made
        of; any other has none."""
        if isinstance(operand, Quantized):
            return cls(operand.primal if isinstance(operand, MXArray) else None, operand)
        return cls(operand, None)

    @property
    def operand(self) -> Any:
        """What multiplies."""
        return self.value if self.codes is None else self.codes


def stored_sides(lhs: Given, rhs: Given) -> tuple[Side, ...]:
    """Which operands came quantized; on the left not what this trace quantized: activations."""
    left: tuple[Side, ...] = ("lhs",) if lhs.codes is not None and lhs.value is None else ()
    return (*left, "rhs") if rhs.codes is not None else left


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def differentiable(product: Product, lhs: Given, rhs: Given, extra: Any) -> Any:
    """What `product.forward` gives, with the product's own gradient.

    Whoever calls it says `with follow(lhs, rhs)`.
    """
    return product.forward(lhs.operand, rhs.operand, extra, stored_sides(lhs, rhs))


def product_fwd(product: Product, lhs: Given, rhs: Given, extra: Any) -> tuple[Any, Any]:
    """The product, and what its gradient needs: operands, their bars, what was saved."""
    stored = stored_sides(lhs, rhs)
    left, right, saved = product.keep(lhs.operand, rhs.operand, extra)
    bars = tuple(None if given.value is None else Bar.of(given.value) for given in (lhs, rhs))
    return product.forward(left, right, extra, stored), (left, right, bars, saved)


def product_bwd(product: Product, residuals: Any, g: Any) -> tuple[Given, Given, Any]:
    """The cotangents of what `differentiable` is given."""
    lhs, rhs, bars, saved = residuals
    (g_lhs, g_rhs), extra_bar = product.cotangents(g, saved, None not in bars)
    lhs_bar = _cotangent(product, "lhs", g_lhs, lhs, rhs, bars[0], saved)
    rhs_bar = _cotangent(product, "rhs", g_rhs, rhs, lhs, bars[1], saved)
    return Given(lhs_bar, None), Given(rhs_bar, None), extra_bar


differentiable.defvjp(product_fwd, product_bwd)


def _cotangent(product, side, g, own, other, bar, saved):
    if bar is None:
        return None
    value = product.gradient(side, g, other, bar, saved)
    value = product.masked(side, sum_over(value, bar.varying), own, saved)
    if bar.out_sharding is None or explicit_sharding(value) == bar.out_sharding:
        return value
    # Turned back where groups of a transform lie on one device.
    return jax.sharding.reshard(value, bar.out_sharding)


def zero_bars(tree: Any) -> Any:
    """The cotangent of integers and keys."""
    return jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), tree)
