"""MXArray: codes and scales that stand for a tensor."""

import dataclasses
import functools
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray, Tracer
from jax.extend.core import Primitive  # pyright: ignore[reportPrivateImportUsage]
from jax.interpreters import ad, batching
from numpy.typing import DTypeLike

from mx_jax.codecs import blocks as block_shapes
from mx_jax.codecs import float32, indexing, packing
from mx_jax.codecs import scale as scale_codec
from mx_jax.codecs.blocks import Blocks, check_parts, violation
from mx_jax.codecs.explicit_axes import has_explicit_axes, result_aval, vary_alike
from mx_jax.codecs.lowering import register_lowering
from mx_jax.codecs.straight_through import is_differentiated, parted_codes, straight_through
from mx_jax.formats import BlockFormat
from mx_jax.formats.removed import whereabouts

X = TypeVar("X")


class ArrayOfCodes:
    """What arrays of codes have in common: they behave as their values do.

    `==` and `!=` are elementwise, of the values; and like arrays, they have no hash. Whoever wants
    one answer about codes and scales compares these, or asks
    `mx_jax.testing.compare.assert_bitwise_equal`. NumPy gets values.
    """

    __hash__: Any = None
    shape: Any
    primal: Any = None  # the value that codes were made of, which an MXArray may know

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes that the arrays take as they are."""
        return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(unlinked(self)))

    def dequantize(self, dtype: jax.typing.DTypeLike | None = None) -> jax.Array:
        """The values."""
        raise NotImplementedError

    def warn_of_values(self) -> None:
        """Warn where implicit values are slow to make."""

    def transpose(self, *axes: int | Sequence[int]) -> Any:
        """Permute axes."""
        raise NotImplementedError

    @property
    def T(self) -> Any:
        """All axes reversed."""
        return self.transpose()

    @property
    def mT(self) -> Any:
        """The last two axes exchanged."""
        return self.transpose(*range(self.ndim - 2), self.ndim - 1, self.ndim - 2)

    def __eq__(self, other: object) -> Any:
        return self.dequantize() == _values(other) if _has_values(self) else NotImplemented

    def __ne__(self, other: object) -> Any:
        return self.dequantize() != _values(other) if _has_values(self) else NotImplemented

    def __bool__(self) -> bool:
        return bool(self.dequantize())

    def __getattr__(self, name: str) -> Any:
        name_of = type(self).__name__
        remedy = whereabouts(name)
        if not name.startswith("__") and hasattr(jax.Array, name):
            remedy = f": the values have it, x.dequantize().{name}"
        raise AttributeError(f"{name_of} has no attribute {name!r}{remedy}", name=name, obj=self)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.dequantize(), dtype=dtype)


def _without_arithmetic(symbol: str) -> Any:
    """Raise TypeError with the remedy, unless an array on the right knows what to do."""

    def operate(self: ArrayOfCodes, *others: object) -> Any:
        if any(isinstance(other, jax.Array | np.ndarray) for other in others):
            return NotImplemented
        operands = "".join(f" with {type(other).__name__}" for other in others)
        raise TypeError(
            f"{type(self).__name__}: codes are not computed with, got {symbol!r}{operands}; "
            "write x.dequantize(), and quantize what comes of its values"
        )

    return operate


_BINARY = "add + sub - mul * truediv / floordiv // mod % pow ** matmul @".split()
_OTHERS = "neg - pos + abs abs int int float float round round lt < le <= gt > ge >=".split()
for _name, _symbol in zip((_BINARY + _OTHERS)[::2], (_BINARY + _OTHERS)[1::2], strict=True):
    setattr(ArrayOfCodes, f"__{_name}__", _without_arithmetic(_symbol))
    if _name in _BINARY:
        setattr(ArrayOfCodes, f"__r{_name}__", _without_arithmetic(_symbol))


def _values(other: object) -> Any:
    return other.dequantize() if isinstance(other, ArrayOfCodes) else other


def _has_values(x: ArrayOfCodes) -> bool:
    """Not where leaves are shapes or shardings: these are compared by identity."""
    return all(isinstance(leaf, jax.Array | np.ndarray) for leaf in jax.tree.leaves(unlinked(x)))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class MXArray(ArrayOfCodes):
    """A tensor stored as element codes and shared block scales.

    `value[i] = decode(codes[i]) * scale(block of i)`. A pytree of its arrays; everything else is
    static. `codes` and `scales` have equal rank. Made by `mx_jax.quantize`; the constructor only
    assembles parts.

    Invariants, for shape `[d_0, ..., d_r]`:
      - `codes`: uint8 of that shape, one code a byte;
      - `scales`: `ceil(d_i / size)` entries along an axis in `blocks`, `d_i` along the others;
        uint8 bytes (E8M0, biased by 127, or E4M3), or float32 where the format says so;
      - `tensor_scale`: float32 of shape `[1, ..., 1]`, or None;
      - `blocks`: axes counted from the end with block sizes, stored, never inferred.

    Attributes:
      codes: element codes.
      scales: block scales.
      tensor_scale: scale of the whole tensor (NVFP4), else None.
      format: the block format.
      blocks: e.g. `((-1, 32),)`.
      dtype: what `dequantize()` and `jnp.asarray` give: the dtype that was quantized.

    Examples:
      >>> import jax.numpy as jnp, mx_jax
      >>> x = mx_jax.quantize(jnp.arange(64.0).reshape(2, 32), "mxfp8_e4m3")
      >>> x.shape, x.scales.shape, x.blocks, x.nbytes
      ((2, 32), (2, 1), ((-1, 32),), 66)
      >>> x[1].dequantize()[:4]
      Array([32., 32., 32., 36.], dtype=float32)
    """

    codes: jax.Array
    scales: jax.Array
    tensor_scale: jax.Array | None = None
    format: BlockFormat
    blocks: Blocks
    dtype: np.dtype
    # What was quantized, while it is traced: dequantize() hands it the gradient. Part of the pytree
    # only while a derivative by it is taken, see `_flatten`.
    primal: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape, which is the shape of the codes."""
        return self.codes.shape

    @property
    def packed_nbytes(self) -> int:
        """Bytes once the codes are packed along the last axis."""
        width = packing.packed_length(self.shape[-1] if self.ndim else 1, self.format.element.bits)
        return self.nbytes - self.size + math.prod(self.shape[:-1]) * width

    @property
    def elements(self) -> jax.Array:
        """The codes as their native dtype: float8, float4 or int8; not defined for FP6.

        Raises:
          TypeError: where XLA cannot carry the element dtype (float6), or there is none.
        """
        element = self.format.element
        if element.dtype_name is None or element.bits not in (4, 8):
            raise TypeError(
                f"MXArray.elements: XLA does not carry arrays of {element.dtype_name or element} "
                f"(it aborts or raises), got format={self.format.name}; use codes, or decode with "
                "dequantize()"
            )
        codes = self.codes.astype(jnp.uint4) if element.bits == 4 else self.codes
        return lax.bitcast_convert_type(codes, element.dtype)

    @property
    def scale_values(self) -> jax.Array:
        """The scales as their native dtype: float8_e8m0fnu, float8_e4m3fn or float32."""
        if self.scales.dtype == self.format.scale.dtype:
            return self.scales
        return lax.bitcast_convert_type(self.scales, self.format.scale.dtype)

    @property
    def packed_codes(self) -> jax.Array:
        """Codes packed along the last axis: FP4 two a byte, FP6 four in three bytes."""
        return packing.pack(self.codes, self.format.element.bits)

    def dequantize(self, dtype: jax.typing.DTypeLike | None = None) -> jax.Array:
        """The values, exact in float32, rounded once to any other dtype.

        The gradient is the identity: it passes straight through to the array that was quantized,
        or is an error where codes parted from it.

        Args:
          dtype: a float dtype; default: the dtype that was quantized.

        Returns:
          An array of the logical shape.
        """
        check_parts(self, "dequantize")
        dtype = float32.canonical_dtype(self.dtype if dtype is None else dtype)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(f"dequantize: needs a float dtype, got dtype={dtype.name}")
        values = decode(unlinked(self), dtype)
        return values if self.primal is None else straight_through(values, self.primal)

    def __jax_array__(self) -> jax.Array:
        return self.dequantize() if self.primal is not None else values(self)

    def __getitem__(self, index: indexing.Index | tuple[indexing.Index, ...]) -> "MXArray":
        """Index between blocks; see `codecs.indexing.index_blocks` for what each axis takes."""
        check_parts(self, "MXArray index")
        indexed = indexing.index_blocks(index, self.shape, self.blocks)
        tensor_scale = self.tensor_scale
        if tensor_scale is not None:
            tensor_scale = indexing.index_tensor_scale(tensor_scale, indexed.codes)
        return dataclasses.replace(
            self,
            codes=self.codes[indexed.codes],
            scales=self.scales[indexed.scales],
            tensor_scale=tensor_scale,
            blocks=indexed.blocks,
            primal=None if self.primal is None else self.primal[indexed.codes],
        )

    def __iter__(self) -> Iterator["MXArray"]:
        return (self[index] for index in range(len(self)))

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of an MXArray without axes")
        return self.shape[0]

    def transpose(self, *axes: int | Sequence[int]) -> "MXArray":
        """Permute axes, given one by one or as a sequence; the blocks go with them.

        Without arguments, reverse them.
        """
        return indexing.transpose(self, axes)

    def reshape(
        self, *shape: int | Sequence[int], order: str = "C", **options: object
    ) -> "MXArray":
        """Join and divide axes where every block stays whole; `jnp.reshape` comes here too.

        Args:
          *shape: the new lengths, one by one or as a sequence; one of them may be -1.
          order: "C" only.
          **options: `copy` and `out_sharding` as None, which `jnp.reshape` passes on.

        Raises:
          ValueError: another size, or blocks that would not stay whole.
        """
        check_parts(self, "MXArray.reshape")
        return indexing.reshape(self, shape, {"order": order, **options})

    def __repr__(self) -> str:
        # Leaves may be anything while a transformation rebuilds the tree; say what is there.
        shape = tuple(getattr(self.codes, "shape", ()))
        blocks = ", ".join(f"{axis}: {size!r}" for axis, size in self.blocks)
        text = f"MXArray({self.format.name}, shape={shape}, dtype={self.dtype}, blocks={{{blocks}}}"
        is_array = isinstance(self.codes, jax.Array) and not isinstance(self.codes, Tracer)
        if is_array and not violation(self):
            values = np.asarray(self.dequantize(jnp.float32))
            shown = np.array2string(values, threshold=20, edgeitems=2, precision=4, separator=", ")
            text += f", nbytes={self.nbytes},\n" + shown.replace("\n ", "\n")
        return text + ")"


