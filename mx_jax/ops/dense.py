"""Products by a recipe: how operands are taken, what of them gradients keep, and the dense product.

Products of rows in groups (`ragged_dot`) have the same base.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from mx_jax.axes import GRADIENT, SIDES, Axes, ProductAxes, Side
from mx_jax.backends.calls import (
    AnyOperand,
    DequantizeCall,
    MatmulCall,
    Operand,
    OperandType,
    QuantizeBothCall,
    QuantizeCall,
    TransformCall,
    ValuesCall,
)
from mx_jax.backends.primitive import bind, choose, compiler_splits
from mx_jax.backends.target import on_devices_of
from mx_jax.codecs.blocks import Blocks, varying_axes
from mx_jax.codecs.rounding import DerivedKey
from mx_jax.mxarray import MXArray
from mx_jax.ops.arguments import GRADIENTS, Key, product_key
from mx_jax.ops.packing import tell_of_packing, unpacked_for
from mx_jax.ops.product import CotangentAval, Product, one_program, with_derivative
from mx_jax.ops.programs import QUANTIZED
from mx_jax.ops.sharded_operands import Placed, place
from mx_jax.packed import PackedMXArray, Quantized
from mx_jax.reference.hadamard import Hadamard
from mx_jax.sharding.movement import STAY, Movement, Moves, manual_axes, reduced_in
from mx_jax.specs import MatmulRecipe, MatmulSpec, OperandSpec

X = TypeVar("X", bound=AnyOperand)
E = TypeVar("E")  # what a product depends on besides its operands

_HIGH = MatmulSpec(lhs=None, rhs=None)
HIGH_PRECISION = MatmulRecipe(
    name="high precision", output=_HIGH, grad_input=_HIGH, grad_weight=_HIGH
)
"""Nothing is quantized: what products are compared with."""


class Task(NamedTuple):
    """One of the three products, and how its operands get to it."""

    lhs: AnyOperand
    rhs: AnyOperand
    spec: MatmulSpec
    axes: ProductAxes
    moves: Moves = STAY  # None: as the compiler brings an operand
    sides: tuple[Side, Side] = SIDES  # what captures call the operands: g is the left one
    prepares: tuple[Callable[..., Any], ...] = ()  # what quantizes each operand
    sizes: jax.Array | None = None  # of groups of rows
    cotangent: "CastCotangent | None" = None  # whose codes are the operand that came quantized


class Taken(NamedTuple):
    """Both operands as they came, and transformed and quantized, as their product takes them."""

    task: Task
    operands: tuple[AnyOperand, AnyOperand]

    def sources(self) -> list[tuple[jax.Array, ValuesCall] | None]:
        """What each operand's codes were cast from in this product, and how, where its values may
        take their place."""
        task, found = self.task, list[tuple[jax.Array, ValuesCall] | None]()
        axes, specs = (task.axes.lhs, task.axes.rhs), (task.spec.lhs, task.spec.rhs)
        if task.spec.transform is not None:
            return [None, None]
        given = zip(task[:2], specs, axes, task.moves, task.sides, strict=True)
        for x, spec, own, move, side in given:
            if task.cotangent is not None and side == "lhs":
                values = lax.stop_gradient(task.cotangent.values)
                found.append((values, task.cotangent.call))
                continue
            found.append(None)
            if spec is None or isinstance(x, Quantized) or move is not None:
                continue
            if spec.prescale == 1.0 and not spec.random_bits:
                cast = cast_call(x, spec, own.blocks(spec.format))
                found[-1] = lax.stop_gradient(x), ValuesCall(cast=cast)
        return found


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CastCotangent:
    """A cotangent that was cast for both products at once.

    Attributes:
      codes: for one of them.
      values: what was cast.
      call: how that product gets values instead.
    """

    codes: MXArray
    values: jax.Array
    call: ValuesCall = dataclasses.field(metadata=dict(static=True))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecipeProduct(Product[E]):
    """What all kinds of product do by a recipe. A kind takes its operands, and multiplies them."""

    recipe: MatmulRecipe
    axes: ProductAxes
    out_dtype: np.dtype
    precision: lax.PrecisionLike = None
    moves: Moves = STAY

    def key_of(self, extra: E) -> Key:
        raise NotImplementedError

    def prepared(self, task: Task, extra: E) -> Task:
        """What quantizes the operands: by default each alone."""
        return task._replace(prepares=(prepare, prepare))

    def multiply(
        self, taken: Taken, out_dtype: np.dtype, stored: Collection[Side] = ()
    ) -> jax.Array:
        """The product of operands as they were taken."""
        raise NotImplementedError

    @one_program("self", "stored")
    def forward(
        self, lhs: AnyOperand, rhs: AnyOperand, extra: E, stored: tuple[Side, ...] = ()
    ) -> jax.Array:
        key = product_key(self.recipe, "output", self.key_of(extra))
        with jax.named_scope("output"):
            taken = self.take(Task(lhs, rhs, self.recipe.output, self.axes, self.moves), extra, key)
            return unscaled(self.multiply(taken, self.out_dtype, stored), taken.task)

    def take(self, task: Task, extra: E, key: Key) -> Taken:
        """Both operands where their product is, transformed, and quantized by their specs."""
        task = self.prepared(task, extra)
        spec, axes, keys = task.spec, (task.axes.lhs, task.axes.rhs), operand_keys(key)
        given = (task.lhs, task.rhs), task.moves, (spec.lhs, spec.rhs), axes, keys[:2]
        placed = [
            Placed(x, None, drawn)
            if move is None
            else place(x, move, own, where, drawn, spec.transform)
            for x, move, own, where, drawn in zip(*given, strict=True)
        ]
        left, right = (found.operand for found in placed)
        if spec.transform is not None:
            left = transformed(left, spec.transform, keys[2], axes[0].block_axis)
            right = transformed(right, spec.transform, keys[2], axes[1].block_axis)
        operands = []
        for i, (x, own) in enumerate(((left, spec.lhs), (right, spec.rhs))):
            found = placed[i]
            x = task.prepares[i](x, own, axes[i], found.key, found.tensor_scale, task.sides[i])
            if found.move is not None and isinstance(x, MXArray):
                x = found.move.move_codes(x)
            operands.append(x)
        return Taken(task, (operands[0], operands[1]))

    def keep(self, lhs: AnyOperand, rhs: AnyOperand, extra: E) -> tuple[AnyOperand, AnyOperand]:
        if not any(map(self.recipe.keeps_codes, SIDES)):
            return lhs, rhs
        # The same key gives the same codes as without a gradient.
        return self._kept(lhs, rhs, extra)

    @one_program("self")
    def _kept(self, lhs: AnyOperand, rhs: AnyOperand, extra: E) -> tuple[AnyOperand, AnyOperand]:
        key, spec = product_key(self.recipe, "output", self.key_of(extra)), self.recipe.output
        others = {side: None for side in SIDES if not self.recipe.keeps_codes(side)}
        spec = dataclasses.replace(spec, **others)
        with jax.named_scope("output"):
            return self.take(Task(lhs, rhs, spec, self.axes), extra, key).operands

    @one_program("self", "side", "aval")
    def gradient(
        self,
        side: Side,
        g: Operand | CastCotangent,
        other: AnyOperand,
        aval: CotangentAval,
        extra: E,
    ) -> jax.Array:
        """The product of a cotangent (spec.lhs) and a saved operand (spec.rhs), in either order."""
        key = product_key(self.recipe, GRADIENTS[side], self.key_of(extra))
        dtype, asked = aval.dtype, self.recipe.reduce_dtype
        if asked is not None and manual_axes():
            # Devices of shard_map add up what this returns.
            dtype = reduced_in(dtype, asked)
        with jax.named_scope(GRADIENT[side]):
            spec, (axes, g_is_lhs) = self.recipe.gradient(side), self.axes.cotangent(side)
            back, move = self.moves if side == "lhs" else self.moves[::-1]
            kept, move = reuse(other, move, spec, axes.rhs if g_is_lhs else axes.lhs)
            cast = g if isinstance(g, CastCotangent) else None
            g = g.codes if isinstance(g, CastCotangent) else g
            if g_is_lhs:
                task = Task(g, kept, spec, axes, (None, move))
            else:
                task = Task(kept, g, spec.swapped(), axes, (move, None), ("rhs", "lhs"))
            taken = self.take(task._replace(cotangent=cast), extra, key)
            product = unscaled(self.multiply(taken, dtype), taken.task)
            return product if back is None else back.move_back(product)

    def in_high_precision(self) -> Any:
        return dataclasses.replace(
            self,
            recipe=dataclasses.replace(HIGH_PRECISION, gather=self.recipe.gather),
            out_dtype=np.dtype(np.float32),
            precision=lax.Precision.HIGHEST,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseProduct(RecipeProduct[Key]):
    """`[*batch, *m, *n]` by a recipe. What it depends on besides the operands is a key."""

    def key_of(self, extra: Key) -> Key:
        return extra

    def multiply(
        self, taken: Taken, out_dtype: np.dtype, stored: Collection[Side] = ()
    ) -> jax.Array:
        """By the backend that takes the product of the operands, which are canonical."""
        (lhs, rhs), axes = taken.operands, taken.task.axes
        if not isinstance(lhs, Quantized) and not isinstance(rhs, Quantized):
            return lax.dot_general(
                lhs,
                rhs,
                axes.dimension_numbers,
                precision=self.precision,
                preferred_element_type=reduced_in(out_dtype, self.recipe.reduce_dtype),
            ).astype(out_dtype)
        call = MatmulCall(
            lhs=OperandType.of(lhs, axes.lhs),
            rhs=OperandType.of(rhs, axes.rhs),
            out_dtype=out_dtype,
            precision=self.precision,
            fast_accumulation=taken.task.spec.fast_accumulation,
            reduce_dtype=self.recipe.reduce_dtype,
        )
        if not stored and not isinstance(rhs, PackedMXArray):
            return bind(call, lhs, rhs, sources=taken.sources)
        choice = choose(call)
        for side, operand in zip(SIDES, (lhs, rhs), strict=True):
            if side in stored and isinstance(operand, MXArray):
                tell_of_packing(operand, call, choice, side=side)
        whole = isinstance(rhs, PackedMXArray) and rhs.layout.cut is None and compiler_splits()
        if isinstance(rhs, PackedMXArray) and (whole or rhs.backend != choice.backend.name):
            rhs = unpacked_for(rhs, choice)
            call = dataclasses.replace(call, rhs=OperandType.of(rhs, axes.rhs))
        return bind(call, lhs, rhs)

    def cotangents(self, g: jax.Array, extra: Key, both: bool) -> tuple[Any, Any]:
        """g for both gradients: quantized in one call if a backend reads it once, else as it is."""
        casts: list[QuantizeCall] = []
        keys: list[Key] = []
        for side in GRADIENTS if both else ():
            spec, (axes, g_is_lhs) = self.recipe.gradient(side), self.axes.cotangent(side)
            own = spec.lhs
            if own is None or own.prescale != 1.0 or spec.transform is not None:
                return g, g  # not cast, or changed first
            lhs_key, rhs_key, _ = operand_keys(product_key(self.recipe, GRADIENTS[side], extra))
            where, drawn = (axes.lhs, lhs_key) if g_is_lhs else (axes.rhs, rhs_key)
            casts.append(cast_call(g, own, where.blocks(own.format)))
            keys.append(drawn if own.random_bits else None)
        if not both:
            return g, g
        axes = ".".join(f"axis{self.axes.of_g(side).block_axis}" for side in GRADIENTS)
        with jax.named_scope("grad_both"), jax.named_scope(axes), on_devices_of(g):
            pair = quantize_operand_both(g, tuple(keys), casts=tuple(casts))
        if any(keys):
            return pair
        values = (ValuesCall(cast=a, beside=b) for a, b in (casts, casts[::-1]))
        first, second = map(CastCotangent, pair, (g, g), values)
        return first, second


# Operands -----------------------------------------------------------------------------------------


def operand_keys(key: Key) -> tuple[Key, Key, Key]:
    """Keys of the left operand, of the right one, and of a transform's signs, which both share."""
    lhs, rhs, signs = (None,) * 3 if key is None else DerivedKey.of(key).split(3)
    return lhs, rhs, signs


