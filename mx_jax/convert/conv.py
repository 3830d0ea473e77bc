"""A convolution as a product: patches of the input times the kernel as a matrix.

Blocks then lie along the input features of one tap, and all three products follow the recipe. A
convolution whose strides are its kernel size (patch embeddings, 1 x 1) only rearranges its input;
any other repeats it, up to once a tap.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mx_jax.packed import Quantized


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvOfDotGeneral:
    """A drop-in for `jax.lax.conv_general_dilated` as Flax's Conv calls it.

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


def obstacle(feature_group_count: int, input_dilation: Any) -> str | None:
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