# As a pytree ------------------------------------------------------------------------------------


def unlinked(x: X) -> X:
    """x without the value that its codes were made of: no gradient passes."""
    result: Any = x
    if isinstance(x, MXArray) and x.primal is not None:
        result = dataclasses.replace(x, primal=None)
    return result


_ARRAYS = ("codes", "scales", "tensor_scale")


def _flatten(x: MXArray) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The arrays, and what is static. Codes that leave what traces them are integers, of which a
    derivative is an error; where one is taken at this moment, the value goes along."""
    codes, primal, static = x.codes, x.primal, (x.format, x.blocks, x.dtype)
    if isinstance(primal, Tracer) and not is_differentiated(primal):
        # What traces a program learns of derivatives later: trees are equal to those of stored
        # codes there, as carries and branches have to be. But vmap gives back what it is given.
        caller = _caller()
        if caller not in _VMAP:
            stops = caller == "stop_gradient"
            codes, primal = codes if stops else parted_codes(x), None
    arrays = (codes, x.scales, x.tensor_scale)
    return (arrays if primal is None else (*arrays, primal)), static


def _caller() -> str:
    """The function, of JAX or a user's, that asks for the leaves of a tree or their names."""
    frame = sys._getframe(1)
    while str(frame.f_globals.get("__name__")).startswith(_PASSES) and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_name


