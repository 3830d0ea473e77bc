"""Products of two block-scaled operands, which a kernel takes as they are."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mx_jax.backends.pallas_gpu.architecture import Architecture
from mx_jax.backends.pallas_gpu.layouts.factors import factors_of
from mx_jax.backends.pallas_gpu.layouts.scaled import ScaledOperand
from mx_jax.backends.pallas_gpu.tuning.plan import choose
from mx_jax.backends.pallas_gpu.tuning.tiles import Tiles


def multiply(
    lhs: ScaledOperand,
    rhs: ScaledOperand,
    out_dtype: jax.typing.DTypeLike,
    architecture: Architecture,
    *,
    tiles: Tiles | None = None,
    interpret: Any = None,
) -> jax.Array:
    """`lhs[batch, m, k]` by `rhs[batch, n, k]`: `[batch, m, n]`, one rounding from float32 sums."""
    kernel = architecture.kernel(lhs.format, rhs.format)
    (batch, m, _), n, dtype = lhs.shape, rhs.shape[1], np.dtype(out_dtype)
    rows, columns, k = lhs.codes.shape[0] // batch, rhs.codes.shape[0] // batch, lhs.padded_k
    if tiles is None:
        tiles = choose(
            architecture, kernel, lhs.format.element.bits, batch=batch, m=rows, n=columns, k=k
        )
    factors = [x.tensor_scale for x in (lhs, rhs) if x.tensor_scale is not None]
    block = lhs.format.block[1]
    assert isinstance(block, int)
    arrays = lhs.elements, rhs.elements, lhs.scale_values, rhs.scale_values
    how = {"block": block, "batch": batch, "tiles": tiles, "interpret": interpret}
    if tiles.programs:
        assert kernel.load_persistent is not None
        written = jnp.float32 if dtype == jnp.float16 else dtype
        scales = factors_of((lhs.tensor_scale, rhs.tensor_scale), batch)
        out = kernel.load_persistent()(*arrays, scales, out_dtype=written, **how)
        return out.reshape(batch, rows, columns)[:, :m, :n].astype(dtype)
    once = tiles.splits == 1 and dtype == jnp.bfloat16 and not factors
    sums = kernel.load()(*arrays, out_dtype=jnp.bfloat16 if once else jnp.float32, **how)
    sums = sums.reshape(tiles.splits, batch, rows, columns)[:, :, :m, :n]
    out = sums[0] if tiles.splits == 1 else sums.sum(0)
    for factor in factors:
        out = out * factor
    return out.astype(dtype)
