"""What selection sees of a call: its operands' types and axes, and nothing of their values."""

import dataclasses
import math
import warnings
from typing import Any, TypeVar

import jax
import numpy as np

from mx_jax.axes import Axes, ProductAxes, Side
from mx_jax.codecs.blocks import Blocks, num_blocks, scales_shape, varying_axes
from mx_jax.codecs.rounding import DerivedKey, Rounding
from mx_jax.formats import WHOLE, BlockFormat
from mx_jax.mxarray import MXArray
from mx_jax.packed import PackedMXArray
from mx_jax.reference.scale_rules import ScaleRule, scale_rule_for

# Values of blocks that bfloat16 is to hold are kept times 2^-2, since scales that are rounded up
# bring the largest finite number to 2^128.
HEADROOM = 2

Operand = jax.Array | MXArray
AnyOperand = Operand | PackedMXArray


@dataclasses.dataclass(frozen=True, kw_only=True)
class OperandType:
    """What selection sees of one operand of a product."""

    shape: tuple[int, ...]
    axes: Axes  # in a product, in canonical order
    format: BlockFormat | None = None  # None for high precision
    # In high precision; None if the operand is quantized, or if it is not known.
    dtype: np.dtype | None = None
    scale_axes: tuple[int, ...] = ()  # axes whose positions have tensor scales of their own
    packed_by: str | None = None  # name of the backend in whose layout it lies, or None
    # Of codes whose source is an operand of the product too: how to get its values from that.
    source: "ValuesCall | None" = None

    @classmethod
    def of(cls, operand: AnyOperand, axes: Axes) -> "OperandType":
        """The type of an array; packed weights had their tensor scales looked at before."""
        if isinstance(operand, MXArray):
            scale = operand.tensor_scale
            return cls(
                shape=operand.codes.shape,
                axes=axes,
                format=operand.format,
                scale_axes=() if scale is None else varying_axes(scale),
            )
        if isinstance(operand, PackedMXArray):
            by = operand.layout.backend
            return cls(shape=operand.shape, axes=axes, format=operand.format, packed_by=by)
        return cls(shape=operand.shape, axes=axes, dtype=np.dtype(operand.dtype))

    @property
    def text(self) -> str:
        return str(self.dtype) if self.format is None else self.format.name

    @property
    def rows(self) -> int:
        return math.prod(self.shape[axis] for axis in self.axes.kept)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulCall:
    """A product in canonical order: `[*batch, *m, *k]` by `[*batch, *n, *k]` to `[*batch, *m, *n]`.

    An operand may also come with its last two groups exchanged, as BLAS calls a transposed one:
    moving data is left to the backend, which may not need to. Blocks lie along the last axis of
    the contracting group.

    Attributes:
      lhs: the left operand.
      rhs: the right operand.
      out_dtype: dtype of the product.
      precision: what `jax.lax.dot_general` takes, for high-precision operands.
      fast_accumulation: whether a native kernel may add in lower precision.
      reduce_dtype: in which devices add up what each has of the sums, if that is wider than the
        product's; None: in the product's.
    """

    lhs: OperandType
    rhs: OperandType
    out_dtype: np.dtype
    precision: Any = None
    fast_accumulation: bool = False
    reduce_dtype: np.dtype | None = None

    @property
    def text(self) -> str:
        """The call in a jaxpr."""
        return f"{self.lhs.text} x {self.rhs.text}"

    @property
    def sides(self) -> tuple[tuple[Side, OperandType], ...]:
        """Both operands with their names."""
        return ("lhs", self.lhs), ("rhs", self.rhs)

    @property
    def num_batch(self) -> int:
        """How many leading axes are batch axes."""
        return len(self.lhs.axes.batch)

    @property
    def dimension_numbers(self) -> jax.lax.DotDimensionNumbers:
        """Dimension numbers of `jax.lax.dot_general` for this order."""
        return ProductAxes(self.lhs.axes, self.rhs.axes).dimension_numbers


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedCall:
    """A product of rows in groups, whose sizes are data.

    Attributes:
      lhs: `[p, k]`, or `[k, m]` if the rows are contracted.
      rhs: a matrix for each group, its only batch axis; or `[k, n]`.
      num_groups: g; the product is `[p, n]`, or `[g, m, n]`.
      out_dtype: as in `MatmulCall`, and precision.
    """

    lhs: OperandType
    rhs: OperandType
    num_groups: int
    out_dtype: np.dtype
    precision: Any = None

    @property
    def text(self) -> str:
        """The call in a jaxpr."""
        return f"{self.lhs.text} x {self.rhs.text}, {self.num_groups} groups"

    @property
    def contracts_rows(self) -> bool:
        """Whether the groups are of what is contracted."""
        return not self.rhs.axes.batch

    @property
    def contracting(self) -> tuple[int, int]:
        """The contracted axes of both operands, counted from the end."""
        return self.lhs.axes.block_axis, self.rhs.axes.block_axis


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizeCall:
    """A tensor to be quantized.

    Attributes:
      shape: logical shape.
      dtype: float32, bfloat16 or float16.
      format: block format.
      blocks: axes from the end with block sizes.
      scale_rule: from amax to the stored scale.
      rounding: how dropped bits decide.
      scale_axes: the first axes whose positions are given tensor scales of their own.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    format: BlockFormat
    blocks: Blocks
    scale_rule: ScaleRule
    rounding: Rounding
    scale_axes: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """The call in a jaxpr."""
        axes = ", ".join(str(axis) for axis, _ in self.blocks)
        usual = self.scale_rule is scale_rule_for(None, self.format)
        rule = "" if usual else f", {self.scale_rule.name}"
        drawn = f", {self.rounding.name}" if self.rounding.random_bits else ""
        return f"{self.format.name} along {axes}{rule}{drawn}"

    @property
    def random_bits(self) -> int:
        """How many random bits each position of `random_shape` consumes."""
        return self.scale_rule.rounding.random_bits or self.rounding.random_bits

    @property
    def random_shape(self) -> tuple[int, ...]:
        """Shape of the random bits: of the scales where those round stochastically, else of x."""
        of_scales = self.scale_rule.rounding.random_bits
        return scales_shape(self.shape, self.blocks) if of_scales else self.shape

    def drawn_by(self, key: DerivedKey) -> "RandomBitsCall":
        """Its random bits."""
        return RandomBitsCall.of(key, self.random_shape, self.random_bits)


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizeBothCall:
    """A tensor to be quantized twice, along different axes.

    Attributes:
      first: one cast.
      second: the other, of the same shape and dtype.
    """

    first: QuantizeCall
    second: QuantizeCall

    @property
    def text(self) -> str:
        """The call in a jaxpr."""
        return f"{self.first.text}; {self.second.text}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValuesCall:
    """A tensor whose bfloat16 values in a format are wanted, times `2^-HEADROOM`, and no codes.

    Where XLA multiplies bfloat16, a product's casts need none. It is no equation: what lowers a
    product that knows its operands' sources (`MatmulCall`) asks for it.

    Attributes:
      cast: what codes would come from.
      beside: another cast of the same tensor, whose values another product asks for: both are
        computed from one read, as XLA computes the same thing once.
    """

    cast: QuantizeCall
    beside: QuantizeCall | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class DequantizeCall:
    """An MXArray whose values are wanted.

    Attributes:
      shape: logical shape.
      dtype: of the values.
      format: block format.
      blocks: axes from the end with block sizes.
      scale_axes: axes whose positions have tensor scales of their own.
      saturates: whether what is beyond the dtype becomes its largest number, as `mxarray.decode`
        has it, and not Inf.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    format: BlockFormat
    blocks: Blocks
    scale_axes: tuple[int, ...] = ()
    saturates: bool = False

    @classmethod
    def of(cls, x: MXArray, dtype: np.dtype, *, saturates: bool = False) -> "DequantizeCall":
        """The call of an array."""
        return cls(
            shape=x.shape,
            dtype=np.dtype(dtype),
            format=x.format,
            blocks=x.blocks,
            scale_axes=varying_axes(x.tensor_scale),
            saturates=saturates,
        )

    @property
    def text(self) -> str:
        """The call in a jaxpr."""
        return f"dequantize {self.format.name} to {self.dtype}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackCall:
    """Weights to be laid out once, for products in which they are rhs."""

    weights: OperandType  # the axes may lie in any order
    blocks: Blocks  # axes from the end with block sizes
    # Of the activations; None for high precision, or if it is not known.
    lhs_format: BlockFormat | None = None
    dtype: np.dtype | None = None  # that the weights had; None if it is not known

    @property
    def format(self) -> BlockFormat:
        assert self.weights.format is not None, self
        return self.weights.format

    def rejects_layout(self) -> str | None:
        """Why the axes make no matrices `[n, k]` with blocks along k, or None."""
        if len(self.blocks) != 1:
            return f"packs blocks along one axis, got blocks={self.blocks}"
        ((axis, block),) = self.blocks
        shape, axes = self.weights.shape, self.weights.axes
        k = axes.contracting
        if not axes.kept or axis % axes.ndim != k[-1]:
            return f"packs blocks along the last contracted axis, got {self}"
        if not axes.has_canonical_order:
            return f"packs contracted axes before or after all kept ones, got {self}"
        if isinstance(block, int) and len(k) > 1 and shape[k[-1]] % block:
            return f"needs whole blocks along the last of several contracted axes, got {self}"
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttendCall:
    """Attention of tokens that follow each other over rows of keys and values.

    Attributes:
      queries: `[matrices, heads * tokens, features]`, of the heads that share a matrix of keys.
      keys: `[matrices, length, features]`; values are alike.
      dtypes: of queries, keys and values; of codes, that of their values.
      tokens: how many follow each other.
      format: block format of keys and values; None for high precision.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    dtypes: tuple[np.dtype, ...]
    tokens: int
    format: BlockFormat | None = None

    @property
    def text(self) -> str:
        """The call in a jaxpr."""
        rows = self.dtypes[1] if self.format is None else self.format.name
        return f"attention of {self.dtypes[0]} over {rows}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CastStatisticsCall:
    """Values and what a cast made of them, of which statistics are wanted."""

    shape: tuple[int, ...]
    dtype: np.dtype
    format: BlockFormat
    blocks: Blocks  # axes from the end with block sizes
    axis: int  # along which channels are counted, from the end
    scale_axes: tuple[int, ...] = ()  # axes whose positions have tensor scales of their own

    @property
    def text(self) -> str:
        return f"statistics of {self.format.name}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomBitsCall:
    """Random bits for stochastic rounding, by a `DerivedKey`.

    Attributes:
      shape: of the result.
      width: how many bits each position has.
      implementation: JAX's name for the key's, e.g. `"threefry2x32"`.
      is_partitionable: whether `jax_threefry_partitionable` is on.
    """

    shape: tuple[int, ...]
    width: int
    implementation: str
    is_partitionable: bool

    @classmethod
    def of(cls, key: DerivedKey, shape: tuple[int, ...], width: int) -> "RandomBitsCall":
        """The bits that are drawn by a key."""
        config: Any = jax.config
        return cls(
            shape=shape,
            width=width,
            implementation=key.implementation,
            is_partitionable=bool(config.jax_threefry_partitionable),
        )

    @property
    def text(self) -> str:
        """The call in a jaxpr."""
        return f"{self.width} random bits of {self.implementation}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformCall:
    """A block Hadamard transform along an axis, to float32; it fills the last group.

    Attributes:
      shape: of the values.
      dtype: likewise.
      axis: along which groups lie, from the front.
      size: values of a group.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    axis: int
    size: int

    @property
    def text(self) -> str:
        """The call in a jaxpr."""
        return f"Hadamard {self.size} along axis {self.axis}"

    @property
    def result_length(self) -> int:
        """Values along the axis of the result."""
        return num_blocks(self.size, self.shape[self.axis]) * self.size

    def drawn_by(self, key: DerivedKey) -> RandomBitsCall:
        """Its signs, of which negative ones stand for -1: the bits of `jax.random.bernoulli`."""
        # `jax.random.rademacher`'s depend on `jax_enable_x64`.
        return RandomBitsCall.of(key, (self.size,), 32)


