"""The dense product and its two gradients, each by its own spec of the recipe.

`multiply` is one product of prepared operands in canonical order, by the backend that takes it.
"""

import dataclasses
from collections.abc import Collection
from typing import NamedTuple

import jax
import numpy as np
from jax import lax

from mx_jax.axes import ProductAxes, Side
from mx_jax.backends.calls import AnyOperand, MatmulCall, Operand, OperandType
from mx_jax.backends.primitive import bind, choose, compiler_splits
from mx_jax.backends.select import active
from mx_jax.mxarray import MXArray
from mx_jax.ops.arguments import GRADIENTS, Key, product_key
from mx_jax.ops.operands import (
    SIDES,
    SWAPPED,
    OperandCast,
    Sides,
    as_taken,
    keep_both,
    mask_clipped,
    operand_keys,
    prepare_operands,
    quantize_operand_both,
    reuse_moved,
    unscaled,
)
from mx_jax.ops.packing import tell_of_packing, unpacked_for
from mx_jax.ops.product import (
    AnyResidual,
    CotangentAval,
    Residual,
    note_cast,
    noted,
    one_program,
)
from mx_jax.ops.sharded_operands import twice
from mx_jax.ops.tags import GRADIENT, Free, remark
from mx_jax.packed import PackedMXArray, Quantized, unpacked
from mx_jax.sharding.movement import STAY, Movement, Moves, manual_axes, reduced_in
from mx_jax.specs import MatmulRecipe, MatmulSpec, Residuals


def multiply(
    lhs: AnyOperand,
    rhs: AnyOperand,
    axes: ProductAxes,
    out_dtype: np.dtype,
    *,
    precision: lax.PrecisionLike = None,
    fast_accumulation: bool = False,
    stored: Collection[Side] = (),
    split: bool = True,
    reduce_dtype: np.dtype | None = None,
) -> jax.Array:
    """Two canonical operands to `[*batch, *m, *n]`, as they are."""
    if not isinstance(lhs, Quantized) and not isinstance(rhs, Quantized):
        return lax.dot_general(
            lhs,
            rhs,
            axes.dimension_numbers,
            precision=precision,
            preferred_element_type=reduced_in(out_dtype, reduce_dtype),
        ).astype(out_dtype)
    call = MatmulCall(
        lhs=OperandType.of(lhs, axes.lhs),
        rhs=OperandType.of(rhs, axes.rhs),
        out_dtype=out_dtype,
        precision=precision,
        fast_accumulation=fast_accumulation,
        moves_codes=split,
        reduce_dtype=reduce_dtype,
    )
    if not stored and not isinstance(rhs, PackedMXArray) and active.value is None:
        return bind(call, unpacked(lhs), rhs)
    choice = choose(call)
    sides: tuple[tuple[Side, AnyOperand], ...] = ("lhs", lhs), ("rhs", rhs)
    for side, operand in sides:
        if side in stored and isinstance(operand, MXArray):
            tell_of_packing(operand, call, choice, side=side)
    whole = isinstance(rhs, PackedMXArray) and rhs.layout.cut is None and compiler_splits()
    if isinstance(rhs, PackedMXArray) and (whole or rhs.backend != choice.backend.name):
        rhs = unpacked_for(rhs, choice)
        call = dataclasses.replace(call, rhs=OperandType.of(rhs, axes.rhs))
    if (recorder := active.value) is not None and split:
        mesh = jax.sharding.get_abstract_mesh()
        names = recorder.axes if mesh.empty else mesh.axis_names
        if names and (mesh.empty or compiler_splits()):
            remark(_moves(lhs, rhs, call, names))
    return choice.offer.run(unpacked(lhs), rhs, call)


