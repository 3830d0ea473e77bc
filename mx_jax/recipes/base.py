"""Recipe: the decisions of a matmul, with the callable that carries them into other layers."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from types import EllipsisType
from typing import Any, Literal, Never, get_args

from mx_jax import formats
from mx_jax.codecs.rounding import Rounding, rounding_mode
from mx_jax.formats.block import FormatLike, known_block
from mx_jax.formats.element import nearest
from mx_jax.formats.removed import whereabouts
from mx_jax.ops.arguments import RECIPES_OF_A_FORMAT, named_recipe
from mx_jax.ops.dot_general import RecipeDotGeneral
from mx_jax.reference import scale_rules
from mx_jax.specs import (
    MatmulRecipe,
    MatmulSpec,
    OperandSpec,
    Residuals,
    operand,
    takes_row_scales,
)

# The rule that loses least, by measurement: FLOOR, the specification's, clips 2.4 % of normally
# distributed values in E2M1. Others take their scale kind's default.
MEASURED_RULES: dict[formats.BlockFormat, scale_rules.ScaleRule] = {
    formats.MXFP8_E4M3: scale_rules.RCEIL,
    formats.MXFP8_E5M2: scale_rules.RCEIL,
    formats.MXFP6_E2M3: scale_rules.EVEN,
    formats.MXFP6_E3M2: scale_rules.EVEN,
    formats.MXFP4: scale_rules.EVEN,
    formats.MXINT8: scale_rules.FLOOR,
    formats.NVFP4: scale_rules.AMAX,
    formats.INT8_ROWWISE: scale_rules.AMAX_DIVISOR,
}
# Rules of other scales clip nothing: amax becomes the largest element.
UNCLIPPED: tuple[scale_rules.ScaleRule, ...] = (scale_rules.RCEIL, scale_rules.AMAX_HEADROOM)


def clips(rule: scale_rules.ScaleRule, format: formats.BlockFormat) -> bool:
    """Whether one of the library's own rules leaves values of a block above its largest code."""
    # Nothing is known of other rules, unless a threshold defines them: see `PowerOfTwo`.
    if rule in UNCLIPPED or rule.correction is not None:
        return False
    if rule.threshold is not None:
        never = scale_rules.RCEIL.threshold
        assert never is not None
        return rule.threshold(format.element) > never(format.element)
    # Float32 scales are amax itself; narrower ones are rounded, also down.
    return rule in scale_rules.SCALE_RULES and not format.scale.is_float32


def measured_operand(format: FormatLike, rounding: Rounding | str = "nearest") -> OperandSpec:
    """The operand spec of a format with the rule that loses least."""
    # Stochastic rounding is right on average only where nothing clips: with it, power-of-two scales
    # are RCEIL's, and those of NVFP4 leave headroom for their own rounding.
    format, rounding = formats.block_format(format), rounding_mode(rounding)
    rows, columns = format.block
    # Square blocks as rows of their width.
    known = known_block(
        dataclasses.replace(format, block=(1, columns)) if rows == columns else format
    )
    rule = known and MEASURED_RULES.get(known)
    if rounding.random_bits:
        fitting = (free for free in UNCLIPPED if format.scale.kind in free.kinds)
        rule = next(fitting, rule)
    return operand(format, scale_rule=rule, rounding=rounding)


# The tensor on each side of each product, by the word for it.
TENSORS = {
    "output": {"lhs": "activations", "rhs": "weights"},
    "grad_input": {"lhs": "gradients", "rhs": "weights"},
    "grad_weight": {"lhs": "gradients", "rhs": "activations"},
}
_OF_ALL = ("scale_rule", "rounding")
_PARTS = ("format", "scale_rule", "rounding", "prescale", "tensor_scale")
_WORDS = ("weights", "activations", "gradients", *_OF_ALL, *TENSORS, "backward")
HIGH = MatmulSpec(lhs=None, rhs=None)
Backward = Literal["high_precision", "dequantized", "quantized"]


def _product(before: MatmulSpec, product: str, changes: Mapping[str, Any]) -> MatmulSpec:
    """A product whose tensors change, each by its word or by those for all."""
    sides = {
        side: _operand(getattr(before, side), word, changes)
        for side, word in TENSORS[product].items()
    }
    return dataclasses.replace(before, **sides) if any(sides.values()) else HIGH


