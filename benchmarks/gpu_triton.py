"""A peer in Triton: bfloat16 by MXFP4 through `tl.dot_scaled`, as its users would write it.

Imported only where Triton is installed. `TRITON_INTERPRET=1` runs it on a CPU.
"""

from typing import Any

import torch
import triton
import triton.language as tl

_BLOCK = 32
_TILES = [
    triton.Config({"TILE_N": n, "TILE_K": k}, num_stages=stages, num_warps=warps)
    for n, k, warps in ((64, 128, 4), (64, 256, 4), (128, 128, 4), (128, 128, 8), (128, 256, 8))
    for stages in (3, 4)
]


def _multiply(
    x: Any,
    codes: Any,
    scales: Any,
    out: Any,
    rows: Any,
    columns: tl.constexpr,
    k: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """A tile of `out[rows, columns] = x[rows, k] @ (codes, scales)[columns, k].T`."""
    m = tl.program_id(1) * TILE_M + tl.arange(0, TILE_M)
    n = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    columns_of_x, pairs = tl.arange(0, TILE_K), tl.arange(0, TILE_K // 2)
    blocks = tl.arange(0, TILE_K // 32)
    sums = tl.zeros((TILE_M, TILE_N), tl.float32)
    for start in range(0, k, TILE_K):
        left = tl.load(
            x + m[:, None] * k + start + columns_of_x[None, :], mask=m[:, None] < rows, other=0.0
        )
        right = tl.load(codes + n[None, :] * (k // 2) + start // 2 + pairs[:, None])
        scale = tl.load(scales + n[:, None] * (k // 32) + start // 32 + blocks[None, :])
        sums = tl.dot_scaled(left, None, "bf16", right, scale, "e2m1", sums)
    places = out + m[:, None] * columns + n[None, :]
    tl.store(places, sums.to(tl.bfloat16), mask=m[:, None] < rows)


_kernel: Any = triton.autotune(configs=_TILES, key=["rows", "columns", "k"])(triton.jit(_multiply))


def product(x: Any, weights: tuple[Any, Any]) -> Any:
    """`x[m, k]` in bfloat16 by MXFP4 `[n, k]`: `[m, n]`.

    Weights are codes, uint8 `[n, k / 2]`, the first of two in the low half, and E8M0 scales, uint8
    `[n, k / 32]`.
    """
    codes, scales = weights
    (rows, k), columns = x.shape, codes.shape[0]
    out = torch.empty(rows, columns, device=x.device, dtype=torch.bfloat16)
    tile_m = min(128, max(16, triton.next_power_of_2(rows)))

    def grid(tiles: dict[str, int]) -> tuple[int, int]:
        return triton.cdiv(columns, tiles["TILE_N"]), triton.cdiv(rows, tile_m)

    _kernel[grid](x, codes, scales, out, rows, columns, k, TILE_M=tile_m)
    return out


def random_weights(weights: Any) -> tuple[Any, Any]:
    """Random codes and scales, with values about as large as the weights."""
    n, k = weights.shape
    codes = torch.randint(0, 256, (n, k // 2), device=weights.device, dtype=torch.uint8)
    # The sixteen values of E2M1 have a standard deviation of 2.9.
    exponent = round(-torch.log2(torch.tensor(2.9 * k**0.5)).item())
    scales = torch.full((n, k // _BLOCK), 127 + exponent, device=weights.device, dtype=torch.uint8)
    return codes, scales
