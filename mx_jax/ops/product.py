"""The differentiable product by a recipe: one function forward, one backward.

An operand is an array or quantized. Codes that were made of a value in the same trace multiply, and
the value gets their cotangent. Rows in groups (`ragged_dot`) are quantized and multiplied by
functions of their own.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer
from jax.sharding import AbstractMesh, PartitionSpec

from mx_jax.axes import GRADIENT, SIDES, Pass, ProductAxes, Side
from mx_jax.backends.calls import (
    AnyOperand,
    DequantizeCall,
    MatmulCall,
    OperandType,
    QuantizeBothCall,
    QuantizeCall,
    TransformCall,
    ValuesCall,
)
from mx_jax.backends.primitive import bind
from mx_jax.backends.sums import scaled, without_row_scales
from mx_jax.backends.target import on_devices_of
from mx_jax.codecs.blocks import Blocks, varying_axes
from mx_jax.codecs.explicit_axes import varying
from mx_jax.codecs.rounding import DerivedKey
from mx_jax.codecs.straight_through import no_derivative
from mx_jax.mxarray import MXArray, decode
from mx_jax.ops.arguments import Key
from mx_jax.ops.derivative import with_derivative
from mx_jax.ops.programs import QUANTIZED
from mx_jax.ops.sharded_operands import place
from mx_jax.packed import PackedMXArray, Quantized, unpacked
from mx_jax.reference.hadamard import Hadamard
from mx_jax.reference.quantize import find_row_scales
from mx_jax.sharding.movement import STAY, Moves, reduced_in
from mx_jax.specs import MatmulRecipe, MatmulSpec, OperandSpec

P = ParamSpec("P")
R = TypeVar("R")
Operands = tuple[Any, Any]
Extra = tuple[Key, jax.Array | None]  # and sizes of groups
# The array that codes were cast from, and the call that gives their values.
Source = tuple[jax.Array, ValuesCall]

_HIGH = MatmulSpec(lhs=None, rhs=None)
_HIGH_PRECISION = MatmulRecipe(
    name="high precision", output=_HIGH, grad_input=_HIGH, grad_weight=_HIGH
)


class MatmulPass(NamedTuple):
    """One of the three products: of both operands, or of a cotangent and one of them.

    Attributes:
      name: of the product.
      spec: of the recipe; the left operand of a gradient's spec is the cotangent.
      axes: of the operands as they are multiplied.
      dtype: of the product.
      moves: how operands get to it; None: as the compiler brings one.
      sides: which operand of the spec each of those that are multiplied is.
    """

    name: Pass
    spec: MatmulSpec
    axes: ProductAxes
    dtype: np.dtype
    moves: Moves = STAY
    sides: tuple[Side, Side] = SIDES

    @property
    def specs(self) -> tuple[OperandSpec | None, OperandSpec | None]:
        """How each operand is quantized."""
        lhs, rhs = self.spec.lhs, self.spec.rhs
        return (lhs, rhs) if self.sides == SIDES else (rhs, lhs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedMatmul:
    """A product by a recipe, and its gradients; static under `jit`.

    Attributes:
      recipe: what is quantized in each of the three products.
      axes: of both operands, in canonical order.
      out_dtype: of the product.
      precision: as in `jax.lax.dot_general`.
      moves: how operands get to the product; None: as the compiler brings one.
      quantizer: given a pass, its operands, a key and the sizes of groups, both operands as they
        are multiplied, and sizes again.
      multiplier: given this, a pass, what the quantizer gives, whether an operand is stored,
        and a function of the values that codes were cast from, the product.
    """

    recipe: MatmulRecipe
    axes: ProductAxes
    out_dtype: np.dtype
    precision: lax.PrecisionLike = None
    moves: Moves = STAY
    quantizer: Callable[..., tuple[Operands, jax.Array | None]]
    multiplier: Callable[..., jax.Array]

    @property
    def output(self) -> MatmulPass:
        """The product itself."""
        return MatmulPass("output", self.recipe.output, self.axes, self.out_dtype, self.moves)

    def run(
        self, lhs: AnyOperand, rhs: AnyOperand, key: Key, sizes: jax.Array | None = None
    ) -> jax.Array:
        """The product, with its gradients."""
        (left, lhs_codes), (right, rhs_codes) = parted(lhs), parted(rhs)
        operands = (left, right), (lhs_codes, rhs_codes), (key, sizes)
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(operands)):
            return _differentiable(self, *operands)
        # custom_vjp costs more than the product of concrete operands.
        values, codes, extra = operands
        return forward_program(
            self, self.output, joined(values, codes), extra, any_stored(values, codes)
        )


def parted(operand: AnyOperand) -> tuple[jax.Array | None, Quantized | None]:
    """The value that has a gradient, and the codes that multiply."""
    if not isinstance(operand, Quantized):
        return operand, None
    if operand.primal is None:
        return None, operand
    return operand.primal, dataclasses.replace(operand, primal=None)


def joined(values: Operands, codes: Operands) -> Operands:
    """Both operands as they multiply: codes, or values without."""
    lhs, rhs = (x if of_x is None else of_x for x, of_x in zip(values, codes, strict=True))
    return lhs, rhs


def any_stored(values: Operands, codes: Operands) -> bool:
    """Whether an operand came quantized; on the left not in this trace, as activations do."""
    return codes[1] is not None or (codes[0] is not None and values[0] is None)


def one_program(*static: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function that is one `jit` program where nothing is traced, on the devices of its
    arguments."""
    # In a trace, a `jit` loses its equations' names (inlined) or takes many lines of the jaxpr.

    def decorate(compute: Callable[P, R]) -> Callable[P, R]:
        jitted = jax.jit(compute, static_argnames=static)

        @functools.wraps(compute)
        def run(*args: P.args, **named: P.kwargs) -> R:
            leaves = jax.tree.leaves((args, named))
            if any(isinstance(leaf, Tracer) for leaf in leaves):
                return compute(*args, **named)
            with on_devices_of(*(leaf for leaf in leaves if isinstance(leaf, jax.Array))):
                return jitted(*args, **named)

        return run

    return decorate


