"""Products of rows in groups against float64's, group by group; other rows must be zeros."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from mx_jax import formats
from mx_jax.axes import Axes
from mx_jax.backends.calls import Operand, OperandType, RaggedCall
from mx_jax.backends.target import Backend
from mx_jax.formats import BlockFormat
from mx_jax.testing.draw import draw_mxarray, with_signs
from mx_jax.testing.matmul_check import HALF_ULP, assert_near, exact_values


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedCase:
    """A product of rows in groups.

    Attributes:
      lhs: block format of the rows; None for bfloat16.
      rhs: block format of the matrices, or of the right operand; None for bfloat16.
      sizes: rows of each group; whole blocks of them if the rows are contracted.
      rows: of all groups, and behind them.
      k: columns of lhs.
      n: columns of rhs.
      contracts_rows: whether each group has a sum, `[g, k, n]`.
      rhs_k_first: whether rhs is `[g, k, n]`, else `[g, n, k]`.
      out_dtype: name of the product's dtype.
    """

    lhs: BlockFormat | None
    rhs: BlockFormat | None
    sizes: tuple[int, ...]
    rows: int
    k: int = 96
    n: int = 24
    contracts_rows: bool = False
    rhs_k_first: bool = True
    out_dtype: str = "float32"

    @property
    def call(self) -> RaggedCall:
        """What backends see of it."""
        if self.contracts_rows:
            axes = (Axes.ordered(k_first=True),) * 2
            right = self.rows, self.n
        else:
            axes = Axes.ordered(), Axes.ordered(k_first=self.rhs_k_first).in_batch()
            matrix = (self.k, self.n) if self.rhs_k_first else (self.n, self.k)
            right = len(self.sizes), *matrix
        return RaggedCall(
            lhs=_type(self.lhs, (self.rows, self.k), axes[0]),
            rhs=_type(self.rhs, right, axes[1]),
            num_groups=len(self.sizes),
            out_dtype=jnp.dtype(self.out_dtype),
        )

    def operands(self, rng: np.random.Generator) -> tuple[Operand, Operand, jax.Array]:
        """Both operands and the sizes; rows of no group are as large as any."""
        call = self.call
        lhs, rhs = (_operand(rng, own) for own in (call.lhs, call.rhs))
        return lhs, rhs, jnp.asarray(self.sizes, jnp.int32)

    def exact(self, lhs: np.ndarray, rhs: np.ndarray) -> np.ndarray:
        """The product of float64 values."""
        ends = np.cumsum(self.sizes)
        groups = [slice(end - size, end) for size, end in zip(self.sizes, ends, strict=True)]
        if self.contracts_rows:
            return np.stack([lhs[rows].T @ rhs[rows] for rows in groups])
        product = np.zeros((self.rows, self.n))
        for rows, matrix in zip(groups, rhs, strict=True):
            product[rows] = lhs[rows] @ (matrix if self.rhs_k_first else matrix.T)
        return product

    def __str__(self) -> str:
        names = ("bfloat16" if f is None else f.name for f in (self.lhs, self.rhs))
        sizes = ".".join(map(str, self.sizes))
        how = "sums" if self.contracts_rows else "k_first" if self.rhs_k_first else "k_last"
        shape = f"{self.rows}x{self.k}x{self.n}"
        return f"{'-'.join(names)}-{shape}-{sizes}-{how}-{self.out_dtype}"


def _type(format: BlockFormat | None, shape: tuple[int, ...], axes: Axes) -> OperandType:
    dtype = jnp.dtype("bfloat16") if format is None else None
    return OperandType(shape=shape, axes=axes, format=format, dtype=dtype)


def _operand(rng: np.random.Generator, own: OperandType) -> Operand:
    if own.format is not None:
        return draw_mxarray(rng, own.shape, own.format, own.axes.blocks(own.format), 4)
    values = with_signs(rng, 2.0 ** rng.uniform(-4, 4, own.shape))
    return jnp.asarray(values.astype(own.dtype))


_MXFP8, _MXFP4, _NVFP4 = formats.MXFP8_E4M3, formats.MXFP4, formats.NVFP4

# Groups of none, one and some rows that fill no tile; of all rows; uneven ones; none at all.
RAGGED_CASES: tuple[RaggedCase, ...] = (
    RaggedCase(lhs=None, rhs=_MXFP4, sizes=(0, 1, 7, 0, 13), rows=24),
    RaggedCase(lhs=None, rhs=_MXFP8, sizes=(16,), rows=16, out_dtype="bfloat16"),
    RaggedCase(lhs=None, rhs=_NVFP4, sizes=(3, 29), rows=37, rhs_k_first=False),
    RaggedCase(lhs=_MXFP8, rhs=_MXFP8, sizes=(5, 0, 11), rows=16, rhs_k_first=False),
    RaggedCase(lhs=_NVFP4, rhs=_NVFP4, sizes=(2, 9, 5), rows=16),
    RaggedCase(lhs=None, rhs=_MXFP4, sizes=(0, 0), rows=8),
    RaggedCase(lhs=_MXFP4, rhs=_MXFP4, sizes=(32, 0, 96), rows=160, k=64, contracts_rows=True),
    RaggedCase(lhs=_NVFP4, rhs=_NVFP4, sizes=(48, 16, 0), rows=64, k=72, contracts_rows=True),
    RaggedCase(lhs=None, rhs=_MXFP8, sizes=(64, 32), rows=96, k=40, contracts_rows=True),
)


def check_ragged(backend: Backend, case: RaggedCase) -> None:
    """Compare a product with float64's within the backend's bound: see `check_matmul`."""
    call = case.call
    lhs, rhs, sizes = case.operands(np.random.default_rng(0))
    product = jax.jit(lambda lhs, rhs, sizes: backend.run(call, lhs, rhs, sizes))(lhs, rhs, sizes)
    left, right = exact_values(lhs), exact_values(rhs)
    exact, magnitude = case.exact(left, right), case.exact(np.abs(left), np.abs(right))
    assert product.dtype == call.out_dtype and product.shape == exact.shape
    added = case.rows if case.contracts_rows else case.k
    assert_near(product, exact, backend.epsilon_bound * math.sqrt(added) * HALF_ULP * magnitude)
    if not case.contracts_rows:
        unused = np.asarray(product)[sum(case.sizes) :]
        assert not unused.any(), f"{case}: rows of no group are not zeros"