def prepare(
    operand: X,
    spec: OperandSpec | None,
    axes: Axes,
    key: Key,
    tensor_scale: jax.Array | None = None,
    side: Side = "lhs",
) -> X | MXArray:
    """One operand, quantized by its spec unless it is or stays what it was."""
    if spec is None or isinstance(operand, Quantized):
        return operand
    values = prescaled(operand, spec)
    with named_cast(side, spec, axes):
        drawn = key if spec.random_bits else None
        return cast_operand(values, spec, axes.blocks(spec.format), drawn, tensor_scale)


def named_cast(side: Side, spec: OperandSpec, axes: Axes) -> contextlib.AbstractContextManager[Any]:
    """The scope of a cast, by which captures know it."""
    return jax.named_scope(
        f"{side}.{spec.format.name}.{spec.scale_rule.name}.axis{axes.block_axis}"
    )


def as_cast(values: jax.Array, codes: MXArray, spec: OperandSpec) -> MXArray:
    """Codes that were made of values in plain JAX: a cast to those who look at the program."""
    return with_derivative(
        codes, cast_by_hand, (cast_call(values, spec, codes.blocks),), values, codes
    )


def cast_by_hand(call: QuantizeCall, values: jax.Array, codes: MXArray) -> MXArray:
    """What the derivative of such a cast is that of: the codes as they are."""
    return codes