# Forward ------------------------------------------------------------------------------------------


def forward(
    matmul: QuantizedMatmul,
    this: MatmulPass,
    operands: Operands,
    extra: Extra,
    stored: bool = False,
    source: Source | None = None,
) -> jax.Array:
    """One of the three products: both operands quantized by its spec, and multiplied."""
    key, sizes = extra
    drawn = product_key(matmul.recipe, this.name, key)
    with jax.named_scope(this.name):
        codes, sizes = matmul.quantizer(this, operands, drawn, sizes)
        sources = functools.partial(_sources, this, operands, source)
        specs = this.spec.lhs, this.spec.rhs
        by_row = any(spec is not None and spec.tensor_scale == "row" for spec in specs)
        multiply = multiply_rows if by_row else matmul.multiplier
        product = multiply(matmul, this, codes, sizes, stored, sources)
        return unscaled(product, this, operands)


forward_program = one_program("matmul", "this", "stored")(forward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(
    matmul: QuantizedMatmul, values: Operands, codes: Operands, extra: Extra
) -> jax.Array:
    # Derivatives of the gradient are those of the product in float32, its casts being identities.
    return forward(matmul, matmul.output, joined(values, codes), extra, any_stored(values, codes))


def _forward(
    matmul: QuantizedMatmul, values: Operands, codes: Operands, extra: Extra
) -> tuple[jax.Array, Any]:
    """The product, and its residuals: operands, types of their cotangents, key and sizes."""
    operands = joined(values, codes)
    if matmul.recipe.kept_as_codes:
        operands = kept(matmul, operands, extra)
    result = forward_program(matmul, matmul.output, operands, extra, any_stored(values, codes))
    # A gradient multiplies what is kept of the other operand: codes have no derivative.
    exact = [
        no_derivative(value) if value is not None and isinstance(x, Quantized) else x
        for x, value in zip(operands, values, strict=True)
    ]
    result = with_derivative(result, exact_fwd, (matmul, result.dtype), *exact, extra)
    return result, (operands, tuple(map(CotangentType.of, values)), extra)


@one_program("matmul")
def kept(matmul: QuantizedMatmul, operands: Operands, extra: Extra) -> Operands:
    """The operands as they are saved for the backward pass."""
    key, sizes = extra
    # The same key gives the same codes as without a gradient.
    recipe = matmul.recipe
    others = {side: None for side in SIDES if side not in recipe.kept_as_codes}
    spec = dataclasses.replace(recipe.output, **others)
    this = matmul.output._replace(spec=spec, moves=STAY)
    drawn = product_key(recipe, "output", key)
    with jax.named_scope("output"):
        return matmul.quantizer(this, operands, drawn, sizes)[0]


# Backward -----------------------------------------------------------------------------------------


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class CotangentType:
    """dtype of the cotangent of a value, and the shard_map axes along which it varies."""

    dtype: np.dtype
    varying: frozenset[str]

    @classmethod
    def of(cls, value: jax.Array | None) -> "CotangentType | None":
        if value is None:
            return None
        manual = jax.sharding.get_abstract_mesh().manual_axes
        return cls(dtype=np.dtype(value.dtype), varying=varying(value) if manual else frozenset())

    def cast(self, cotangent: jax.Array) -> jax.Array:
        """A cotangent in its dtype, summed over the axes along which its value does not vary."""
        if jax.sharding.get_abstract_mesh().manual_axes:
            axes = varying(cotangent) - self.varying
            cotangent = lax.psum(cotangent, tuple(sorted(axes))) if axes else cotangent
        return cotangent.astype(self.dtype)


Types = tuple[CotangentType | None, CotangentType | None]


def _backward(
    matmul: QuantizedMatmul, residuals: tuple[Operands, Types, Extra], g: jax.Array
) -> tuple[Any, None, Any]:
    """The cotangents of the arguments of `_differentiable`."""
    operands, types, extra = residuals
    results = gradients(matmul, types, operands, g, extra)
    none = zero_cotangents(extra)  # of integers and keys
    results = with_derivative(results, exact_bwd, (matmul, types), operands, g, extra)
    return results, None, none


_differentiable.defvjp(_forward, _backward)


def zero_cotangents(tree: object) -> Any:
    """The cotangent of integers and keys."""
    return jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), tree)


