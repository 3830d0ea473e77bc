"""Recipe: the decisions of a matmul, with the callable that carries them into other layers."""

import contextlib
import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from types import EllipsisType
from typing import Any, Never

import jax
import jax.numpy as jnp

from mx_jax import formats
from mx_jax.codecs.rounding import NEAREST, ROUNDINGS, Rounding, rounding_mode
from mx_jax.formats.block import FormatLike, known_block
from mx_jax.formats.element import nearest
from mx_jax.formats.removed import whereabouts
from mx_jax.mxarray import html_table
from mx_jax.ops.arguments import RECIPES_OF_A_FORMAT, named_recipe
from mx_jax.ops.dot_general import RecipeDotGeneral
from mx_jax.reference import scale_rules
from mx_jax.reference.hadamard import Hadamard
from mx_jax.sharding.movement import Gather
from mx_jax.specs import (
    MatmulRecipe,
    MatmulSpec,
    OperandSpec,
    Residuals,
    arguments_of,
    name_of,
    operand,
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
        fitting = (own for own in UNCLIPPED if format.scale.kind in own.kinds)
        rule = next(fitting, rule)
    return operand(format, scale_rule=rule, rounding=rounding)


# The tensor on each side of each product, by the word for it.
TENSORS = {
    "fwd": {"lhs": "activations", "rhs": "weights"},
    "dlhs": {"lhs": "gradients", "rhs": "weights"},
    "drhs": {"lhs": "gradients", "rhs": "activations"},
}
_OF_TENSORS = ("weights", "activations", "gradients")
_SIDES = ("lhs", "rhs")
_OF_ALL = ("scale_rule", "rounding", "transform")
_OF_PRODUCT = ("lhs", "rhs", "transform", "fast_accumulation")
_OF_OPERAND = ("format", "scale_rule", "rounding", "prescale")
_OF_RECIPE = ("residuals", "gather", "reduce_dtype")
_WORDS = (*_OF_TENSORS, *_OF_ALL, *TENSORS, *_OF_RECIPE)
HIGH = MatmulSpec(lhs=None, rhs=None)


def _clipping(before: MatmulRecipe, after: MatmulRecipe, given: dict[str, Any]) -> list[str]:
    """Operands that came to round stochastically under a rule that clips and that nobody named."""
    found = []
    for product, words in TENSORS.items():
        for side, word in words.items():
            old, new = (getattr(getattr(recipe, product), side) for recipe in (before, after))
            own = given.get(product, {})
            own = own.get(side, given.get(word, {})) if isinstance(own, Mapping) else None
            is_named = "scale_rule" in given or not isinstance(own, Mapping) or "scale_rule" in own
            if is_named or old is None or new is None or old.rounding.is_stochastic:
                continue
            # A prescale makes room.
            room = new.prescale != 1.0 or not clips(new.scale_rule, new.format)
            if new.rounding.is_stochastic and not room:
                found.append(f"{product}.{side}={new}")
    return found


def _check_all_reach(recipe: MatmulRecipe, given: dict[str, Any], operation: str) -> None:
    """A word that finds nothing to change is a mistake."""
    for word in given:
        if word not in (*_OF_TENSORS, *_OF_ALL):
            continue
        of = [p for p, words in TENSORS.items() if word in _OF_ALL or word in words.values()]
        if not any(_is_reached(recipe, product, given) for product in of):
            raise ValueError(
                f"{operation}: {word} changes products that quantize, but {', '.join(of)} are in "
                f"high precision or were given whole, got {_text(word, given[word])}; start from a "
                "recipe that quantizes them, as weight_only('mxfp4') or mxfp4(), or name the "
                "product's own operands, as fwd={'lhs': None, 'rhs': 'mxfp4'}"
            )


def _is_reached(recipe: MatmulRecipe, product: str, given: dict[str, Any]) -> bool:
    """Whether words of tensors and of all products reach one: it quantizes, and is not whole."""
    change = given.get(product, {})
    if not isinstance(change, Mapping):
        return False
    return any(change.get(s, getattr(getattr(recipe, product), s)) is not None for s in _SIDES)


def _product(recipe: MatmulRecipe, product: str, given: dict[str, Any]) -> MatmulSpec:
    """One product: its own word first, then those of its tensors, then those of all."""
    before, change = getattr(recipe, product), given.get(product, {})
    if change is None:
        return HIGH
    if isinstance(change, MatmulSpec):
        return change
    if not isinstance(change, Mapping):
        raise TypeError(
            f"{product} must be a MatmulSpec, a dict of its parts ({', '.join(_OF_PRODUCT)}) or "
            f"None for high precision, got {product}={change!r}"
        )
    own = _parts(change, _OF_PRODUCT, product)
    if not _is_reached(recipe, product, given):
        return dataclasses.replace(before, **own)
    operands = {
        side: _operand(getattr(before, side), own.get(side, given.get(word, ...)), word, given)
        for side, word in TENSORS[product].items()
    }
    if not any(operands.values()) and "transform" not in own:
        return HIGH
    transform = own.get("transform", given.get("transform", before.transform))
    fast = own.get("fast_accumulation", before.fast_accumulation)
    return MatmulSpec(**operands, transform=transform, fast_accumulation=fast)


def _operand(
    before: OperandSpec | None, change: object, word: str, given: dict[str, Any]
) -> OperandSpec | None:
    """One operand: a format brings its rule, and everything that is not named stays."""
    if change is None or isinstance(change, OperandSpec):
        return change
    if change is ...:
        change = {}
    elif not isinstance(change, Mapping):
        change = {"format": change}
    own = _parts(change, _OF_OPERAND, word)
    if "format" not in own and before is None:
        if not own:
            return None
        raise ValueError(
            f"{word} are in high precision here, got {_text(word, own)}; name their format too, "
            f"as {word}={{'format': 'mxfp4', ...}}"
        )
    format = formats.block_format(own.get("format", before and before.format))
    rounding = before.rounding if before else NEAREST
    rounding = rounding_mode(own.get("rounding", given.get("rounding", rounding)))
    rule = own.get("scale_rule", given.get("scale_rule", ...))
    if rule is ...:
        rule = before.scale_rule if before and "format" not in own else None
    if rule is None:
        rule = measured_operand(format, rounding).scale_rule
    prescale = own.get("prescale", before.prescale if before else 1.0)
    return OperandSpec(
        format=format,
        scale_rule=scale_rules.scale_rule_for(rule, format),
        rounding=rounding,
        prescale=prescale,
    )


def _parts(change: Mapping[str, Any], known: tuple[str, ...], word: str) -> dict[str, Any]:
    for part in change:
        if part not in known:
            raise ValueError(
                f"{word} has no part {part!r}{nearest(part, known)}, got {word}={dict(change)!r}; "
                f"its parts: {', '.join(known)}"
            )
    return dict(change)


def _named(word: str, value: Any) -> Any:
    """A value of `with_` by its name where it has one, the same however it was given."""
    if isinstance(value, Mapping):
        order = (*_OF_PRODUCT, *_OF_OPERAND)
        parts = sorted(value, key=lambda part: order.index(part) if part in order else len(order))
        return {part: _named(part, value[part]) for part in parts}
    if word == "reduce_dtype" and value is not None:
        return jnp.dtype(value).name
    if word in (*_OF_TENSORS, *_SIDES, "format") and not isinstance(value, OperandSpec | None):
        return name_of(formats.block_format(value), formats.block_format)
    if isinstance(value, Rounding | scale_rules.ScaleRule):
        return value.name if value in (*ROUNDINGS, *scale_rules.SCALE_RULES) else value
    return value.value if isinstance(value, Residuals) else value


def _text(word: str, value: Any) -> str:
    """A change as names of recipes show it: `weights=mxfp4`."""
    value = _named(word, value)
    if isinstance(value, dict):
        return f"{word}=({', '.join(_text(*part) for part in value.items())})"
    if word in (*TENSORS, *_OF_TENSORS, *_SIDES) and value is None:
        return f"{word}=high precision"
    return f"{word}={getattr(value, 'name', value)}"


# Changes in turn that a repr shows.
_MOST_STEPS = 4
# What a word of `with_` takes for a tensor and for a product; `...`: as it is.
_Tensor = formats.BlockFormat | str | OperandSpec | Mapping[str, Any] | EllipsisType | None
_Product = MatmulSpec | Mapping[str, Any] | EllipsisType | None


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Recipe(MatmulRecipe):
    """What users hold: a `MatmulRecipe` that can be injected into layers it does not know.

    Change one by `with_`; every part is checked when it is built.

    Examples:
      >>> import mx_jax
      >>> recipe = mx_jax.recipes.mxfp8()
      >>> print(recipe.fwd)
      mxfp8_e4m3 (rceil, nearest) x mxfp8_e4m3 (rceil, nearest)
      >>> recipe.with_(drhs=None, name="mxfp8, high dW").drhs.is_high_precision
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
        transform: Hadamard | EllipsisType | None = ...,
        fwd: _Product = ...,
        dlhs: _Product = ...,
        drhs: _Product = ...,
        residuals: Residuals | str | EllipsisType = ...,
        gather: Gather | str | Sequence[str] | EllipsisType | None = ...,
        reduce_dtype: jax.typing.DTypeLike | EllipsisType | None = ...,
        **unknown: Never,
    ) -> "Recipe":
        """This recipe with some decisions made anew; everything that is not named stays.

        The three tensors, each in its two products where that product quantizes anything, are
        weights (`fwd.rhs`, `dlhs.rhs`), activations (`fwd.lhs`, `drhs.rhs`) and gradients
        (`dlhs.lhs`, `drhs.lhs`). A format brings the scale rule that loses least, one that never
        clips if the operand rounds stochastically; rounding and prescale stay. None is high
        precision, an `OperandSpec` is taken as it is, and a dict names parts: `format`,
        `scale_rule`, `rounding`, `prescale`. Words for one product override those for a tensor,
        which override those for all products.

        Args:
          name: what tables call the result; None: this name, with the changes after it.
          weights: the right operand of the product.
          activations: the left operand of the product.
          gradients: the incoming cotangent.
          scale_rule: of every quantized operand; None: the one that loses least for its format.
          rounding: of every quantized operand.
          transform: of every product that quantizes.
          fwd: the product itself: None for high precision, a `MatmulSpec`, or a dict of parts
            (`lhs`, `rhs`, `transform`, `fast_accumulation`).
          dlhs: the gradient of the left operand, likewise.
          drhs: the gradient of the right operand, likewise.
          residuals: what is saved for the backward products, or its name.
          gather: mesh axes along which operands are gathered as codes; not shown in the name.
          reduce_dtype: in which devices add up their parts of a product: float32, or None for the
            product's own dtype.

        Raises:
          ValueError: a word that finds nothing to change, unknown names and parts, or operands
            that do not meet in a product.
          TypeError: a value of another type, or a word that it does not have.

        Warns:
          UserWarning: an operand comes to round stochastically under a rule that clips, which
            nobody named: what is clipped makes its mean too small.

        Examples:
          >>> from mx_jax import recipes
          >>> hybrid = recipes.mxfp8().with_(gradients="mxfp8_e5m2", name="mxfp8_hybrid")
          >>> hybrid == recipes.mxfp8_hybrid()
          True
          >>> print(recipes.weight_only("mxfp4").with_(activations="mxfp8_e4m3").fwd)
          mxfp8_e4m3 (rceil, nearest) x mxfp4 (even, nearest)
          >>> recipes.mxfp8().with_(gradients={"rounding": "stochastic"}, drhs=None).name
          'mxfp8, gradients=(rounding=stochastic), drhs=high precision'
        """
        given = {word: value for word, value in locals().items() if word in _WORDS}
        given = {word: value for word, value in given.items() if value is not ...}
        operation = f"with_: recipe {self.name!r}"
        for word in unknown:
            raise TypeError(
                f"{operation} got an unexpected keyword argument "
                f"{word!r}{whereabouts(word) or nearest(word, _WORDS)}, "
                f"{word}={unknown[word]!r}; it takes: name, {', '.join(_WORDS)}"
            )
        parts = {word: given[word] for word in _OF_RECIPE if word in given}
        if "residuals" in given:
            try:
                parts["residuals"] = Residuals(residuals)
            except ValueError:
                names = " or ".join(repr(one.value) for one in Residuals)
                raise ValueError(
                    f"{operation}: residuals must be {names}, got residuals={residuals!r}"
                ) from None
        _check_all_reach(self, given, operation)
        for product, words_of in TENSORS.items():
            try:
                parts[product] = _product(self, product, given)
            except (TypeError, ValueError) as error:
                raise type(error)(
                    f"{operation}, {product}: {error}; {product} multiplies {words_of['lhs']} and "
                    f"{words_of['rhs']}"
                ) from None
        result = dataclasses.replace(self, **parts)
        if kept := _clipping(self, result, given):
            warnings.warn(
                f"{operation}: {', '.join(kept)} now rounds stochastically, but keeps a scale rule "
                "that clips, so that means come out too small; add scale_rule=None for the rule "
                "that never clips, or name the rule to keep it",
                stacklevel=2,
            )
        words = {word: _named(word, given[word]) for word in given}
        if name is not None:
            words["name"] = name
        elif dataclasses.replace(result, gather=self.gather) == self:
            name = self.name
        else:
            # Where operands are gathered changes no number: tables need no word for it.
            shown = [_text(word, given[word]) for word in given if word != "gather"]
            name = ", ".join((self.name, *shown))
        result = dataclasses.replace(result, name=name)
        # For the repr alone: no field, so it takes no part in equality. Nobody reads the text of
        # many changes in turn.
        steps = self.__dict__.get("_steps", 0) + 1
        if steps <= _MOST_STEPS:
            vars(result).update(_made_by=(self, words), _steps=steps)
        return result

    def __repr__(self) -> str:
        """What makes it, as Python reads it after `from mx_jax.recipes import *`; a `Gather` in it
        has to be imported too."""
        start, _, format = self.name.partition(",")[0].removesuffix(")").partition("(")
        base: MatmulRecipe | None = None
        with contextlib.suppress(ValueError, KeyError):
            base = RECIPES_OF_A_FORMAT[start](format) if format else named_recipe(start)
            start = f"{start}({format!r})" if format else f"{base.name}()"
            if base == self:
                return start
        if "_made_by" in self.__dict__:
            base, words = self.__dict__["_made_by"]
            return f"{base!r}.with_({', '.join(f'{word}={words[word]!r}' for word in words)})"
        if base is None:
            return super().__repr__()
        fields = [field.name for field in dataclasses.fields(self)]
        changed = [f for f in fields if f == "name" or getattr(self, f) != getattr(base, f)]
        return f"{start}.with_({arguments_of(self, changed)})"

    def _repr_html_(self) -> str:
        specs = {product: getattr(self, product) for product in TENSORS}
        rows = [
            (product, spec.lhs or "high precision", spec.rhs or "high precision", spec.transform)
            for product, spec in specs.items()
        ]
        return html_table(self.name, ("product", "lhs", "rhs", "transform"), rows)
