"""The product of rows in groups, each with a matrix of its own, and its two gradients.

Two of the three products keep the rows (output, grad_input), the third sums over those of each
group (grad_weight). Nothing is transposed: blocks lie along whichever axis is contracted.
"""

import dataclasses
import functools
import math
from collections.abc import Collection
from typing import NamedTuple

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from mx_jax.axes import Axes, ProductAxes, Side
from mx_jax.backends.calls import AnyOperand, OperandType, RaggedCall
from mx_jax.backends.primitive import choose
from mx_jax.codecs.rounding import NEAREST
from mx_jax.formats import Whole
from mx_jax.mxarray import MXArray
from mx_jax.ops.arguments import Key, draw_bits
from mx_jax.ops.dense import (
    Prepared,
    RecipeProduct,
    Task,
    dequantize_operand,
    prepare,
    prescaled,
    quantize_operand,
)
from mx_jax.ops.packing import tell_of_packing, unpacked_for
from mx_jax.ops.product import AnyResidual, Residual, note_cast
from mx_jax.ops.remat import QUANTIZED
from mx_jax.ops.tags import Free, remark
from mx_jax.packed import PackedMXArray, Quantized
from mx_jax.reference import ragged
from mx_jax.reference.ragged import RaggedRows, ragged_rows
from mx_jax.specs import MatmulSpec, OperandSpec

# The axis of experts is no batch axis here: a format that is WHOLE takes one matrix at a time.
LAST = Axes.ordered()
AXES = ProductAxes(LAST, Axes.ordered(k_first=True))
_GRAD_WEIGHT = AXES.cotangent("rhs")[0]
# Of `[m, k]` by `[g, k, n]` to `[m, n]`, of g by `[g, k, n]` to `[m, k]`, of g by `[m, k]`.
_FREE: dict[Side | None, tuple[Free, ...]] = {
    None: (Free(1, 2, 1),),
    "lhs": (Free(1, 1, 1),),
    "rhs": (Free(0, 1, 2), Free(1, 1, 1)),
}


class Groups(NamedTuple):
    """What a ragged product depends on besides its operands."""

    sizes: jax.Array
    key: Key


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedProduct(RecipeProduct[Groups]):
    """`[m, k]` by `[g, k, n]` to `[m, n]`, by a recipe."""

    axes: ProductAxes = AXES

    def key_of(self, extra: Groups) -> Key:
        return extra.key

    def prepared(self, task: Task, extra: Groups) -> Prepared:
        lhs, own, sizes = task.lhs, task.spec.lhs, extra.sizes
        if task.axes == _GRAD_WEIGHT:
            # The rows of each group are padded to whole blocks.
            assert not isinstance(task.rhs, Quantized), "g comes as values"
            rows = ragged_rows(sizes, task.rhs.shape[0], _padding_unit(task.spec))
            if isinstance(lhs, MXArray):
                # Its square blocks end within groups.
                lhs = dequantize_operand(lhs, np.dtype(np.float32), saturates=True)
            assert not isinstance(lhs, PackedMXArray)
            lhs, rhs = rows.place(lhs), rows.place(task.rhs)
            along_rows = functools.partial(_prepare_contracted, rows)
            return Prepared(task._replace(lhs=lhs, rhs=rhs), (along_rows, along_rows), rows.sizes)
        # Products leave out the rows of no group; scales of more than a row would count them.
        if own is not None and (own.format.tensor_scale or isinstance(own.format.block[0], Whole)):
            lhs = without_unused(lhs, sizes)
        by_row = functools.partial(_prepare_rows, sizes)
        return Prepared(task._replace(lhs=lhs), (by_row, prepare), sizes)

    def multiply(
        self,
        lhs: AnyOperand,
        rhs: AnyOperand,
        axes: ProductAxes,
        out_dtype: np.dtype,
        *,
        fast_accumulation: bool = False,
        stored: Collection[Side] = (),
        sizes: jax.Array | None = None,
    ) -> jax.Array:
        assert sizes is not None
        if axes != _GRAD_WEIGHT:
            axes = dataclasses.replace(axes, rhs=axes.rhs.in_batch())
        if not isinstance(lhs, Quantized) and not isinstance(rhs, Quantized):
            contracting = axes.lhs.block_axis, axes.rhs.block_axis
            shapes = " x ".join(f"{x.dtype} {list(x.shape)}" for x in (lhs, rhs))
            groups = f"{sizes.shape[0]} groups, to {out_dtype}"
            remark(f"ragged product {shapes}, {groups} -> jax.lax, not quantized")
            return ragged.scaled_ragged_dot(lhs, rhs, sizes, contracting, out_dtype, self.precision)
        call = RaggedCall(
            lhs=OperandType.of(lhs, axes.lhs),
            rhs=OperandType.of(rhs, axes.rhs),
            num_groups=sizes.shape[0],
            out_dtype=out_dtype,
            precision=self.precision,
        )
        choice = choose(call)
        if "rhs" in stored and isinstance(rhs, MXArray):
            tell_of_packing(rhs, call, choice, "ragged_dot")
        if isinstance(rhs, PackedMXArray) and rhs.backend != choice.backend.name:
            rhs = unpacked_for(rhs, choice, "ragged_dot")
            call = dataclasses.replace(call, rhs=OperandType.of(rhs, axes.rhs))
        return choice.offer.run(lhs, rhs, sizes, call)

    def masked(
        self, side: Side, cotangent: jax.Array, own: AnyResidual, saved: Groups
    ) -> jax.Array:
        if side == "lhs" and not isinstance(own, Residual):
            own = without_unused(own, saved.sizes)
        return super().masked(side, cotangent, own, saved)

    def free(self, side: Side | None) -> tuple[Free, ...]:
        """The columns, unless devices pass the matrices on; groups part the rows."""
        return () if self.moves[1] is not None else _FREE[side]


