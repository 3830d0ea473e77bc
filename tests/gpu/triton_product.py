"""The benchmark's product in Triton against NumPy's, in an interpreter; raises if it is wrong.

TRITON_INTERPRET=1 python tests/gpu/triton_product.py
"""

from typing import Any

import numpy as np

from mx_jax.formats import E2M1


def main() -> None:
    """Compare them."""
    import torch
    import triton

    from benchmarks import gpu_triton

    rows, columns, k = 5, 128, 256
    torch.manual_seed(0)
    x = torch.randn(rows, k).to(torch.bfloat16)
    codes, scales = gpu_triton.random_weights(torch.randn(columns, k))
    scales += torch.randint(0, 3, scales.shape).to(torch.uint8)
    out = torch.full((rows, columns), float("nan"), dtype=torch.bfloat16)
    kernel: Any = triton.jit(gpu_triton._multiply)
    tiles = {"TILE_M": 16, "TILE_N": 64, "TILE_K": 128}
    kernel[(columns // 64, 1)](x, codes, scales, out, rows, columns, k, **tiles)

    values = np.array([E2M1.value(code) for code in range(16)])
    pairs = np.stack([codes.numpy() & 15, codes.numpy() >> 4], axis=-1).reshape(columns, k)
    weights = values[pairs] * np.repeat(2.0 ** (scales.numpy().astype(int) - 127), 32, axis=1)
    expected = x.float().numpy().astype(np.float64) @ weights.T
    # The interpreter truncates where a GPU rounds to bfloat16.
    np.testing.assert_allclose(out.float().numpy(), expected, rtol=2**-7, atol=1e-3)


if __name__ == "__main__":
    main()