def _moves(lhs: AnyOperand, rhs: AnyOperand, call: MatmulCall, axes: tuple[str, ...]) -> str:
    """What `explain` says of a product that the compiler splits along mesh axes."""
    what = "whole tiles" if isinstance(rhs, PackedMXArray) else "codes and scales"
    return (
        f"operands of lhs.shape={call.lhs.shape}, rhs.shape={call.rhs.shape} -> {what}, where "
        f"the compiler moves them along mesh axes={axes}{twice(lhs)}{twice(rhs)}; parts of the "
        f"product are added up in {reduced_in(call.out_dtype, call.reduce_dtype)}"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseProduct:
    """`[*batch, *m, *n]` by a recipe. What it depends on besides the operands is a key."""

    recipe: MatmulRecipe
    axes: ProductAxes
    out_dtype: np.dtype
    precision: lax.PrecisionLike = None
    moves: Moves = STAY  # None: as the compiler brings the operands

    @one_program("self", "stored")
    def forward(
        self, lhs: AnyResidual, rhs: AnyResidual, extra: Key, stored: tuple[Side, ...] = ()
    ) -> jax.Array:
        spec = self.recipe.fwd
        if isinstance(lhs, Residual) or isinstance(rhs, Residual):
            lhs, rhs, spec = as_taken(lhs, rhs, spec)
        key = product_key(self.recipe, "fwd", extra)
        with jax.named_scope("output"):
            left, right = prepare_operands(lhs, rhs, spec, self.axes, key, self.moves)
            product = multiply(
                left,
                right,
                self.axes,
                self.out_dtype,
                precision=self.precision,
                fast_accumulation=spec.fast_accumulation,
                stored=stored,
                split=self.recipe.gather is None,
                reduce_dtype=self.recipe.reduce_dtype,
            )
            return unscaled(product, lhs, rhs, spec)

    def in_high_precision(self) -> "DenseProduct":
        return dataclasses.replace(
            self,
            recipe=dataclasses.replace(HIGH_PRECISION, gather=self.recipe.gather),
            out_dtype=np.dtype(np.float32),
            precision=jax.lax.Precision.HIGHEST,
        )

    def free(self, side: Side | None) -> tuple[Free, ...]:
        """The axes that a product has from one operand, unless devices pass the operands on."""
        if self.moves != STAY or self.recipe.gather is not None:
            return ()
        axes, in_order = (self.axes, True) if side is None else self.axes.cotangent(side)
        left, right = (0, 1) if in_order else (1, 0)
        batch, kept = len(axes.lhs.batch), len(axes.lhs.kept)
        return (
            *(Free(left, axis, batch + i) for i, axis in enumerate(axes.lhs.kept)),
            *(Free(right, axis, batch + kept + i) for i, axis in enumerate(axes.rhs.kept)),
        )

    def keep(
        self, lhs: AnyOperand, rhs: AnyOperand, extra: Key
    ) -> tuple[AnyResidual, AnyResidual, Key]:
        if self.recipe.residuals is Residuals.QUANTIZED:
            # The same key gives the same codes as without a gradient.
            return *self._taken(lhs, rhs, extra), extra
        return lhs, rhs, extra

    @one_program("self")
    def _taken(self, lhs: AnyOperand, rhs: AnyOperand, key: Key) -> tuple[AnyResidual, AnyResidual]:
        fwd = product_key(self.recipe, "fwd", key)
        return keep_both(self.recipe, lhs, rhs, self.axes, fwd, self.moves)

    def cotangents(
        self, g: jax.Array, saved: Key, both: bool
    ) -> tuple[tuple[Operand, Operand], None]:
        """g for both gradients: quantized in one call if a backend reads it once, else as it is."""
        return self._quantized_cotangents(g, saved) if both else (g, g), None

    def _quantized_cotangents(self, g: jax.Array, key: Key) -> tuple[Operand, Operand]:
        lhs_cast, rhs_cast = (self._cotangent_cast(side, key) for side in GRADIENTS)
        if lhs_cast is None or rhs_cast is None:
            return g, g
        (left, left_key), (right, right_key) = lhs_cast, rhs_cast
        with jax.named_scope("grad_both"):
            pair = quantize_operand_both(g, (left, right), (left_key, right_key))
        if noted.get() is None:
            return pair
        for side, cast, codes in zip(GRADIENTS, (left, right), pair, strict=True):
            axis, rule = self.axes.of_g(side).block_axis, cast.spec.scale_rule.name
            note_cast("lhs", g, codes, rule, axis, GRADIENT[side])
        return pair

    def _cotangent_cast(self, side: Side, key: Key) -> tuple[OperandCast, Key] | None:
        """How one gradient quantizes g, and by which key; None if it changes g first, or not."""
        spec, (axes, g_is_lhs) = self.recipe.gradient(side), self.axes.cotangent(side)
        own = spec.lhs
        if own is None or own.prescale != 1.0 or spec.transform is not None:
            return None
        lhs_key, rhs_key, _ = operand_keys(product_key(self.recipe, GRADIENTS[side], key))
        place, drawn = (axes.lhs, lhs_key) if g_is_lhs else (axes.rhs, rhs_key)
        cast = OperandCast(own, place.blocks(own.format))
        return cast, drawn if own.random_bits else None

    @one_program("self", "side", "aval")
    def gradient(
        self, side: Side, g: Operand, other: AnyResidual, aval: CotangentAval, saved: Key
    ) -> jax.Array:
        """The product of a cotangent (spec.lhs) and a saved operand (spec.rhs), in either order."""
        with jax.named_scope(GRADIENT[side]):
            back = self._operands_back(side, g, other, aval)
            key = product_key(self.recipe, GRADIENTS[side], saved)
            left, right = prepare_operands(
                back.lhs, back.rhs, back.spec, back.axes, key, back.moves, back.sides
            )
            own, asked = back.own, self.recipe.reduce_dtype
            product = multiply(
                left,
                right,
                back.axes,
                # Devices of shard_map add up what this returns.
                aval.dtype if asked is None or not manual_axes() else reduced_in(aval.dtype, asked),
                precision=self.precision,
                fast_accumulation=back.spec.fast_accumulation,
                split=self.recipe.gather is None,
                reduce_dtype=asked,
            )
            product = unscaled(product, back.lhs, back.rhs, back.spec)
            return product if own is None else own.move_back(product)

    def _operands_back(
        self, side: Side, g: Operand, other: AnyResidual, aval: CotangentAval
    ) -> "_Back":
        spec, (axes, g_is_lhs) = self.recipe.gradient(side), self.axes.cotangent(side)
        other = other.operand if isinstance(other, Residual) else other
        own, move = self.moves if side == "lhs" else self.moves[::-1]
        other, move = reuse_moved(other, move, spec, axes.rhs if g_is_lhs else axes.lhs)
        if g_is_lhs:
            return _Back(g, other, spec, axes, (None, move), own, SIDES)
        return _Back(other, g, spec.swapped(), axes, (move, None), own, SWAPPED)

    def masked(self, side: Side, cotangent: jax.Array, own: AnyResidual, saved: Key) -> jax.Array:
        return mask_clipped(self.recipe, side, self.axes, cotangent, own, saved)


class _Back(NamedTuple):
    """A gradient's product: operands, how they are quantized and moved, which is g."""

    lhs: AnyOperand
    rhs: AnyOperand
    spec: MatmulSpec
    axes: ProductAxes
    moves: Moves
    own: Movement | None
    sides: Sides


_HIGH = MatmulSpec(lhs=None, rhs=None)
HIGH_PRECISION = MatmulRecipe(
    name="high precision", fwd=_HIGH, dlhs=_HIGH, drhs=_HIGH, residuals=Residuals.PRIMAL
)
"""Nothing is quantized: what products are compared with."""