def prescaled(x: jax.Array, spec: OperandSpec) -> jax.Array:
    """What an operand's spec quantizes: x times its prescale, in x's dtype."""
    if spec.prescale == 1.0:
        return x
    product = x * jnp.asarray(spec.prescale, x.dtype)
    # XLA would hand on float32 where float32 is read next, and other bits with it.
    return product if x.dtype == jnp.float32 else lax.optimization_barrier(product)


def unscaled(product: jax.Array, task: Task) -> jax.Array:
    """A product without the prescales of its operands; one that came quantized never had any."""
    sides = (task.lhs, task.spec.lhs), (task.rhs, task.spec.rhs)
    prescales = [own.prescale for x, own in sides if own and not isinstance(x, Quantized)]
    factor = 1.0 / math.prod(prescales)
    if factor == 1.0:
        return product
    # 16/9 is 1.78125 in bfloat16: every gradient would be 0.2 % too long.
    wide = jnp.promote_types(product.dtype, jnp.float32)
    return (product.astype(wide) * jnp.asarray(factor, wide)).astype(product.dtype)


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


# What gradients keep ------------------------------------------------------------------------------


def reuse(
    operand: AnyOperand, move: Movement | None, product: MatmulSpec, axes: Axes
) -> tuple[Operand, Movement | None]:
    """A saved operand, the right one of a backward product's spec, and how it gets there."""
    if move is not None and isinstance(operand, MXArray):
        # Codes are gathered as they are.
        operand, move = place(operand, move, product.rhs, axes, None).operand, None
    if isinstance(operand, PackedMXArray):
        operand = operand.unpack()
    if not isinstance(operand, MXArray):
        return operand, move
    spec = product.rhs
    if spec is None:
        return dequantize_operand(operand, operand.dtype, saturates=True), move
    # Codes are reused if their blocks also lie along the new contracting axis (square blocks).
    reusable = operand.format == spec.format and operand.blocks == axes.blocks(spec.format)
    if not reusable or product.transform is not None:
        operand = dequantize_operand(operand, np.dtype(np.float32), saturates=True)
    return operand, move


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
        scale_axes=varying_axes(tensor_scale),
    )


def cast_operand(
    x: jax.Array,
    spec: OperandSpec,
    blocks: Blocks,
    key: Key = None,
    tensor_scale: jax.Array | None = None,
) -> MXArray:
    """Quantize a checked array by its spec, on the backend that takes it on the machine in context.

    Whoever calls it outside a product says `with on_devices_of(x)`.
    """
    call = cast_call(x, spec, blocks, tensor_scale)
    drawn = None if key is None else DerivedKey.of(key)
    return checkpoint_name(bind(call, x, drawn, tensor_scale), QUANTIZED)


# Outside of a product, which is one program already.
quantize_operand = one_program("spec", "blocks")(cast_operand)


@one_program("casts")
def quantize_operand_both(
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