@one_program("matmul", "types")
def gradients(
    matmul: QuantizedMatmul, types: Types, operands: Operands, g: jax.Array, extra: Extra
) -> Operands:
    """The products of a cotangent with each operand, for those that have one."""
    key, sizes = extra
    axes = [matmul.axes.gradient_axes(side) for side in SIDES]
    passes = [gradient_pass(matmul, *each) for each in zip(SIDES, axes, types, strict=True)]
    together = None not in types and matmul.quantizer is quantize_operands
    casts = (cast_for_both(matmul, passes, g, key) if together else None) or ((g, None), (g, None))
    results: list[jax.Array | None] = []
    for this, other, of, (codes, source) in zip(passes, operands[::-1], types, casts, strict=True):
        if of is None:
            results.append(None)
            continue
        with jax.named_scope(this.name):
            # Rows of groups end with them, and so would their blocks.
            reuses = sizes is None or this.name == "grad_input"
            other, this = residual_operand(this, other, reuses)
        pair = (codes, other) if this.sides == SIDES else (other, codes)
        product = forward(matmul, this, pair, extra, source=source)
        back = matmul.moves[this.name == "grad_weight"]
        results.append(of.cast(product if back is None else back.move_back(product)))
    return results[0], results[1]


def gradient_pass(
    matmul: QuantizedMatmul,
    side: Side,
    axes: tuple[ProductAxes, bool],
    of: CotangentType | None = None,
) -> MatmulPass:
    """The product that gives an operand's cotangent, of axes by `ProductAxes.gradient_axes`."""
    name, dtype = GRADIENT[side], matmul.out_dtype if of is None else of.dtype
    if matmul.recipe.reduce_dtype is not None and jax.sharding.get_abstract_mesh().manual_axes:
        # Devices of shard_map add up what this returns.
        dtype = reduced_in(dtype, matmul.recipe.reduce_dtype)
    (pass_axes, g_is_lhs), move = axes, matmul.moves[side == "lhs"]
    this = MatmulPass(name, getattr(matmul.recipe, name), pass_axes, dtype, (None, move))
    return this if g_is_lhs else this._replace(moves=(move, None), sides=("rhs", "lhs"))


