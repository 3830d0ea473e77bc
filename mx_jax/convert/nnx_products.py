"""flax.nnx: products with a recipe that take the place of a layer's own."""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from mx_jax.convert.products import cast_table
from mx_jax.nn.layers import named_in_errors
from mx_jax.nn.nnx import RNG_STREAM, promote_operands
from mx_jax.ops.einsum import einsum
from mx_jax.ops.tags import LayerName, tag
from mx_jax.recipes import Recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class Injected:
    """A product in the place of a layer's own; static, so equal models have equal graphs.

    Attributes:
      operation: what the layer now calls.
      replaced: what it called before.
      layer: what errors call the layer. Not its path, by which equal layers would differ.
      name: its path, by which they do not.
    """

    operation: Callable[..., Any]
    replaced: Any
    layer: str
    name: LayerName

    def __call__(self, *args: Any, **options: Any) -> Any:
        """The operation's result."""
        with named_in_errors(self.layer), self.name.context():
            return self.operation(*args, **options)


class KeyedInjected(nnx.Module):
    """Like `Injected`, with a stream that gives each use a fresh key."""

    def __init__(
        self,
        operation: Callable[..., Any],
        replaced: Any,
        stream: nnx.RngStream,
        layer: str,
        name: LayerName,
    ):
        """Make it.

        Args:
          operation: what the layer now calls, with `key`.
          replaced: what it called before.
          stream: where keys come from; one key for each layer of a stack.
          layer: what errors call the layer.
          name: its path.
        """
        self.operation = nnx.static(operation)
        self.replaced = nnx.static(replaced)
        self.stream = stream
        self.layer = nnx.static(layer)
        self.name = nnx.static(name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        """The operation's result."""
        stacked = self.stream.key.shape
        if stacked:
            raise ValueError(
                f"convert.nnx: a layer of a stack got the streams {RNG_STREAM!r} of all its "
                f"layers, of shape={stacked}; where the stack is run, map them with the "
                "parameters, e.g. StateAxes({(nnx.Param, nnx.RngState): 0, ...: None})"
            )
        with named_in_errors(self.layer), self.name.context():
            return self.operation(*args, **options, key=self.stream())


@dataclasses.dataclass(frozen=True, kw_only=True)
class OperandPromotion:
    """Flax's promote_dtype, past which quantized kernels go as they are.

    Attributes:
      replaced: Flax's own.
    """

    replaced: Callable[..., Any]

    def __call__(self, args: Any, /, **options: Any) -> Any:
        """The promoted operands."""
        return promote_operands(args, **options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TablePromotion:
    """An Embed's promote_dtype that also casts the table, its last operand, to a recipe's weight.

    Attributes:
      recipe: whose forward right operand says how.
      promote: Flax's own.
    """

    recipe: Recipe
    promote: Callable[..., Any]

    def __call__(self, args: Any, /, *, key: jax.Array | None = None, **options: Any) -> Any:
        """The promoted operands."""
        *others, table = self.promote(args, **options)
        return (*others, cast_table(table, self.recipe, key))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention:
    """A drop-in for `flax.nnx.dot_product_attention`, one recipe for each of its two products.

    Flax's own takes no einsum; flax.linen's does, and is the same otherwise. The softmax is in
    float32, as in the fused attention that Flax's own calls where it can.

    Attributes:
      qk: recipe of `query key^T`, None for high precision.
      av: recipe of `weights value`, likewise.
    """

    qk: Recipe | None
    av: Recipe | None

    def __call__(
        self,
        query: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        /,
        bias: jax.Array | None = None,
        mask: jax.Array | None = None,
        *,
        dtype: Any = None,
        precision: Any = None,
        module: nnx.Module | None = None,
        is_causal: bool = False,
        key: jax.Array | None = None,
        **options: Any,
    ) -> jax.Array:
        """`[..., time, heads, depth]` operands; fewer key heads than query heads are repeated.

        Args:
          query: queries.
          keys: keys.
          values: values.
          bias: added to the scores.
          mask: scores that count.
          dtype: of the computation.
          precision: for high-precision operands.
          module: gets the weights sown.
          is_causal: whether later keys are masked out.
          key: PRNG key, if a recipe draws random bits.
          **options: dropout's.
        """
        repeats = query.shape[-2] // keys.shape[-2]
        if repeats > 1:
            keys, values = (jnp.repeat(operand, repeats, axis=-2) for operand in (keys, values))
        if is_causal:
            causal = jnp.tril(jnp.ones((query.shape[-3], keys.shape[-3]), bool))
            mask = causal if mask is None else jnp.logical_and(mask, causal)
        qk_key, av_key = (None, None) if key is None else jax.random.split(key)
        weights = nn.attention.dot_product_attention_weights(
            query,
            keys,
            bias,
            mask,
            dtype=dtype,
            module=None if module is None else _Sows(module),  # pyright: ignore
            force_fp32_for_softmax=True,
            einsum=_einsum("qk", self.qk, precision, qk_key),
            **options,
        )
        values = values.astype(weights.dtype)
        return _einsum("av", self.av, precision, av_key)("...hqk,...khd->...qhd", weights, values)


def _einsum(
    name: str, recipe: Recipe | None, precision: Any, key: jax.Array | None
) -> Callable[..., jax.Array]:
    def product(subscripts: str, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        if recipe is None:
            return jnp.einsum(subscripts, lhs, rhs, precision=precision)
        own_key = key if recipe.is_stochastic else None
        with tag(name):
            return einsum(subscripts, lhs, rhs, recipe=recipe, precision=precision, key=own_key)

    return product


@dataclasses.dataclass(frozen=True)
class _Sows:
    """An nnx module as flax.linen's attention knows modules."""

    module: nnx.Module

    def sow(self, collection: str, name: str, value: jax.Array) -> None:
        del collection
        self.module.sow(nnx.Intermediate, name, value)