def without_unused(x: AnyOperand, sizes: jax.Array) -> AnyOperand:
    """x with zeros in the rows of no group, which a tensor scale would count."""
    return x if isinstance(x, Quantized) else ragged_rows(sizes, x.shape[0], unit=1).place(x)


def _padding_unit(spec: MatmulSpec) -> int:
    """Rows that each group is padded to, so that blocks and transforms along them end with it."""
    given = [x for x in (spec.lhs, spec.rhs) if x is not None]
    sizes = [x.format.block[1] for x in given] + [x.scale_rule.group for x in given]
    transformed = 1 if spec.transform is None else spec.transform.size
    return math.lcm(transformed, *(size for size in sizes if isinstance(size, int)))


def _prepare_rows(
    sizes: jax.Array, x: AnyOperand, spec: OperandSpec | None, axes: Axes, key: Key, *others: object
) -> AnyOperand:
    """`[m, k]` quantized along k, in blocks that end with their group if they hold several rows."""
    if spec is None or isinstance(x, Quantized) or spec.format.block[0] == 1:
        return prepare(x, spec, axes, key)
    height = spec.format.block[0]
    if isinstance(height, Whole):
        return _quantize_groups(ragged_rows(sizes, x.shape[0], unit=1), x, spec, axes, key, "lhs")
    rows = ragged_rows(sizes, x.shape[0], unit=height)
    padded = prepare(rows.place(x), spec, axes, key)
    assert isinstance(padded, MXArray)
    quantized = rows.restore(padded)
    # Instead of the padded rows.
    note_cast("lhs", prescaled(x, spec), quantized, spec.scale_rule.name, axes.block_axis)
    return quantized


def _prepare_contracted(
    rows: RaggedRows,
    x: jax.Array,
    spec: OperandSpec | None,
    axes: Axes,
    key: Key,
    tensor_scale: None,
    side: Side,
) -> AnyOperand:
    """`[p, c]` quantized along p, where groups start with blocks."""
    if spec is None or not isinstance(spec.format.block[1], Whole):
        return prepare(x, spec, axes, key, tensor_scale, side)
    return _quantize_groups(rows, x, spec, axes, key, side)


def _quantize_groups(
    rows: RaggedRows, x: jax.Array, spec: OperandSpec, axes: Axes, key: Key, side: Side
) -> MXArray:
    """`[p, c]` in blocks that hold all rows of a group: scales come from the groups' peaks."""
    x = prescaled(x, spec)
    nearest = dataclasses.replace(spec, rounding=NEAREST)
    peaks = quantize_operand(ragged.group_peaks(x, rows), nearest, axes.blocks(spec.format))
    width = spec.rounding.random_bits
    bits = draw_bits(key, x.shape, width) if key is not None and width else None
    codes = ragged.encode_by_group(x, rows, peaks, spec.rounding, bits)
    note_cast(side, x, codes, spec.scale_rule.name, axes.block_axis)
    return checkpoint_name(codes, QUANTIZED)