def residual_operand(
    this: MatmulPass, operand: AnyOperand, reuses: bool
) -> tuple[AnyOperand, MatmulPass]:
    """A saved operand as a gradient's pass multiplies it; and the pass, without a movement that has
    been made."""
    at = this.sides.index("rhs")
    move, spec, axes = this.moves[at], this.spec.rhs, (this.axes.lhs, this.axes.rhs)[at]
    if move is not None and isinstance(operand, MXArray):
        # Codes are gathered as they are.
        (operand, *_), this = place(operand, move, spec, axes, None), this._replace(moves=STAY)
    if isinstance(operand, PackedMXArray):
        operand = operand.unpack()
    if not isinstance(operand, MXArray):
        return operand, this
    if spec is None:
        return dequantize_operand(operand, operand.dtype, saturates=True), this
    # Codes are reused if their blocks also lie along the new contracting axis (square blocks).
    reuses = reuses and operand.format == spec.format and operand.blocks == axes.blocks(spec.format)
    if not reuses or this.spec.transform is not None:
        operand = dequantize_operand(operand, np.dtype(np.float32), saturates=True)
    return operand, this


def cast_for_both(
    matmul: QuantizedMatmul, passes: Sequence[MatmulPass], g: jax.Array, key: Key
) -> list[tuple[MXArray, Source | None]] | None:
    """The cotangent quantized for both gradients in one call, which may read it once; None if one
    of them takes it as it is, or changes it first."""
    if any(
        spec is None or spec.prescale != 1.0 or spec.tensor_scale == "row" or transform is not None
        for spec, transform in ((this.spec.lhs, this.spec.transform) for this in passes)
    ):
        return None
    at = [this.sides.index("lhs") for this in passes]
    axes = [(this.axes.lhs, this.axes.rhs)[i] for this, i in zip(passes, at, strict=True)]
    specs: Any = [this.spec.lhs for this in passes]
    blocks = [g_axes.blocks(spec.format) for g_axes, spec in zip(axes, specs, strict=True)]
    scope = ".".join(f"axis{g_axes.block_axis}" for g_axes in axes)
    keys = [
        operand_keys(product_key(matmul.recipe, this.name, key))[i] if spec.random_bits else None
        for this, i, spec in zip(passes, at, specs, strict=True)
    ]
    casts = tuple(cast_call(g, spec, of) for spec, of in zip(specs, blocks, strict=True))
    with jax.named_scope("grad_both"), jax.named_scope(scope):
        pair = cast_both(g, tuple(keys), casts=casts)
    sources = ((g, ValuesCall(cast=a, beside=b)) for a, b in (casts, casts[::-1]))
    return [(x, None if any(keys) else source) for x, source in zip(pair, sources, strict=True)]


# The product in float32 ---------------------------------------------------------------------------


def exact_fwd(
    matmul: QuantizedMatmul, dtype: np.dtype, lhs: AnyOperand, rhs: AnyOperand, extra: Extra
) -> jax.Array:
    """The product of operands as they came, in float32: as this it is differentiated."""
    exact = in_high_precision(matmul)
    return forward(exact, exact.output, (values(lhs), values(rhs)), extra).astype(dtype)


