"""Products of other libraries on the same GPU, where they are installed: PyTorch and Triton.

Each multiplies x by one weight after the other, as ours do, recorded once as a CUDA graph: so
neither pays for Python.

  - `torch bf16`: what cuBLAS takes when PyTorch calls it.
  - `torch int4`: PyTorch's 4-bit weights in groups of 32, with bfloat16 scales and zeros. Not MX,
    but about as many bits, and tuned for few rows.
  - `triton dot_scaled`: Triton's own product of bfloat16 by MXFP4, tiles found by its autotuner.
"""

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.gpu_products import Pair, Timed
from benchmarks.timing import Case
from mx_jax.formats import MXFP4

TORCH, INT4, TRITON = "torch bf16", "torch int4", "triton dot_scaled"
_INT4_GROUP = 32
# Of the layout that PyTorch's kernel reads.
_INNER_K_TILES = 8

# `x[m, k], weight -> [m, n]`.
Product = Callable[[Any, Any], Any]


def cases(what: Timed, copies: int, calls: int) -> list[tuple[str, Any]]:
    """Names, and the maker of each case, which may raise where a library lacks something.

    Nothing is imported before it is made: what an import raises is one case's failure.
    """
    if importlib.util.find_spec("torch") is None:
        return []
    names, pair = [TORCH], what.pair
    if pair.lhs is None and pair.rhs.element.bits == 4:
        names.append(INT4)
    if pair == Pair(rhs=MXFP4) and importlib.util.find_spec("triton") is not None:
        names.append(TRITON)

    def maker(name: str) -> Callable[[], Case]:
        def make() -> Case:
            torch: Any = importlib.import_module("torch")
            lay_out, product = _way(name, torch)
            n, k = what.n, what.k
            x = torch.randn(what.m, k, device="cuda", dtype=torch.bfloat16)
            weights = [
                lay_out(torch.randn(n, k, device="cuda", dtype=torch.bfloat16) / k**0.5)
                for _ in range(copies)
            ]
            return Case(name, recorded(torch, product, x, weights, calls))

        return make

    return [(name, maker(name)) for name in names]


def _way(name: str, torch: Any) -> tuple[Callable[[Any], Any], Product]:
    """How weights are laid out, and the product by them."""
    if name == INT4:
        return lambda w: _int4(torch, w), lambda x, w: _int4_product(torch, x, w)
    if name == TRITON:
        ours: Any = importlib.import_module("benchmarks.gpu_triton")
        return ours.random_weights, ours.product
    return lambda w: w, torch.nn.functional.linear


def recorded(
    torch: Any, product: Product, x: Any, weights: Sequence[Any], calls: int
) -> Callable[[], Any]:
    """A function that multiplies x by all weights, `calls` times, and waits for the end."""

    def chain() -> Any:
        y = None
        for weight in weights:
            y = product(x, weight)
        return y

    # Before recording, so that libraries have chosen their algorithms.
    for _ in range(3):
        chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain()

    def run() -> Any:
        for _ in range(calls):
            graph.replay()
        torch.cuda.synchronize()
        return out

    return run


def _int4(torch: Any, weights: Any) -> tuple[Any, Any]:
    """Random codes, with values about as large as the weights: only time counts."""
    n, k = weights.shape
    codes = torch.randint(0, 256, (n, k // 2), device="cuda", dtype=torch.uint8)
    packed = torch.ops.aten._convert_weight_to_int4pack(codes, _INNER_K_TILES)
    scales_and_zeros = torch.zeros(k // _INT4_GROUP, n, 2, device="cuda", dtype=torch.bfloat16)
    # A code from 0 to 15, less 8, has a standard deviation of 4.6.
    scales_and_zeros[..., 0] = 1 / (4.6 * k**0.5)
    return packed, scales_and_zeros


def _int4_product(torch: Any, x: Any, weights: tuple[Any, Any]) -> Any:
    packed, scales_and_zeros = weights
    return torch.ops.aten._weight_int4pack_mm(x, packed, _INT4_GROUP, scales_and_zeros)