def _operand(
    before: OperandSpec | None, word: str, changes: Mapping[str, Any]
) -> OperandSpec | None:
    """An operand: a format brings its rule, and everything that is not named stays."""
    change = changes.get(word, {})
    if change is None or isinstance(change, OperandSpec):
        return change
    parts = dict(change) if isinstance(change, Mapping) else {"format": change}
    for part in parts:
        if part not in _PARTS:
            raise ValueError(
                f"{word} has no part {part!r}{nearest(part, _PARTS)}, got {word}={change!r}; "
                f"its parts: {', '.join(_PARTS)}"
            )
    if before is None and "format" not in parts:
        if not parts:
            return None
        raise ValueError(
            f"{word} are in high precision here, got {word}={change!r}; name their format too, as "
            f"{word}={{'format': 'mxfp4', ...}}"
        )
    brings_rule = "format" in parts
    parts = {part: changes[part] for part in _OF_ALL if part in changes} | parts
    format = formats.block_format(parts.get("format", before and before.format))
    before = before or operand(format)
    rounding = rounding_mode(parts.get("rounding", before.rounding))
    prescale = parts.get("prescale", before.prescale)
    rule = parts.get("scale_rule", None if brings_rule else before.scale_rule)
    # Stochastic rounding under a rule that clips has too small a mean; a prescale makes room.
    starts = rounding.is_stochastic and not before.rounding.is_stochastic and prescale == 1.0
    if rule is None or (starts and "scale_rule" not in parts and clips(rule, format)):
        rule = measured_operand(format, rounding).scale_rule
    tensor_scale = before.tensor_scale if takes_row_scales(format) else "tensor"
    tensor_scale = parts.get("tensor_scale", tensor_scale)
    return operand(
        format, scale_rule=rule, rounding=rounding, prescale=prescale, tensor_scale=tensor_scale
    )


def _texts(changes: Mapping[str, Any], specs: Mapping[str, MatmulSpec]) -> Iterator[str]:
    """Changes as names of recipes show them, the same however they were said."""
    for word, value in changes.items():
        if word in _OF_ALL:
            shown = str(getattr(value, "name", value))
        elif word in TENSORS:
            shown = None if specs[word] == HIGH else specs[word]
        else:
            of = {p: side for p, sides in TENSORS.items() for side, w in sides.items() if w == word}
            product = next(p for p in of if p in specs and p not in changes)
            shown = getattr(specs[product], of[product])
        yield f"{word}={shown or 'high precision'}"


def _with_backward(recipe: "Recipe", output: MatmulSpec, backward: str) -> "Recipe":
    """The recipe with that `output` and the backward products of one of the words."""
    if backward not in (words := get_args(Backward)):
        raise ValueError(
            f"backward must be one of {', '.join(words)}{nearest(backward, words)}, got "
            f"backward={backward!r}"
        )
    is_high = recipe.grad_input.is_high_precision and recipe.grad_weight.is_high_precision
    if backward == "quantized" and not is_high:
        return recipe
    if output.is_high_precision and backward != "high_precision":
        raise ValueError(
            "backward follows what the output quantizes, but output is in high precision, got "
            f"backward={backward!r}; start from a recipe that quantizes it, as mxfp8()"
        )
    products = {"grad_input": HIGH, "grad_weight": HIGH}
    if backward == "quantized":
        x, w = output.lhs, output.rhs
        products = {"grad_input": MatmulSpec(lhs=x, rhs=w), "grad_weight": MatmulSpec(lhs=x, rhs=x)}
    residuals = Residuals.QUANTIZED if backward == "dequantized" else Residuals.PRIMAL
    return dataclasses.replace(recipe, output=output, residuals=residuals, **products)


