"""What conversion puts in the place of a layer's own product, besides dot_general and einsum."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from mx_jax.ops.einsum import einsum
from mx_jax.ops.quantize import cast
from mx_jax.ops.tags import tag
from mx_jax.packed import Quantized
from mx_jax.recipes import OperandSpec, Recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvOfDotGeneral:
    """A drop-in for `jax.lax.conv_general_dilated` as Flax's Conv calls it.

    Patches of the input times the kernel as a matrix: blocks lie along the input features of one
    tap, and all three products follow the recipe. A convolution whose strides are its kernel size
    (patch embeddings, 1 x 1) only rearranges its input; any other repeats it, up to once a tap.

    Attributes:
      dot_general: what multiplies patches and kernel.
    """

    dot_general: Callable[..., jax.Array]

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array | Quantized,
        window_strides: Sequence[int],
        padding: Any,
        *,
        rhs_dilation: Sequence[int],
        precision: Any = None,
        **options: Any,
    ) -> jax.Array:
        """`[batch, *space, in]` by `[*taps, in, out]` to `[batch, *space, out]`.

        Args:
          lhs: channels last.
          rhs: kernel; a stored one has its blocks along the input features.
          window_strides: steps of the window.
          padding: as in `jax.lax.conv_general_dilated`.
          rhs_dilation: steps between the taps.
          precision: for high-precision operands.
          **options: what the caller has checked (groups, dilation of the input, dimension
            numbers), and options of dot_general.
        """
        window = rhs.shape[:-2]
        patches = _patches(lhs, window, window_strides, padding, rhs_dilation)
        kernel, num_contracted = rhs, rhs.ndim - 1
        if isinstance(rhs, Quantized):
            # What is stored stays as it lies, packed for all of its taps.
            patches = patches.reshape(*patches.shape[:-2], *window, patches.shape[-1])
        else:
            kernel, num_contracted = rhs.reshape(-1, *rhs.shape[-2:]), 2
        last = tuple(range(patches.ndim - num_contracted, patches.ndim))
        contracting = (last, tuple(range(num_contracted)))
        kept = {
            name: options[name]
            for name in ("preferred_element_type", "out_sharding", "key")
            if options.get(name) is not None
        }
        return self.dot_general(patches, kernel, (contracting, ((), ())), precision, **kept)


def conv_obstacle(feature_group_count: int, input_dilation: Any) -> str | None:
    """Why a convolution is no product of patches and kernel, or None."""
    if feature_group_count != 1:
        return f"feature_group_count={feature_group_count}: each group contracts other features"
    dilation = (input_dilation,) if isinstance(input_dilation, int) else input_dilation or ()
    if any(step != 1 for step in dilation):
        return f"input_dilation={input_dilation}: a transposed convolution"
    return None


def _patches(
    x: jax.Array,
    window: Sequence[int],
    strides: Sequence[int],
    padding: Any,
    dilation: Sequence[int],
) -> jax.Array:
    """`[batch, *space, features]` as `[batch, *out_space, taps, features]`."""
    space = x.shape[1:-1]
    spans = [(size - 1) * step + 1 for size, step in zip(window, dilation, strict=True)]
    if isinstance(padding, str):
        padding = lax.padtype_to_pads(space, spans, strides, padding)
    # lax takes negative padding, which cuts.
    edges = ((0, 0, 0), *((int(low), int(high), 0) for low, high in padding), (0, 0, 0))
    x = lax.pad(x, jnp.zeros((), x.dtype), edges)
    if tuple(window) == tuple(strides) and tuple(spans) == tuple(window):
        return _tiles(x, window)
    sizes = [
        max((size - span) // stride + 1, 0)
        for size, span, stride in zip(x.shape[1:-1], spans, strides, strict=True)
    ]
    if 0 in sizes:  # cut below the kernel: no patch at all
        return jnp.zeros((x.shape[0], *sizes, math.prod(window), x.shape[-1]), x.dtype)
    taps = []
    for flat in range(math.prod(window)):
        # NumPy: below jit, jnp would make tracers even of constants.
        tap = np.unravel_index(flat, tuple(window))
        start = [int(index) * step for index, step in zip(tap, dilation, strict=True)]
        stop = [
            first + (size - 1) * stride + 1
            for first, size, stride in zip(start, sizes, strides, strict=True)
        ]
        taps.append(
            lax.slice(
                x,
                (0, *start, 0),
                (x.shape[0], *stop, x.shape[-1]),
                (1, *strides, 1),
            )
        )
    return jnp.stack(taps, axis=-2)


def _tiles(x: jax.Array, window: Sequence[int]) -> jax.Array:
    """Patches that do not overlap: a reshape and a transpose instead of copies."""
    batch, *space, features = x.shape
    counts = [size // step for size, step in zip(space, window, strict=True)]
    # A remainder that no window covers is not read.
    whole = [count * step for count, step in zip(counts, window, strict=True)]
    x = x[(slice(None), *(slice(size) for size in whole))]
    split = [size for pair in zip(counts, window, strict=True) for size in pair]
    x = x.reshape(batch, *split, features)
    n = len(window)
    order = (0, *range(1, 2 * n, 2), *range(2, 2 * n + 1, 2), 2 * n + 1)
    return x.transpose(order).reshape(batch, *counts, math.prod(window), features)


def cast_table(table: Any, recipe: Recipe, key: jax.Array | None) -> Any:
    """An embedding's table `[entries, features]` as the recipe's products see a weight.

    Blocks lie along the features, so that what is looked up and what is attended to have the same
    values. The gradient is the identity.
    """
    spec: OperandSpec | None = recipe.fwd.rhs
    if spec is None or isinstance(table, Quantized):
        return table
    values = cast(
        table if spec.prescale == 1.0 else table * spec.prescale,
        spec.format,
        axis=-1,
        scale_rule=spec.scale_rule,
        rounding=spec.rounding,
        key=key if spec.random_bits else None,
    )
    return values if spec.prescale == 1.0 else values / spec.prescale


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
