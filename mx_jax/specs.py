"""Decisions as values: what happens to each operand of each matmul.

Frozen, hashable and nested; nothing is filled in after construction. Two operands meet in one
product, so a matmul's spec is checked against both of them when it is built.
"""

import dataclasses
import enum
import functools
import numbers
from collections.abc import Callable
from typing import Any, Literal, get_args

import numpy as np

from mx_jax.axes import SIDES, Side
from mx_jax.codecs.rounding import NEAREST, Rounding, rounding_mode
from mx_jax.formats import WHOLE, BlockFormat, block_format
from mx_jax.formats.block import FormatLike
from mx_jax.reference.hadamard import Hadamard
from mx_jax.reference.scale_rules import ScaleRule, scale_rule_for
from mx_jax.sharding.movement import Gather

TensorScale = Literal["tensor", "row"]


def takes_row_scales(format: BlockFormat) -> bool:
    """Whether each row of a tensor may have a tensor scale: its blocks lie within the row."""
    return format.tensor_scale and format.block[0] == 1 and format.block[1] is not WHOLE


def arguments_of(x: Any) -> str:
    """Fields of a dataclass that have not their default, as keyword arguments."""
    fields = {field.name: field.default for field in dataclasses.fields(x)}
    values = {name: getattr(x, name) for name in fields if getattr(x, name) != fields[name]}
    plain = (v.name if isinstance(v, np.dtype) else v for v in values.values())
    return ", ".join(f"{name}={value!r}" for name, value in zip(values, plain, strict=True))


def name_of(value: ScaleRule | BlockFormat | Rounding, named: Callable[[str], object]) -> Any:
    """The name that stands for a value, or the value, if its name stands for nothing or another."""
    try:
        return value.name if named(value.name) == value else value
    except ValueError:
        return value


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class OperandSpec:
    """How one operand is quantized along its contracting axis; `operand` builds it from names.

    Attributes:
      format: block format.
      scale_rule: from a block's amax to its scale.
      rounding: how dropped bits decide.
      prescale: factor before quantizing, taken out of the product again. The scale is that of
        the multiplied values, so a rule that clips still clips.
      tensor_scale: what has one tensor scale (NVFP4): "tensor", all of the operand; or "row", each
        vector along the contracting axes, such as a token's activations in the output, whose
        numbers then depend on no other token. Products are multiplied by those of rows afterwards.

    Raises:
      ValueError: if the rule fills another kind of scale than the format has; if both scales and
        elements round stochastically; prescale is not positive, not finite or so extreme that
        float32 does not hold it or its reciprocal; or rows of the format have no tensor scales.

    Examples:
      >>> from mx_jax.recipes import operand
      >>> print(operand("mxfp4", scale_rule="rceil", rounding="stochastic", prescale=0.75))
      mxfp4 (rceil, stochastic, times 0.75)
    """

    format: BlockFormat
    scale_rule: ScaleRule
    rounding: Rounding
    prescale: float = 1.0
    tensor_scale: TensorScale = "tensor"

    def __post_init__(self):
        scale_rule_for(self.scale_rule, self.format)
        # Read here, so that no product has to find it.
        if self.random_bits and self.rounding.random_bits and self.scale_rule.rounding.random_bits:
            raise ValueError(
                f"OperandSpec: scale_rule={self.scale_rule.name!r} rounds scales stochastically, "
                "which already makes nearest elements right on average, got "
                f"rounding={self.rounding.name!r}; use rounding='nearest', or another rule"
            )
        if not isinstance(self.prescale, numbers.Real):
            raise TypeError(f"OperandSpec: prescale must be a number, got {self.prescale!r}")
        if not self.prescale > 0:
            raise ValueError(f"OperandSpec: prescale must be positive, got {self.prescale}")
        if not 2.0**-126 <= self.prescale <= 2.0**126:
            raise ValueError(
                "OperandSpec: prescale and its reciprocal must be normal float32 numbers, 2^-126 "
                f"to 2^126, got prescale={self.prescale}"
            )
        if self.tensor_scale not in (words := get_args(TensorScale)):
            raise ValueError(
                f"OperandSpec: tensor_scale must be one of {', '.join(words)}, got tensor_scale="
                f"{self.tensor_scale!r}"
            )
        if self.tensor_scale == "row" and not takes_row_scales(self.format):
            raise ValueError(
                "OperandSpec: rows have tensor scales in formats with a tensor scale and blocks "
                f"within a row, got tensor_scale='row' with format={self.format.name}, "
                f"block={self.format.block}; use 'nvfp4', or tensor_scale='tensor'"
            )

    @functools.cached_property
    def random_bits(self) -> int:
        """How many random bits an element consumes, or a scale; 0: the cast needs no key."""
        return self.scale_rule.rounding.random_bits or self.rounding.random_bits

    def __repr__(self) -> str:
        rule = name_of(self.scale_rule, lambda name: scale_rule_for(name, self.format))
        text = f"operand({name_of(self.format, block_format)!r}, scale_rule={rule!r}"
        if self.rounding != NEAREST:
            text += f", rounding={name_of(self.rounding, rounding_mode)!r}"
        if self.prescale != 1:
            text += f", prescale={self.prescale!r}"
        return f"{text}, tensor_scale='row')" if self.tensor_scale == "row" else f"{text})"

    def __str__(self) -> str:
        prescale = "" if self.prescale == 1 else f", times {self.prescale:g}"
        row = ", tensor scale by row" if self.tensor_scale == "row" else ""
        return f"{self.format.name} ({self.scale_rule.name}, {self.rounding.name}{prescale}{row})"