def exact_bwd(
    matmul: QuantizedMatmul, types: Types, operands: Operands, g: jax.Array, extra: Extra
) -> Operands:
    """The cotangents in float32: as these they are differentiated."""
    float32 = np.dtype(np.float32)
    left, right = (of and dataclasses.replace(of, dtype=float32) for of in types)
    lhs, rhs = operands
    pair = gradients(in_high_precision(matmul), (left, right), (values(lhs), values(rhs)), g, extra)
    lhs_ct, rhs_ct = (x if of is None else of.cast(x) for x, of in zip(pair, types, strict=True))
    return lhs_ct, rhs_ct


def in_high_precision(matmul: QuantizedMatmul) -> QuantizedMatmul:
    """The same product of values as they are, in float32."""
    return dataclasses.replace(
        matmul,
        recipe=dataclasses.replace(_HIGH_PRECISION, gather=matmul.recipe.gather),
        out_dtype=np.dtype(np.float32),
        precision=lax.Precision.HIGHEST,
    )


def values(operand: AnyOperand) -> jax.Array:
    """The values of an operand, in float32 if it is quantized."""
    if not isinstance(operand, Quantized):
        return operand
    operand = unpacked(operand)
    assert isinstance(operand, MXArray)
    return decode(operand, np.dtype(np.float32), saturates=True)


# Casts --------------------------------------------------------------------------------------------


def cast_call(
    x: jax.Array, spec: OperandSpec, blocks: Blocks, tensor_scale: jax.Array | None = None
) -> QuantizeCall:
    """What backends see of a cast of a checked array."""
    return QuantizeCall(
        shape=x.shape,
        dtype=np.dtype(x.dtype),
        format=spec.format,
        blocks=blocks,
        scale_rule=spec.scale_rule,
        rounding=spec.rounding,
        scale_axes=() if tensor_scale is None else varying_axes(tensor_scale),
    )


class CastArguments(NamedTuple):
    """What `cast_operand` takes beside the array."""

    spec: OperandSpec
    blocks: Blocks
    key: Key
    tensor_scale: jax.Array | None
    scope: str


def cast_operand(
    x: jax.Array,
    spec: OperandSpec,
    blocks: Blocks,
    key: Key = None,
    tensor_scale: jax.Array | None = None,
    scope: str | None = None,
) -> MXArray:
    """Quantize a checked array by its spec, on the backend that takes it."""
    drawn = None if key is None or not spec.random_bits else DerivedKey.of(key)
    with contextlib.nullcontext() if scope is None else jax.named_scope(scope):
        result = bind(cast_call(x, spec, blocks, tensor_scale), x, drawn, tensor_scale)
        return checkpoint_name(result, QUANTIZED)


Cast = Callable[[jax.Array, CastArguments], MXArray]
# Outside of a product, which is one program already.
cast_array = one_program("spec", "blocks", "scope")(cast_operand)


@one_program("casts")
def cast_both(
    x: jax.Array,
    keys: tuple[Key, ...],
    tensor_scale: jax.Array | None = None,
    *,
    casts: tuple[QuantizeCall, ...],
) -> tuple[MXArray, MXArray]:
    """Quantize a checked array twice: in one call where a backend takes both, else in two."""
    drawn = tuple(None if key is None else DerivedKey.of(key) for key in keys)
    first, second = casts
    call = QuantizeBothCall(first=first, second=second)
    return checkpoint_name(bind(call, x, drawn, tensor_scale), QUANTIZED)


def dequantize_operand(x: MXArray, dtype: np.dtype, *, saturates: bool) -> jax.Array:
    """`mxarray.decode`, on the backend that takes it."""
    call = DequantizeCall.of(x, dtype, saturates=saturates)
    return bind(call, dataclasses.replace(x, primal=None))


def as_cast(values: jax.Array, codes: MXArray, spec: OperandSpec) -> MXArray:
    """Codes that were made of values in plain JAX, as a cast that captures see."""
    call = cast_call(values, spec, codes.blocks)
    return with_derivative(codes, cast_by_hand, (call,), values, codes)


def cast_by_hand(call: QuantizeCall, values: jax.Array, codes: MXArray) -> MXArray:
    """The codes as they are: such a cast has their derivative."""
    return codes


# How a dense product quantizes and multiplies -----------------------------------------------------


