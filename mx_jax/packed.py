"""MXArrays in other layouts: a backend's own, of weights, and rows at their width, of caches."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import PartitionSpec

from mx_jax.axes import Axes
from mx_jax.codecs import packing
from mx_jax.codecs.blocks import Blocks
from mx_jax.codecs.explicit_axes import has_explicit_axes
from mx_jax.codecs.indexing import Index
from mx_jax.formats import BlockFormat
from mx_jax.mxarray import ArrayOfCodes, MXArray, values

T = TypeVar("T")
Q = TypeVar("Q", bound="Quantized")


def _takes_any(packed: "PackedMXArray") -> None:
    """Raise nothing."""


# Of functions that have names: what is packed is pickled with them.
@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """How a backend lays out weights.

    Attributes:
      backend: name of the backend that packs them and whose products read them.
      batch: given the arrays, sizes of the batch axes, which each array has in front, so that scan
        and vmap may slice it.
      unpack: given what is packed, the MXArray that it was made of.
      take: given what is packed, rows of one kept axis `[n, k]`, and indices, those rows of the
        MXArray, and nothing else unpacked; None where a layout has no way to.
      check: given what is packed, raises ValueError where the arrays are those of a part, as
        shard_map cuts them.
    """

    backend: str
    batch: Callable[[Any], tuple[int, ...]]
    unpack: Callable[["PackedMXArray"], MXArray]
    take: Callable[["PackedMXArray", jax.Array], MXArray] | None = None
    check: Callable[["PackedMXArray"], None] = _takes_any


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("arrays",),
    meta_fields=("layout", "kept", "k", "k_first", "format", "dtype"),
)
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PackedMXArray(ArrayOfCodes):
    """Weights in the order in which one backend's kernels read them, made by `pack_weights`.

    It stands for the MXArray that it was made of, `[*batch, *kept, *k]` or `[*batch, *k, *kept]`:
    same shape, same values, and it goes where that goes. Products by that backend read it as it
    lies; whatever else asks for it unpacks it, so it is slow there, but never wrong. It belongs to
    one kind of machine: save the MXArray.

    Attributes:
      arrays: what the kernels read, a pytree.
      layout: of the arrays, with the backend that reads them.
      kept: sizes of the axes that products keep.
      k: sizes of the axes that products contract; blocks lie along the last.
      k_first: whether the contracted axes precede the kept ones.
      format: the block format.
      dtype: what `dequantize()` gives: the dtype that was quantized.

    Examples:
      >>> import jax.numpy as jnp, mx_jax
      >>> w = mx_jax.quantize(jnp.ones((64, 8)), "mxfp4", axis=0)
      >>> packed = mx_jax.pack_weights(w)
      >>> packed.shape, packed.format.name, packed.dtype.name
      ((64, 8), 'mxfp4', 'float32')
    """

    arrays: Any
    layout: Layout
    kept: tuple[int, ...]
    k: tuple[int, ...]
    k_first: bool
    format: BlockFormat
    dtype: np.dtype

    @property
    def backend(self) -> str:
        """Name of the backend whose layout this is."""
        return self.layout.backend

    @property
    def batch(self) -> tuple[int, ...]:
        """Sizes of the batch axes."""
        return self.layout.batch(self.arrays)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the MXArray."""
        return (*self.batch, *self.matrix_axes(self.k))

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def blocks(self) -> Blocks:
        """The MXArray's blocks."""
        axes = Axes.ordered(kept=len(self.kept), contracting=len(self.k), k_first=self.k_first)
        return axes.blocks(self.format)

    def matrix_axes(self, k: tuple[int, ...]) -> tuple[int, ...]:
        """Kept axes, and contracted ones of these sizes, in the MXArray's order."""
        return (*k, *self.kept) if self.k_first else (*self.kept, *k)

    @property
    def first_kept(self) -> int:
        """The first of the kept axes."""
        return len(self.batch) + (len(self.k) if self.k_first else 0)

    @property
    def first_k(self) -> int:
        """The first of the contracted axes."""
        return len(self.batch) + (0 if self.k_first else len(self.kept))

    def arrange(self, matrices: jax.Array, batch: tuple[int, ...], k: tuple[int, ...]) -> jax.Array:
        """Matrices `[..., n, k]` with their axes as the MXArray has them."""
        if self.k_first:
            matrices = matrices.swapaxes(-1, -2)
        return matrices.reshape(*batch, *self.matrix_axes(k))

    def unpack(self) -> MXArray:
        """The MXArray again; blocks of zeros may have another scale."""
        self.layout.check(self)
        if not has_explicit_axes():
            return self.layout.unpack(self)
        # On explicit axes each intermediate value would need a sharding.
        untyped = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self)
        shapes, tree = jax.tree.flatten(jax.eval_shape(self.layout.unpack, untyped))
        specs = [PartitionSpec(*[None] * len(shape.shape)) for shape in shapes]
        run: Any = jax.sharding.auto_axes(
            lambda packed: jax.tree.leaves(packed.layout.unpack(packed)), out_sharding=specs
        )
        return jax.tree.unflatten(tree, run(self))

    def take(self, indices: jax.Array) -> MXArray:
        """Rows of an embedding that is packed for the head: `[*indices, k]` of `[n, k]`.

        Args:
          indices: integers, any shape; one beyond the rows is moved to the last.
        """
        take = self.layout.take
        return self.unpack()[indices] if take is None or not self.takes else take(self, indices)

    @property
    def takes(self) -> bool:
        """Whether the layout gives rows one by one."""
        plain = not self.k_first and len(self.kept) == len(self.k) == 1 and not self.batch
        return self.layout.take is not None and plain

    def serves(self, contracting: tuple[int, ...], batch: tuple[int, ...]) -> bool:
        """Whether the layout is made for products over these axes, counted from the front."""
        axes = tuple(range(self.first_k, self.first_k + len(self.k)))
        return contracting == axes and batch == tuple(range(len(self.batch)))

    def dequantize(self, dtype: jax.typing.DTypeLike | None = None) -> jax.Array:
        """The values; see `MXArray.dequantize`."""
        return self.unpack().dequantize(dtype)

    def __jax_array__(self) -> jax.Array:
        return values(self)

    def warn_of_values(self) -> None:
        # Where something asks for an array without a word, it is mostly a layer of Flax's own.
        warnings.warn(
            f"{self!r} is unpacked and dequantized, which is slow: only mx_jax.matmul, dot_general "
            "and einsum, the layers of mx_jax.nn, and models converted by mx_jax.convert multiply "
            "by packed weights as they are; for the values call dequantize()",
            stacklevel=2,
        )

    def __getitem__(self, index: Index | tuple[Index, ...]) -> Any:
        # `x[...]` is how nnx reads a Variable: it must not cost an unpacking.
        return self if index is ... else self.unpack()[index]

    def transpose(self, *axes: int | Sequence[int]) -> "MXArray | PackedMXArray":
        """Permute axes: kept ones for contracted ones without moving a byte, others unpacked."""
        axis_order: Any = axes[0] if len(axes) == 1 and isinstance(axes[0], tuple | list) else axes
        order = [axis % self.ndim for axis in axis_order] or [*reversed(range(self.ndim))]
        batch, second = len(self.batch), max(self.first_kept, self.first_k)
        if order == [*range(batch), *range(second, self.ndim), *range(batch, second)]:
            # Kernels read panels of kept rows, in whichever order the MXArray names its axes.
            return dataclasses.replace(self, k_first=not self.k_first)
        return self.unpack().transpose(*axes)

    def __repr__(self) -> str:
        # Leaves may be anything while a transformation rebuilds the tree; say what is there.
        try:
            shape = str(self.shape)
        except (AttributeError, TypeError):
            shape = "unknown"
        return (
            f"PackedMXArray({self.format.name}, shape={shape}, dtype={self.dtype}, "
            f"backend={self.backend})"
        )