_PASSES = (__name__, "jax._src.tree", "jax._src.api_util")
# What flattens the arguments and the results of what vmap is given.
_VMAP = ("vmap_f", "flatten_fun_for_vmap")


def _flatten_with_keys(x: MXArray) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    leaves, static = _flatten(x)
    keys = map(jax.tree_util.GetAttrKey, (*_ARRAYS, "primal"))
    return tuple(zip(keys, leaves, strict=False)), static


def _unflatten(static: tuple[Any, ...], leaves: Iterable[Any]) -> MXArray:
    parts = dict(zip((*_ARRAYS, "primal"), leaves, strict=False))
    primal = parts.get("primal")
    if isinstance(primal, jax.Array | np.ndarray) and not isinstance(primal, Tracer):
        del parts["primal"]  # nothing is traced: it would be kept alive for nothing
    format, blocks, dtype = static
    return MXArray(**parts, format=format, blocks=blocks, dtype=dtype)


jax.tree_util.register_pytree_with_keys(MXArray, _flatten_with_keys, _unflatten, _flatten)


# Values -----------------------------------------------------------------------------------------


def _computed(*arrays: jax.Array, tree: Any, implicit: bool, **how: Any) -> jax.Array:
    x = jax.tree.unflatten(tree, arrays)
    return x.dequantize(**how) if implicit else _decoded(x, **how)


def _values_of(*arrays: jax.Array, tree: Any, implicit: bool, **how: Any) -> jax.Array:
    if implicit:
        jax.tree.unflatten(tree, arrays).warn_of_values()
    return _computed(*arrays, tree=tree, implicit=implicit, **how)