def operand(
    format: FormatLike,
    *,
    scale_rule: ScaleRule | str | None = None,
    rounding: Rounding | str = "nearest",
    prescale: float = 1.0,
    tensor_scale: TensorScale = "tensor",
) -> OperandSpec:
    """An `OperandSpec` from names or objects.

    Args:
      format: anything `formats.block_format` takes.
      scale_rule: rule or name; None: the first rule of the format's scale (FLOOR for MX).
      rounding: mode or name.
      prescale: factor before quantizing, taken out of the product again.
      tensor_scale: "tensor", or "row": each vector along the contracting axes has its own (NVFP4).

    Raises:
      ValueError: unknown names, or a rule that does not fit; the message lists what does.

    Examples:
      >>> from mx_jax.specs import operand
      >>> print(operand("mxfp4", scale_rule="even"))
      mxfp4 (even, nearest)
    """
    format = block_format(format)
    return OperandSpec(
        format=format,
        scale_rule=scale_rule_for(scale_rule, format),
        rounding=rounding_mode(rounding),
        prescale=prescale,
        tensor_scale=tensor_scale,
    )


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class MatmulSpec:
    """The two operands of one matmul; None keeps an operand in high precision.

    A format, or its name, stands for `operand(format)`: its first scale rule, rounded to nearest.

    Attributes:
      lhs: spec of the left operand, or None.
      rhs: spec of the right operand, or None.
      transform: applied to both operands before quantizing; it cancels in the product, so it
        belongs to the matmul and not to one operand.
      fast_accumulation: let a native kernel add in lower precision, where the platform can.

    Raises:
      ValueError: if blocks of the two operands would not meet: different sizes along the
        contracting axis, or scales of different kinds; or a transform with nothing to quantize.
      TypeError: an operand or a transform that is none.

    Examples:
      >>> from mx_jax.specs import MatmulSpec, operand
      >>> MatmulSpec(lhs=None, rhs="mxfp4") == MatmulSpec(lhs=None, rhs=operand("mxfp4"))
      True
    """

    lhs: OperandSpec | None
    rhs: OperandSpec | None
    transform: Hadamard | None = None
    fast_accumulation: bool = False

    def __post_init__(self):
        for side in ("lhs", "rhs"):
            spec = getattr(self, side)
            if isinstance(spec, str | BlockFormat):
                object.__setattr__(self, side, operand(spec))
            elif not isinstance(spec, OperandSpec | None):
                raise TypeError(
                    f"MatmulSpec: {side} must be an OperandSpec, a format, its name or None, got "
                    f"{side}={spec!r}; e.g. operand('mxfp4')"
                )
        if not isinstance(self.transform, Hadamard | None):
            raise TypeError(
                "MatmulSpec: transform must be a Hadamard or None, got "
                f"transform={self.transform!r}; e.g. Hadamard(size=16, signs=None)"
            )
        if not isinstance(self.fast_accumulation, bool):
            raise TypeError(
                "MatmulSpec: fast_accumulation must be True or False, got "
                f"fast_accumulation={self.fast_accumulation!r}"
            )
        if self.lhs is None and self.rhs is None and self.transform is not None:
            raise ValueError(
                f"MatmulSpec: a transform ({self.transform}) cancels in a product whose operands "
                "are both in high precision, got lhs=None and rhs=None; drop it, or quantize one"
            )
        if self.lhs is None or self.rhs is None:
            return
        left, right = self.lhs.format, self.rhs.format
        remedy = "give both operands the same, or None to keep one in high precision"
        if left.block[1] != right.block[1]:
            raise ValueError(
                "MatmulSpec: blocks of both operands must have one size along the contracting "
                f"axis, got lhs={left.name} with block={left.block[1]!r} and rhs={right.name} with "
                f"block={right.block[1]!r}; {remedy}"
            )
        if left.scale != right.scale:
            raise ValueError(
                "MatmulSpec: both operands must have scales in one format, got "
                f"lhs={left.name} with {left.scale.name} and rhs={right.name} with "
                f"{right.scale.name}; {remedy}"
            )

    @functools.cached_property
    def is_high_precision(self) -> bool:
        """Whether neither operand is quantized."""
        return self.lhs is None and self.rhs is None

    @functools.cached_property
    def is_stochastic(self) -> bool:
        """Whether it needs a key: for stochastic rounding or for a transform's signs."""
        if self.transform is not None and self.transform.is_random:
            return True
        return any(spec is not None and spec.random_bits for spec in (self.lhs, self.rhs))

    def __repr__(self) -> str:
        return f"MatmulSpec({arguments_of(self)})"

    def __str__(self) -> str:
        transform = f" after {self.transform}" if self.transform else ""
        return f"{self.lhs or 'high precision'} x {self.rhs or 'high precision'}{transform}"