Quantized = MXArray | PackedMXArray
OperandLike = jax.typing.ArrayLike | Quantized


def gives_rows(x: Quantized) -> bool:
    """Whether rows can be looked up without unpacking all of them."""
    return not isinstance(x, PackedMXArray) or x.takes


def rows_of(x: Quantized, indices: jax.Array) -> MXArray:
    """Rows `[*indices, k]` of a table `[n, k]`; no others are unpacked where the layout allows."""
    return x.take(indices) if isinstance(x, PackedMXArray) else x[indices]


def unpacked(x: T | PackedMXArray) -> T | MXArray:
    """The MXArray of a PackedMXArray; anything else as it is."""
    return x.unpack() if isinstance(x, PackedMXArray) else x


def with_dtype(x: Q, dtype: jax.typing.DTypeLike) -> Q:
    """The same codes, packed or not, to be read as another dtype."""
    return dataclasses.replace(x, dtype=np.dtype(dtype))


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("codes", "scales", "tensor_scale"),
    meta_fields=("format", "features", "dtype"),
)
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PackedRows:
    """`[matrices, length, features]` with blocks along the features, each row packed by itself.

    Attributes:
      codes: uint8 `[matrices, length, bytes of a row]`, as `mx_jax.codecs.packing` packs them.
      scales: `[matrices, length, blocks of a row]`.
      tensor_scale: float32 `[1, 1, 1]`, or `[matrices, length, 1]`, one for each row; None where
        the format has none.
      format: the block format.
      features: values of a row.
      dtype: of the values.
    """

    codes: jax.Array
    scales: jax.Array
    tensor_scale: jax.Array | None
    format: BlockFormat
    features: int
    dtype: np.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the values."""
        return (*self.codes.shape[:-1], self.features)

    def unpacked(self) -> MXArray:
        """The same rows, one code a byte."""
        return MXArray(
            codes=packing.unpack(self.codes, self.format.element.bits, self.features),
            scales=self.scales,
            tensor_scale=self.tensor_scale,
            format=self.format,
            blocks=((-1, self.format.block[1]),),
            dtype=self.dtype,
        )


# Of keys or values.
Rows = jax.Array | PackedRows