def _type(*types: ShapedArray, **how: Any) -> ShapedArray:
    if has_explicit_axes():
        avals: Any = jax.make_jaxpr(functools.partial(_computed, **how))(*types).out_avals
        return avals[0]
    return result_aval(types[0], jax.tree.unflatten(how["tree"], types).shape, how["dtype"])


def _derivative(arrays: Sequence[Any], tangents: object, **how: Any) -> Any:
    # By codes and by scales there is none; a straight-through gradient is linked outside.
    result = values_p.bind(*arrays, **how)
    return result, ad.Zero(jax.typeof(result).to_tangent_aval())


def _stacked(arrays: Sequence[Any], axes: Sequence[Any], **how: Any) -> Any:
    # Blocks are counted from the end: a batch is an axis more in front.
    pairs = [*zip(arrays, axes, strict=True)]
    (size,) = {x.shape[axis] for x, axis in pairs if axis is not None}
    return values_p.bind(*(batching.bdim_at_front(x, axis, size) for x, axis in pairs), **how), 0


# The values of an array of codes, whose operations depend on where they are lowered. Implicit where
# JAX asks for an array without a word: a rewriter of the program (`mx_jax.convert`) may have a
# product take the codes instead.
values_p: Any = Primitive("mx_values")
_HOW = ("dtype", "exponent", "saturates", "lifted")
values_p.is_high = lambda *types, **params: False
values_p.def_impl(jax.jit(_values_of, static_argnames=("tree", "implicit", *_HOW)))
values_p.def_abstract_eval(_type)
ad.primitive_jvps[values_p] = _derivative
batching.primitive_batchers[values_p] = _stacked
register_lowering(values_p, _values_of)


def values(x: ArrayOfCodes, *, implicit: bool = True, **how: Any) -> jax.Array:
    """The values of an array of codes, by one equation of its arrays."""
    arrays, tree = jax.tree.flatten(x)
    if jax.sharding.get_abstract_mesh().manual_axes:
        arrays = vary_alike(arrays)
    how = {"dtype": x.dtype, **how}
    how["dtype"] = float32.canonical_dtype(how["dtype"])
    return values_p.bind(*arrays, tree=tree, implicit=implicit, **how)


# Where nothing is traced, jit calls a program sooner than a primitive's implementation does.
@functools.partial(jax.jit, static_argnames=_HOW, inline=True)
def decode(
    x: MXArray,
    dtype: jax.typing.DTypeLike,
    *,
    exponent: int = 0,
    saturates: bool = False,
    lifted: bool = False,
) -> jax.Array:
    """The values times `2^exponent`, without a gradient.

    Args:
      x: codes and scales.
      dtype: a float dtype.
      exponent: E8M0 scales only.
      saturates: whether finite codes stay finite: what is beyond `dtype`, as a code under a scale
        that was rounded up may be, becomes the largest number that it has.
      lifted: whether a tiny tensor scale comes lifted, and the values are to be so too.

    Returns:
      An array of the logical shape.
    """
    how: Any = {"exponent": exponent, "saturates": saturates, "lifted": lifted}
    return values(x, implicit=False, dtype=dtype, **how)


def _decoded(
    x: MXArray, dtype: np.dtype, exponent: int, saturates: bool, lifted: bool
) -> jax.Array:
    saturates = saturates and x.format.scale.kind == "exponent"

    def in_integers(x: MXArray) -> jax.Array:
        codes, inside = block_shapes.split(x.codes, x.blocks)
        scales, tensor_scale = block_shapes.spread(x.scales, inside), x.tensor_scale
        if tensor_scale is not None:
            tensor_scale = block_shapes.spread(tensor_scale, inside)

        def bits_of(exponent: int) -> jax.Array:
            facts = x.format, tensor_scale, exponent, lifted
            return scale_codec.decode_scaled(codes, scales, *facts)

        bits = bits_of(exponent)
        if saturates:
            largest = float32.float32_bits(jnp.asarray(jnp.finfo(dtype).max, jnp.float32))
            sign = bits & jnp.int32(float32.SIGN)
            # No element times the largest scale reaches 2^(128 + 16): there only Inf itself is Inf,
            # and NaN is larger.
            finite = bits_of(exponent - 16) & float32.ABS < float32.INF
            bits = jnp.where(finite, sign | jnp.minimum(bits & float32.ABS, largest), bits)
        return block_shapes.merge(float32.from_bits(bits, dtype), x.shape, inside)

    other = lifted or (saturates and dtype == jnp.float16)
    if other or (normal := scale_codec.are_normal(x, exponent)) is None:
        return in_integers(x)
    by_products = functools.partial(scale_codec.decode_normal, dtype=dtype, exponent=exponent)
    return lax.cond(normal, by_products, in_integers, x)
