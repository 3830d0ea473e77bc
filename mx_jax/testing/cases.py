"""The cases that tests, benchmarks and tuning share: tables of casts, products and attention.

A case is a description. It draws its own arrays with NumPy, so that making them costs no
compilation, and names itself for test ids and benchmark rows.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mx_jax import formats
from mx_jax.axes import Axes
from mx_jax.backends import calls
from mx_jax.formats import MXFP8_E4M3, WHOLE, BlockFormat, BlockSize
from mx_jax.ops.arguments import blocks_along
from mx_jax.packed import PackedRows, Rows
from mx_jax.reference.scale_rules import SCALE_RULES, ScaleRule
from mx_jax.specs import operand
from mx_jax.testing import draw
from mx_jax.testing.compare import exact_values


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizeCase:
    """A cast of one array."""

    format: BlockFormat
    shape: draw.Shape
    axis: int = -1  # the axis that blocks run along
    block_size: BlockSize | None = None  # instead of the format's own
    scale_rule: ScaleRule | str | None = None  # None: the format's default
    rounding: str = "nearest"
    dtype: str = "float32"

    @property
    def call(self) -> calls.QuantizeCall:
        """What backends see of it."""
        format = self.format
        if self.block_size is not None:
            format = format.with_block(self.block_size)
        spec = operand(format, scale_rule=self.scale_rule, rounding=self.rounding)
        return calls.QuantizeCall(
            shape=self.shape,
            dtype=jnp.dtype(self.dtype),
            format=format,
            blocks=blocks_along(self.shape, self.axis, format),
            scale_rule=spec.scale_rule,
            rounding=spec.rounding,
        )

    def __str__(self) -> str:
        block = "" if self.block_size is None else f"-block{self.block_size}"
        rule = self.scale_rule
        rule = "" if rule is None else f"-{rule.name if isinstance(rule, ScaleRule) else rule}"
        shape = "x".join(map(str, self.shape))
        return (
            f"{self.format.name}{block}{rule}-{self.rounding}-{shape}-axis{self.axis}-{self.dtype}"
        )


def _type(
    format: BlockFormat | None, shape: tuple[int, ...], axes: Axes, dtype: str
) -> calls.OperandType:
    known = jnp.dtype(dtype) if format is None else None
    return calls.OperandType(shape=shape, axes=axes, format=format, dtype=known)


def _drawn(rng: np.random.Generator, operand: calls.OperandType, octaves: int) -> calls.Operand:
    if operand.format is None:
        values = draw.with_signs(rng, 2.0 ** rng.uniform(-octaves, octaves, operand.shape))
        return jnp.asarray(values.astype(operand.dtype))
    return draw.draw_mxarray(
        rng, operand.shape, operand.format, operand.axes.blocks(operand.format), octaves
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulCase:
    """A product `[*batch, *m, *k]` by `[*batch, *n, *k]`, or either with k before the kept axes."""

    lhs: BlockFormat | None  # block format of the left operand; None for high precision
    rhs: BlockFormat | None  # block format of the right operand; None for high precision
    batch: draw.Shape = ()  # lengths of the batch axes
    m: draw.Shape = (5,)  # lengths of the left operand's kept axes
    n: draw.Shape = (7,)  # lengths of the right operand's kept axes
    k: draw.Shape = (96,)  # lengths of the contracted axes; blocks run along the last
    lhs_k_first: bool = False  # whether lhs is `[*batch, *k, *m]`
    rhs_k_first: bool = False  # whether rhs is `[*batch, *k, *n]`
    dtype: str = "float32"  # name of the dtype of a high-precision operand
    out_dtype: str = "float32"  # name of the product's dtype

    @property
    def call(self) -> calls.MatmulCall:
        """What backends see of it."""
        return calls.MatmulCall(
            lhs=self._type(self.lhs, self.m, self.lhs_k_first),
            rhs=self._type(self.rhs, self.n, self.rhs_k_first),
            out_dtype=jnp.dtype(self.out_dtype),
            precision=lax.Precision.HIGHEST,
        )

    @property
    def num_products(self) -> int:
        """How many products one entry of the result sums."""
        return math.prod(self.k)

    def operands(
        self, rng: np.random.Generator, octaves: int = 4
    ) -> tuple[calls.Operand, calls.Operand]:
        """Two operands: codes of every kind under scales that spread over `2 * octaves` octaves."""
        return _drawn(rng, self.call.lhs, octaves), _drawn(rng, self.call.rhs, octaves)

    def cancelling_operands(self, rng: np.random.Generator) -> tuple[calls.Operand, calls.Operand]:
        """Operands whose products cancel in pairs, except the first two and a last odd one."""
        lhs, rhs = self.operands(rng)
        left, right = (operand.axes.contracting[-1] for _, operand in self.call.sides)
        return draw.in_pairs(lhs, left, negated=False), draw.in_pairs(rhs, right, negated=True)

    def _type(
        self, format: BlockFormat | None, kept: draw.Shape, k_first: bool
    ) -> calls.OperandType:
        axes = Axes.ordered(
            batch=len(self.batch), kept=len(kept), contracting=len(self.k), k_first=k_first
        )
        groups = (self.k, kept) if k_first else (kept, self.k)
        return _type(format, (*self.batch, *groups[0], *groups[1]), axes, self.dtype)

    def __str__(self) -> str:
        groups = ".".join("x".join(map(str, g)) for g in (self.batch, self.m, self.n, self.k))
        sides = ((self.lhs, self.lhs_k_first), (self.rhs, self.rhs_k_first))
        left, right = (
            (self.dtype if format is None else format.name) + "_k_first" * k_first
            for format, k_first in sides
        )
        return f"{left}-{right}-{groups}-{self.out_dtype}"


QUANTIZE_CASES: tuple[QuantizeCase, ...] = (
    # Every format under every rule that fits it; 80 is not a multiple of any block but 16.
    *(
        QuantizeCase(format=format, shape=(6, 80), scale_rule=rule.name)
        for format in formats.BLOCK_FORMATS
        for rule in SCALE_RULES
        if format.scale.kind in rule.kinds
    ),
    # Every rounding, and every dtype, with each kind of element.
    QuantizeCase(format=formats.MXFP8_E4M3, shape=(5, 64), rounding="away"),
    QuantizeCase(format=formats.MXFP6_E3M2, shape=(5, 64), rounding="toward_zero"),
    QuantizeCase(format=formats.MXFP4, shape=(5, 64), rounding="stochastic"),
    QuantizeCase(format=formats.MXINT8, shape=(5, 64), rounding="stochastic", dtype="bfloat16"),
    QuantizeCase(format=formats.NVFP4, shape=(5, 64), rounding="stochastic", dtype="float16"),
    # Rules that do more than find a scale, drawn, along other axes.
    *(
        QuantizeCase(
            format=format, shape=shape, axis=-2, scale_rule=rule, rounding=rounding, dtype=dtype
        )
        for format, shape, rule, rounding, dtype in (
            (formats.NVFP4, (64, 20), "amax_headroom", "stochastic", "float32"),
            (formats.NVFP4, (3, 40, 5), "four_over_six", "stochastic", "float32"),
            (formats.NVFP4_2D, (64, 96), "four_over_six", "stochastic", "bfloat16"),
        )
    ),
    # Ranks, axes and block sizes.
    QuantizeCase(format=formats.MXFP4, shape=(70,)),
    QuantizeCase(format=formats.MXFP4, shape=(70, 3), axis=0),
    QuantizeCase(format=formats.MXFP8_E5M2, shape=(2, 70, 3), axis=1, dtype="bfloat16"),
    QuantizeCase(format=formats.MXINT8, shape=(2, 1, 3, 33), axis=-1, dtype="float16"),
    QuantizeCase(format=formats.MXFP6_E2M3, shape=(4, 40), block_size=1),
    QuantizeCase(format=formats.MXFP6_E2M3, shape=(4, 40), block_size=7),
    QuantizeCase(format=formats.MXFP4, shape=(4, 40), block_size=128),
    QuantizeCase(format=formats.MXFP4, shape=(4, 40), block_size=WHOLE),
    QuantizeCase(format=formats.MXFP4_2D, shape=(2, 40, 70), axis=1),
    # Nothing to do.
    QuantizeCase(format=formats.MXFP4, shape=(0, 64)),
    QuantizeCase(format=formats.NVFP4, shape=(3, 0)),
)


MATMUL_CASES: tuple[MatmulCase, ...] = (
    # Every format with itself; the contracted size is not a multiple of its block.
    *(MatmulCase(lhs=format, rhs=format, k=(90,)) for format in formats.BLOCK_FORMATS),
    # Two formats that may meet.
    MatmulCase(lhs=formats.MXFP8_E5M2, rhs=formats.MXFP8_E4M3),
    MatmulCase(lhs=formats.MXFP8_E4M3, rhs=formats.MXFP4, out_dtype="bfloat16"),
    MatmulCase(lhs=formats.MXINT8, rhs=formats.MXFP6_E2M3),
    MatmulCase(lhs=formats.FLOAT8_ROWWISE_E5M2, rhs=formats.FLOAT8_TENSORWISE_E4M3),
    # One operand in high precision.
    *(
        MatmulCase(lhs=None, rhs=formats.MXFP4, dtype=dtype, out_dtype=dtype)
        for dtype in ("float32", "bfloat16", "float16")
    ),
    MatmulCase(lhs=formats.MXFP8_E4M3, rhs=None, dtype="bfloat16"),
    MatmulCase(lhs=formats.NVFP4, rhs=None),
    # Operands that hold k before the kept axes.
    MatmulCase(lhs=formats.MXFP8_E4M3, rhs=formats.MXFP4, rhs_k_first=True),
    MatmulCase(lhs=formats.MXINT8, rhs=formats.MXINT8, lhs_k_first=True, k=(3, 33)),
    MatmulCase(
        lhs=formats.NVFP4,
        rhs=formats.NVFP4_2D,
        batch=(2,),
        m=(2, 3),
        lhs_k_first=True,
        rhs_k_first=True,
    ),
    MatmulCase(
        lhs=formats.FLOAT8_ROWWISE_E4M3,
        rhs=formats.FLOAT8_TENSORWISE_E4M3,
        lhs_k_first=True,
        rhs_k_first=True,
    ),
    MatmulCase(lhs=None, rhs=formats.MXFP4, rhs_k_first=True, dtype="bfloat16"),
    # Shapes: batch axes, several kept or contracted axes, single rows, nothing at all.
    MatmulCase(lhs=formats.MXFP8_E4M3, rhs=formats.MXFP8_E4M3, batch=(3,), k=(33,)),
    MatmulCase(lhs=formats.MXFP4, rhs=formats.MXFP4, batch=(2, 3), out_dtype="float16"),
    MatmulCase(lhs=formats.MXINT8, rhs=formats.MXINT8, m=(2, 3), n=(2, 2, 2), k=(64,)),
    MatmulCase(lhs=formats.MXFP4, rhs=formats.MXFP4, k=(3, 40)),
    MatmulCase(lhs=None, rhs=formats.MXFP6_E3M2, batch=(2,), m=(3, 2), k=(2, 2, 34)),
    MatmulCase(lhs=formats.MXFP8_E4M3, rhs=formats.MXFP8_E4M3, m=(1,), n=(1,), k=(512,)),
    MatmulCase(lhs=formats.MXFP8_E4M3, rhs=formats.MXFP8_E4M3, m=(1,), k=(1,)),
    MatmulCase(lhs=formats.MXFP4, rhs=formats.MXFP4, m=(0,)),
    MatmulCase(lhs=formats.MXFP4, rhs=formats.MXFP4, k=(0,)),
)

# Too large for tests to run: every backend is asked about them.
LARGE_QUANTIZE_CASES: tuple[QuantizeCase, ...] = tuple(
    QuantizeCase(format=format, shape=(4096, 4096), axis=axis, dtype=dtype)
    for format in (formats.MXFP8_E4M3, formats.MXFP4)
    for axis in (-1, 0)
    for dtype in ("float32", "bfloat16")
)

LARGE_MATMUL_CASES: tuple[MatmulCase, ...] = tuple(
    MatmulCase(lhs=format, rhs=format, m=(m,), n=(n,), k=(k,), out_dtype="bfloat16")
    for format in (formats.MXFP8_E4M3, formats.MXFP6_E3M2, formats.MXFP4, formats.NVFP4)
    for m, n, k in ((1024, 1024, 2048), (4096, 4096, 4096))
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizeBothCase:
    """Two casts of one array."""

    first: QuantizeCase  # one cast
    second: QuantizeCase  # the other, of the same shape and dtype

    @property
    def call(self) -> calls.QuantizeBothCall:
        """What backends see of it."""
        return calls.QuantizeBothCall(first=self.first.call, second=self.second.call)

    def __str__(self) -> str:
        return f"{self.first}-and-{self.second}"


def _both(
    format: BlockFormat, shape: draw.Shape, axes: tuple[int, int] = (-1, -2), **options: Any
) -> QuantizeBothCase:
    first, second = (
        QuantizeCase(format=format, shape=shape, axis=axis, **options) for axis in axes
    )
    return QuantizeBothCase(first=first, second=second)


QUANTIZE_BOTH_CASES: tuple[QuantizeBothCase, ...] = (
    # Each kind of element and scale; 600 columns are a strip and a part of the next.
    _both(formats.MXFP8_E4M3, (70, 600), scale_rule="rceil"),
    _both(formats.MXFP8_E5M2, (64, 256), dtype="bfloat16"),
    _both(formats.MXFP6_E2M3, (64, 256), dtype="bfloat16", scale_rule="even"),
    _both(formats.MXFP6_E3M2, (2, 40, 130), dtype="float16"),
    _both(formats.MXFP4, (2, 64, 136), dtype="bfloat16", axes=(-2, -1)),
    _both(formats.MXINT8, (33, 129)),
    _both(formats.NVFP4, (3, 50, 80)),
    # Roundings, blocks, and an axis in between.
    _both(formats.MXFP4, (40, 136), rounding="stochastic", axes=(-2, -1)),
    _both(formats.MXFP8_E4M3, (40, 136), rounding="away", block_size=7),
    _both(formats.MXFP8_E4M3, (2, 40, 3, 64), axes=(-1, -3)),
    QuantizeBothCase(
        first=QuantizeCase(format=formats.MXFP4, shape=(64, 256), rounding="stochastic"),
        second=QuantizeCase(format=formats.MXFP8_E4M3, shape=(64, 256), axis=-2),
    ),
    # Nothing to do.
    _both(formats.MXFP4, (0, 64)),
)


# Rules and roundings leave no trace in what is dequantized; every format, dtype and axis does.
DEQUANTIZE_CASES: tuple[QuantizeCase, ...] = (
    *(
        QuantizeCase(format=format, shape=(6, 80), dtype=dtype)
        for format in formats.BLOCK_FORMATS
        for dtype in ("float32", "bfloat16")
    ),
    QuantizeCase(format=formats.MXFP8_E5M2, shape=(5, 64), dtype="float16"),
    *(
        case
        for case in QUANTIZE_CASES
        if case.scale_rule is None and case.rounding == "nearest" and case.shape != (6, 80)
    ),
)


def dequantize_call(case: QuantizeCase) -> calls.DequantizeCall:
    """The way back from a case, to the dtype it came from."""
    call = case.call
    return calls.DequantizeCall(
        shape=call.shape, dtype=call.dtype, format=call.format, blocks=call.blocks
    )


STAGNATING_CASE = MatmulCase(lhs=MXFP8_E4M3, rhs=MXFP8_E4M3, m=(16,), n=(16,), k=(1024,))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedCase:
    """A product of rows in groups."""

    lhs: BlockFormat | None  # block format of the rows; None for bfloat16
    # Block format of the matrices, or of the right operand; None for bfloat16.
    rhs: BlockFormat | None
    sizes: tuple[int, ...]  # rows of each group; whole blocks of them if the rows are contracted
    rows: int  # of all groups, and behind them
    k: int = 96  # columns of lhs
    n: int = 24  # columns of rhs
    contracts_rows: bool = False  # whether each group has a sum, `[g, k, n]`
    rhs_k_first: bool = True  # whether rhs is `[g, k, n]`, else `[g, n, k]`
    out_dtype: str = "float32"  # name of the product's dtype

    @property
    def call(self) -> calls.RaggedCall:
        """What backends see of it."""
        if self.contracts_rows:
            axes = (Axes.ordered(k_first=True),) * 2
            right = self.rows, self.n
        else:
            axes = Axes.ordered(), Axes.ordered(k_first=self.rhs_k_first).in_batch()
            matrix = (self.k, self.n) if self.rhs_k_first else (self.n, self.k)
            right = len(self.sizes), *matrix
        return calls.RaggedCall(
            lhs=_type(self.lhs, (self.rows, self.k), axes[0], "bfloat16"),
            rhs=_type(self.rhs, right, axes[1], "bfloat16"),
            num_groups=len(self.sizes),
            out_dtype=jnp.dtype(self.out_dtype),
        )

    def operands(self, rng: np.random.Generator) -> tuple[calls.Operand, calls.Operand, jax.Array]:
        """Both operands and the sizes; rows of no group are as large as any."""
        call = self.call
        lhs, rhs = (_drawn(rng, operand, 4) for operand in (call.lhs, call.rhs))
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttendCase:
    """Attention of tokens that follow each other."""

    format: BlockFormat | None = None  # block format of keys and values; None for high precision
    matrices: int = 2  # of keys
    heads: int = 3  # of queries that share one
    length: int = 40  # rows of each
    features: int = 64  # of a row
    tokens: int = 1  # how many
    position: int = 25  # row of the first
    dtype: str = "float32"  # name of the dtype of keys and values without a format, and of queries

    @property
    def call(self) -> calls.AttendCall:
        """What backends see of it."""
        return calls.AttendCall(
            queries=(self.matrices, self.heads * self.tokens, self.features),
            keys=(self.matrices, self.length, self.features),
            dtypes=(jnp.dtype(self.dtype),) * 3,
            tokens=self.tokens,
            format=self.format,
        )

    def rows(self, rng: np.random.Generator) -> tuple[Rows, np.ndarray]:
        """Keys or values, and what they are in float64."""
        shape = self.call.keys
        if self.format is None:
            drawn = jnp.asarray(rng.standard_normal(shape), self.dtype)
            return drawn, np.asarray(drawn, np.float64)
        x = draw.draw_mxarray(rng, shape, self.format, ((-1, self.format.block[1]),), 3)
        packed = PackedRows(
            codes=x.packed_codes,
            scales=x.scales,
            tensor_scale=x.tensor_scale,
            format=self.format,
            features=self.features,
            dtype=jnp.dtype(self.dtype),
        )
        return packed, exact_values(x)

    def __str__(self) -> str:
        held = self.dtype if self.format is None else self.format.name
        sizes = f"{self.matrices}x{self.heads}x{self.length}x{self.features}"
        return f"{held}-{sizes}-{self.tokens}at{self.position}"


ATTEND_CASES: tuple[AttendCase, ...] = (
    AttendCase(),
    AttendCase(length=17, features=7, position=16),
    # Blocks of rows begin where the last one ends; more are asked for than there are.
    AttendCase(length=128, position=15),
    AttendCase(length=37, features=40, position=16),
    AttendCase(length=300, features=80, position=303),
    AttendCase(tokens=3),
    *(
        AttendCase(format=format)
        for format in (formats.MXFP8_E4M3, formats.MXFP6_E2M3, formats.MXINT8, formats.NVFP4)
    ),
    # The last block and the last byte of a row are not full.
    AttendCase(format=formats.MXFP4, length=150, features=41, position=140),
    AttendCase(format=formats.MXFP8_E5M2, matrices=1, heads=1, position=0),
)