# What a word of `with_` takes for a tensor and for a product; `...`: as it is.
_Tensor = formats.BlockFormat | str | OperandSpec | Mapping[str, Any] | EllipsisType | None
_Product = MatmulSpec | EllipsisType | None


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Recipe(MatmulRecipe):
    """What users hold: a `MatmulRecipe` that can be injected into layers it does not know.

    Change one by `with_`; every part is checked when it is built.

    Examples:
      >>> import mx_jax
      >>> recipe = mx_jax.recipes.mxfp8()
      >>> print(recipe.output)
      mxfp8_e4m3 (rceil, nearest) x mxfp8_e4m3 (rceil, nearest)
      >>> recipe.with_(grad_weight=None, name="mxfp8, high dW").grad_weight.is_high_precision
      True
    """

    @property
    def dot_general(self) -> RecipeDotGeneral:
        """A drop-in for `jax.lax.dot_general`, e.g. for `flax.linen.Dense(dot_general=...)`."""
        return RecipeDotGeneral(recipe=self)

    def with_(
        self,
        *,
        name: str | None = None,
        weights: _Tensor = ...,
        activations: _Tensor = ...,
        gradients: _Tensor = ...,
        scale_rule: scale_rules.ScaleRule | str | EllipsisType | None = ...,
        rounding: Rounding | str | EllipsisType = ...,
        output: _Product = ...,
        grad_input: _Product = ...,
        grad_weight: _Product = ...,
        backward: Backward | EllipsisType = ...,
        **unknown: Never,
    ) -> "Recipe":
        """This recipe with other operands; everything that is not named stays.

        The three tensors, each in its two products where that product quantizes anything, are
        weights (`output.rhs`, `grad_input.rhs`), activations (`output.lhs`, `grad_weight.rhs`) and
        gradients (`grad_input.lhs`, `grad_weight.lhs`). None is high precision, an `OperandSpec` is
        taken as it is, and a dict names parts: `format`, `scale_rule`, `rounding`, `prescale`,
        `tensor_scale`. A format brings the scale rule that loses least; an operand that comes to
        round stochastically brings one that never clips. Other fields change by
        `dataclasses.replace(recipe, residuals=...)`.

        Args:
          name: what tables call the result; None: this name, with the changes after it.
          weights: the right operand of the product.
          activations: the left operand of the product.
          gradients: the incoming cotangent.
          scale_rule: of every quantized operand that has no word of its own; None: the one that
            loses least for its format.
          rounding: likewise.
          output: the product itself, whole; None: in high precision.
          grad_input: the gradient of the left operand, likewise.
          grad_weight: the gradient of the right operand, likewise.
          backward: both products of gradients, before other words change them. "high_precision":
            of the operands as they came; "dequantized": in high precision, of the values that the
            output multiplied; "quantized": as the recipe has it, and where it quantizes neither
            product, gradients as it quantizes activations.

        Raises:
          ValueError: a word that finds nothing to change, unknown names and parts, or operands
            that do not meet in a product.
          TypeError: a value of another type, or a word that it does not have.

        Examples:
          >>> from mx_jax import recipes
          >>> hybrid = recipes.mxfp8().with_(gradients="mxfp8_e5m2", name="mxfp8_hybrid")
          >>> hybrid == recipes.mxfp8_hybrid()
          True
          >>> print(recipes.weight_only("mxfp4").with_(activations="mxfp8_e4m3").output)
          mxfp8_e4m3 (rceil, nearest) x mxfp4 (even, nearest)
          >>> recipes.mxfp8().with_(gradients={"rounding": "stochastic"}, grad_weight=None).name
          'mxfp8, gradients=mxfp8_e4m3 (rceil, stochastic), grad_weight=high precision'
        """
        operation = f"with_: recipe {self.name!r}"
        for word in unknown:
            raise TypeError(
                f"{operation} got an unexpected keyword argument "
                f"{word!r}{whereabouts(word) or nearest(word, _WORDS)}, "
                f"{word}={unknown[word]!r}; it takes: name, {', '.join(_WORDS)}; the rest of a "
                "recipe changes by dataclasses.replace(recipe, ...)"
            )
        tensors = weights, activations, gradients
        values = *tensors, scale_rule, rounding, output, grad_input, grad_weight, backward
        changes = {w: v for w, v in zip(_WORDS, values, strict=True) if v is not ...}
        specs: dict[str, MatmulSpec] = {}
        for product in TENSORS:
            spec = changes.get(product)
            if not isinstance(spec, MatmulSpec | None):
                raise TypeError(
                    f"{operation}: {product} must be a MatmulSpec or None for high precision, got "
                    f"{product}={spec!r}; e.g. dataclasses.replace(recipe.{product}, lhs=None)"
                )
            if product in changes:
                specs[product] = spec or HIGH
        base = self
        if changes.pop("backward", None) is not None:
            try:
                base = _with_backward(self, specs.get("output", self.output), str(backward))
            except ValueError as error:
                raise ValueError(f"{operation}: {error}") from None
        reached = [p for p in TENSORS if p not in specs and not getattr(base, p).is_high_precision]
        for word in (word for word in changes if word not in TENSORS):
            of = [p for p, sides in TENSORS.items() if word in (*_OF_ALL, *sides.values())]
            if not {*of} & {*reached}:
                raise ValueError(
                    f"{operation}: {word} changes products that quantize, but {', '.join(of)} are "
                    f"in high precision or were given whole, got {word}={changes[word]!r}; start "
                    "from a recipe that quantizes them, as weight_only('mxfp4') or mxfp4(), or "
                    "give the product, as output=MatmulSpec(lhs=None, rhs='mxfp4')"
                )
        for product in reached:
            try:
                specs[product] = _product(getattr(base, product), product, changes)
            except (TypeError, ValueError) as error:
                raise type(error)(
                    f"{operation}, {product}: {error}; {product} multiplies "
                    f"{TENSORS[product]['lhs']} and {TENSORS[product]['rhs']}"
                ) from None
        if name is None:
            texts = [] if base == self else [f"backward={backward}"]
            texts += [] if dataclasses.replace(base, **specs) == base else _texts(changes, specs)
            name = ", ".join((self.name, *texts))
        return dataclasses.replace(base, name=name, **specs)

    def __repr__(self) -> str:
        """What makes it, as Python reads it after `from mx_jax.recipes import *`; a `Gather` in it
        has to be imported too."""
        start, _, format = self.name.removesuffix(")").partition("(")
        with contextlib.suppress(ValueError, KeyError):
            base = RECIPES_OF_A_FORMAT[start](format) if format else named_recipe(start)
            if base == self:
                return f"{start}({format!r})" if format else f"{base.name}()"
        return super().__repr__()