Call = (
    MatmulCall
    | RaggedCall
    | QuantizeCall
    | QuantizeBothCall
    | ValuesCall
    | DequantizeCall
    | CastStatisticsCall
    | PackCall
    | AttendCall
    | RandomBitsCall
    | TransformCall
)


def result_of(call: Call, *operands: Any) -> Any:
    """Types of what a call of these operands gives, as a pytree; None where running it tells."""
    match call:
        case MatmulCall():
            (left, m), (right, n) = (
                ([side.shape[a] for a in side.axes.batch], [side.shape[a] for a in side.axes.kept])
                for side in (call.lhs, call.rhs)
            )
            batch = [b if a == 1 else a for a, b in zip(left, right, strict=True)]
            return jax.ShapeDtypeStruct((*batch, *m, *n), call.out_dtype)
        case AttendCall():
            return jax.ShapeDtypeStruct(call.queries, call.dtypes[-1])
        case QuantizeCall():
            x, _, tensor_scale = operands
            if tensor_scale is None and call.format.tensor_scale:
                tensor_scale = jax.ShapeDtypeStruct((1,) * len(x.shape), np.float32)
            # As `blocks.scales_shape`, in sight.
            sizes, ndim = dict(call.blocks), len(x.shape)
            extents = [
                max(n, 1) if sizes.get(a - ndim) is WHOLE else sizes.get(a - ndim, 1)
                for a, n in enumerate(x.shape)
            ]
            scales = tuple(-(-n // size) for n, size in zip(x.shape, extents, strict=True))
            arrays: dict[str, Any] = dict(
                codes=jax.ShapeDtypeStruct(x.shape, np.uint8),
                scales=jax.ShapeDtypeStruct(scales, call.format.scale.storage_dtype),
                tensor_scale=tensor_scale,
            )
            dtype = np.dtype(call.dtype)
            return MXArray(**arrays, format=call.format, blocks=call.blocks, dtype=dtype)
        case QuantizeBothCall():
            x, bits, tensor_scale = operands
            pair = zip((call.first, call.second), bits, strict=True)
            return tuple(result_of(single, x, side, tensor_scale) for single, side in pair)
        case DequantizeCall():
            return jax.ShapeDtypeStruct(operands[0].shape, call.dtype)
        case RandomBitsCall():
            return jax.ShapeDtypeStruct(call.shape, np.int32)
        case TransformCall():
            before, after = call.shape[: call.axis], call.shape[call.axis + 1 :]
            return jax.ShapeDtypeStruct((*before, call.result_length, *after), np.float32)
    return None


def rejects_symbolic(call: Call) -> str | None:
    """Why a kernel of constant sizes does not take a call whose sizes `jax.export` leaves open."""
    match call:
        case MatmulCall() | RaggedCall():
            shapes = call.lhs.shape, call.rhs.shape
        case AttendCall():
            shapes = call.queries, call.keys
        case QuantizeBothCall():
            shapes = (call.first.shape,)
        case ValuesCall():
            shapes = (call.cast.shape,)
        case PackCall():
            shapes = (call.weights.shape,)
        case _:
            shapes = (call.shape,)
    for shape in shapes:
        if not all(isinstance(size, int) for size in shape):
            return f"needs constant sizes, got shape={shape}"
    return None


C = TypeVar("C", bound=MatmulCall | RaggedCall)


def unpacked_for(
    call: C, rhs: PackedMXArray, reason: str = "devices cannot share its layout"
) -> tuple[C, MXArray]:
    """A product's call and right operand where nothing reads its packed weights; warns, since
    unpacking is slow."""
    operation = "ragged_dot" if isinstance(call, RaggedCall) else "matmul"
    warnings.warn(
        f"{operation}: packed weights are unpacked at every call: {rhs!r} belongs to "
        f"backend {rhs.backend}, and {reason}; pass the MXArray, or pack it where the product "
        "runs, on one device or below shard_map",
        stacklevel=2,
    )
    weights = rhs.unpack()
    return dataclasses.replace(call, rhs=OperandType.of(weights, call.rhs.axes)), weights