def quantize_operands(
    this: MatmulPass,
    operands: Operands,
    key: Key,
    sizes: jax.Array | None = None,
    casts: tuple[Cast | None, Cast | None] = (None, None),
) -> tuple[Operands, jax.Array | None]:
    """Both operands where their product is, transformed, and quantized: by `cast_operand`, or by
    casts of their own."""
    transform, keys, results = this.spec.transform, operand_keys(key), []
    both = this.axes.lhs, this.axes.rhs
    layouts = this.axes.block_layouts(*(spec and spec.format for spec in this.specs))
    for at, (x, spec, axes, cast) in enumerate(zip(operands, this.specs, both, casts, strict=True)):
        (axis, blocks), move, drawn, tensor_scale = layouts[at], this.moves[at], keys[at], None
        if move is not None:
            x, move, drawn, tensor_scale = place(x, move, spec, axes, drawn, transform)
        if transform is not None:
            x = transformed(x, transform, keys[2], axis)
        if spec is not None and not isinstance(x, Quantized):
            # Captures know a cast by its scope.
            names = this.sides[at], spec.format.name, spec.scale_rule.name, f"axis{axis}"
            x = prescaled(x, spec)
            if spec.tensor_scale == "row":
                largest = spec.scale_rule.largest_value(spec.format)
                tensor_scale = find_row_scales(x, axes, blocks, largest)
            how = CastArguments(spec, blocks, drawn, tensor_scale, ".".join(names))
            x = cast_operand(x, *how) if cast is None else cast(x, how)
            x = x if move is None else move.move_codes(x)
        results.append(x)
    return (results[0], results[1]), sizes


def multiply(
    matmul: QuantizedMatmul,
    this: MatmulPass,
    operands: Operands,
    sizes: None,
    stored: bool,
    sources: Callable[[], Sequence[Source | None]],
) -> jax.Array:
    """The product of canonical operands, by the backend that takes it."""
    (lhs, rhs), recipe = operands, matmul.recipe
    if not isinstance(lhs, Quantized) and not isinstance(rhs, Quantized):
        return lax.dot_general(
            lhs,
            rhs,
            this.axes.dimension_numbers,
            precision=matmul.precision,
            preferred_element_type=reduced_in(this.dtype, recipe.reduce_dtype),
        ).astype(this.dtype)
    call = MatmulCall(
        lhs=OperandType.of(lhs, this.axes.lhs),
        rhs=OperandType.of(rhs, this.axes.rhs),
        out_dtype=this.dtype,
        precision=matmul.precision,
        fast_accumulation=this.spec.fast_accumulation,
        reduce_dtype=recipe.reduce_dtype,
    )
    return bind(call, lhs, rhs, sources=None if stored else sources)


def multiply_rows(
    matmul: QuantizedMatmul, this: MatmulPass, operands: Operands, *others: Any
) -> jax.Array:
    """The product of operands whose rows have tensor scales: these leave the sums."""
    by_row = [spec is not None and spec.tensor_scale == "row" for spec in this.specs]
    lhs, rhs, scales = without_row_scales(*operands, this.axes, by_row)
    float32 = this._replace(dtype=np.dtype(np.float32))
    sums = matmul.multiplier(matmul, float32, (lhs, rhs), *others)
    return scaled(sums, *scales).astype(this.dtype)


def _sources(
    this: MatmulPass, operands: Operands, source: Source | None
) -> list[tuple[jax.Array, ValuesCall] | None]:
    """The array that each operand's codes are cast from, and how it gives values in their place;
    None where only codes do."""
    results: list[Source | None] = []
    axes = this.axes.lhs, this.axes.rhs
    for x, spec, x_axes, move, side in zip(
        operands, this.specs, axes, this.moves, this.sides, strict=True
    ):
        results.append(None)
        if source is not None and side == "lhs":
            results[-1] = lax.stop_gradient(source[0]), source[1]
        elif spec is None or isinstance(x, Quantized) or move is not None:
            continue
        elif spec.prescale == 1.0 and not spec.random_bits and spec.tensor_scale == "tensor":
            cast = cast_call(x, spec, x_axes.blocks(spec.format))
            results[-1] = lax.stop_gradient(x), ValuesCall(cast=cast)
    return [None, None] if this.spec.transform is not None else results