class Residuals(enum.Enum):
    """What is saved between the forward and the backward pass.

    PRIMAL: the operands as they came; the backward matmuls quantize them anew along their own
    contracting axes. Of an operand in square blocks, which two products quantize alike, the codes
    that both read. QUANTIZED: the forward's codes and scales, dequantized and requantized along
    the other axis: less memory, a second rounding error.

    Examples:
      >>> from mx_jax import recipes
      >>> recipes.mxfp4().residuals, recipes.deepseek_v3().residuals.value
      (Residuals.PRIMAL, 'quantized')
    """

    PRIMAL = "primal"
    QUANTIZED = "quantized"

    def __repr__(self) -> str:
        return str(self)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class MatmulRecipe:
    """What a differentiable matmul does in each of its three products.

    | product | lhs, blocks along | rhs, blocks along |
    |---|---|---|
    | output: `y = lhs rhs` | lhs: k | rhs: k |
    | grad_input: `g rhs^T` | g: n | rhs: n |
    | grad_weight: `g^T lhs` | g: m | lhs: m |

    Attributes:
      name: what tables and errors call it.
      output: the product itself.
      grad_input: gradient of the left operand; its lhs is the incoming cotangent.
      grad_weight: gradient of the right operand; its lhs is the incoming cotangent.
      residuals: what is saved for the backward products, or its name.
      gather: mesh axes along which operands are gathered as codes, or names of such axes. None: on
        automatic axes those that the compiler has to gather along, on others none.
      reduce_dtype: in which devices add up their parts of a product or a gradient: float32, or
        None for the product's own dtype, as `jax.lax.dot_general` does.

    Raises:
      TypeError: a name or a dtype that is none.
      ValueError: residuals that the forward product does not allow.
    """

    name: str
    output: MatmulSpec
    grad_input: MatmulSpec
    grad_weight: MatmulSpec
    residuals: Residuals = Residuals.PRIMAL
    gather: Gather | None = None
    reduce_dtype: np.dtype | None = None

    def __post_init__(self):
        if not isinstance(self.name, str) or not self.name:
            raise TypeError(f"Recipe: name must be a text, got name={self.name!r}; e.g. 'mine'")
        object.__setattr__(self, "gather", Gather.of(self.gather))
        try:
            object.__setattr__(self, "residuals", Residuals(self.residuals))
        except ValueError:
            raise ValueError(
                f"Recipe {self.name!r}: residuals must be 'primal' or 'quantized', got "
                f"residuals={self.residuals!r}"
            ) from None
        if self.reduce_dtype is not None:
            dtype = np.dtype(self.reduce_dtype)
            if dtype != np.float32:
                raise ValueError(
                    f"Recipe {self.name!r}: reduce_dtype must be float32, or None for the "
                    f"product's own dtype, got reduce_dtype={self.reduce_dtype!r}"
                )
            object.__setattr__(self, "reduce_dtype", dtype)
            if self.is_high_precision:
                raise ValueError(
                    f"Recipe {self.name!r}: products in high precision are jax.lax.dot_general's, "
                    f"added up in their own dtype, got reduce_dtype={dtype}; use "
                    "reduce_dtype=None, and preferred_element_type='float32' where you multiply"
                )
        specs = (self.output.lhs, self.output.rhs)
        changes = self.output.transform or any(spec and spec.prescale != 1.0 for spec in specs)
        if self.residuals is Residuals.QUANTIZED and changes:
            raise ValueError(
                f"Recipe {self.name!r}: residuals=QUANTIZED keeps the forward's codes for the "
                f"backward products, but output ({self.output}) transforms or prescales what it "
                "quantizes; use residuals='primal'"
            )

    @functools.cached_property
    def kept_as_codes(self) -> tuple[Side, ...]:
        """The operands whose codes are saved: all are, or both of its products read the same ones,
        which lie in square blocks."""
        if self.residuals is Residuals.QUANTIZED:
            return "lhs", "rhs"
        pairs = (self.output.lhs, self.grad_weight), (self.output.rhs, self.grad_input)
        return tuple(
            side
            for side, (spec, again) in zip(SIDES, pairs, strict=True)
            if spec is not None
            and spec == again.rhs
            and not spec.random_bits
            and spec.prescale == 1.0
            and isinstance(spec.format.block[0], int)
            and spec.format.block[0] == spec.format.block[1]
            and self.output.transform is None
            and again.transform is None
        )

    @functools.cached_property
    def is_high_precision(self) -> bool:
        """Whether no operand of any product is quantized."""
        return all(
            spec.is_high_precision for spec in (self.output, self.grad_input, self.grad_weight)
        )

    @functools.cached_property
    def is_stochastic(self) -> bool:
        """Whether any product needs a random key."""
        return any(spec.is_stochastic for spec in (self.output, self.grad_input, self.grad_weight))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({arguments_of(self)})"

    def __str__(self) -> str:
        summed = "" if self.reduce_dtype is None else f"; devices add up in {self.reduce_dtype}"
        return (
            f"{self.name}: output {self.output}; grad_input {self.grad_input}; "
            f"grad_weight {self.grad_weight}; keeps {self.residuals.value}{summed}"
        )