# Each product draws from the stream of its number.
_STREAMS: tuple[Pass, ...] = ("output", "grad_input", "grad_weight")


def product_key(recipe: MatmulRecipe, product: Pass, key: Key) -> Key:
    """What one of the three products draws from; None if it draws nothing."""
    if not getattr(recipe, product).is_stochastic:
        return None
    if key is None:
        raise ValueError(
            f"dot_general: recipe {recipe.name!r} rounds stochastically in {product} and needs a "
            "key, got key=None; pass key=jax.random.key(seed) to the product that is "
            "differentiated, or the stream 'quantize' to a Flax model"
        )
    return DerivedKey.of(key).fold_in(_STREAMS.index(product))


def operand_keys(key: Key) -> tuple[Key, Key, Key]:
    """Keys of the left operand, of the right one, and of a transform's signs, which both share."""
    lhs, rhs, signs = (None,) * 3 if key is None else DerivedKey.of(key).split(3)
    return lhs, rhs, signs


def transformed(x: AnyOperand, transform: Hadamard, key: Key, axis: int) -> Any:
    """`T(x)`: see `reference.hadamard`."""
    if isinstance(x, Quantized):
        raise ValueError(
            "matmul: the recipe transforms its operands before quantizing, which an MXArray no "
            f"longer allows, got format={x.format.name}, shape={x.shape}; pass dequantize(), or a "
            "recipe without transform"
        )
    dtype = np.dtype(x.dtype)
    call = TransformCall(shape=x.shape, dtype=dtype, axis=axis % x.ndim, size=transform.size)
    if transform.signs is not None:
        return bind(call, x, jnp.asarray(transform.signs, jnp.int32))
    assert key is not None, "random signs without a key"
    return bind(call, x, DerivedKey.of(key))


def prescaled(x: jax.Array, spec: OperandSpec) -> jax.Array:
    """x times the prescale of its spec, in x's dtype."""
    if spec.prescale == 1.0:
        return x
    product = x * jnp.asarray(spec.prescale, x.dtype)
    # XLA would hand on float32 where float32 is read next, and other bits with it.
    return product if x.dtype == jnp.float32 else lax.optimization_barrier(product)


def unscaled(product: jax.Array, this: MatmulPass, operands: Operands) -> jax.Array:
    """A product without the prescales of its operands; one that came quantized never had any."""
    pairs = zip(operands, this.specs, strict=True)
    prescales = [spec.prescale for x, spec in pairs if spec and not isinstance(x, Quantized)]
    factor = 1.0 / math.prod(prescales)
    if factor == 1.0:
        return product
    # 16/9 is 1.78125 in bfloat16: every gradient would be 0.2 % too long.
    wide = jnp.promote_types(product.dtype, jnp.float32)
    return (product.astype(wide) * jnp.asarray(factor, wide)).astype(product.dtype)


def on_automatic_axes(
    run: Callable[..., jax.Array],
    mesh: AbstractMesh,
    out_sharding: PartitionSpec,
    lhs: AnyOperand,
    rhs: AnyOperand,
    *others: object,
) -> jax.Array:
    """`run(lhs, rhs, *others)`, with automatic axes in place of explicit ones."""

    def compute(values: Operands, codes: Operands, *others: object) -> jax.Array:
        lhs, rhs = (
            x if of_x is None else of_x if x is None else dataclasses.replace(of_x, primal=x)
            for x, of_x in zip(values, codes, strict=True)
        )
        return run(lhs, rhs, *others)

    (left, lhs_codes), (right, rhs_codes) = parted(lhs), parted(rhs)
    automatic: Any = jax.sharding.auto_axes(
        compute, axes=mesh.explicit_axes, out_sharding=out_sharding
    )
    return automatic((left, right), (lhs_codes, rhs_codes), *others)
