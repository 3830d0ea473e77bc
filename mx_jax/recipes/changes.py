"""What `Recipe.with_` makes of its words: a recipe that differs in them and in nothing else."""

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any, TypeVar

from mx_jax.codecs.rounding import NEAREST, rounding_mode
from mx_jax.formats import block_format
from mx_jax.recipes.measured import clips, measured_operand
from mx_jax.reference.scale_rules import scale_rule_for
from mx_jax.specs import MatmulRecipe, MatmulSpec, OperandSpec, Residuals

R = TypeVar("R", bound=MatmulRecipe)

# The tensor on each side of each product, by the word for it.
TENSORS = {
    "fwd": {"lhs": "activations", "rhs": "weights"},
    "dlhs": {"lhs": "gradients", "rhs": "weights"},
    "drhs": {"lhs": "gradients", "rhs": "activations"},
}
_OF_TENSORS = ("weights", "activations", "gradients")
_OF_ALL = ("scale_rule", "rounding", "transform")
_OF_PRODUCT = ("lhs", "rhs", "transform", "fast_accumulation")
_OF_OPERAND = ("format", "scale_rule", "rounding", "prescale")
_HIGH = MatmulSpec(lhs=None, rhs=None)


def with_changes(recipe: R, name: str | None, words: dict[str, Any]) -> R:
    """The recipe with some of its decisions made anew.

    Args:
      recipe: what to start from.
      name: of the result; None: the recipe's, with the changes after it.
      words: of `Recipe.with_`; `...` where a word was not given.

    Raises:
      ValueError, TypeError: as `Recipe.with_` says.
    """
    given = {word: value for word, value in words.items() if value is not ...}
    operation = f"with_: recipe {recipe.name!r}"
    parts = {word: given[word] for word in ("mask_clipped", "gather") if word in given}
    if "residuals" in given:
        given["residuals"] = parts["residuals"] = _residuals(given["residuals"], operation)
    _check_all_reach(recipe, given, operation)
    for product, words_of in TENSORS.items():
        try:
            parts[product] = _product(getattr(recipe, product), product, given)
        except (TypeError, ValueError) as error:
            raise type(error)(
                f"{operation}, {product}: {error}; {product} multiplies {words_of['lhs']} and "
                f"{words_of['rhs']}"
            ) from None
    result = dataclasses.replace(recipe, **parts)
    if name is None:
        # Where operands are gathered changes no number: tables need no word for it.
        shown = [_text(word, given[word]) for word in given if word != "gather"]
        same = dataclasses.replace(result, gather=recipe.gather) == recipe
        name = recipe.name if same else ", ".join((recipe.name, *shown))
    if kept := _clipping(recipe, result, given):
        warnings.warn(
            f"{operation}: {', '.join(kept)} now rounds stochastically, but keeps a scale rule "
            "that clips, so that means come out too small; add scale_rule=None for the rule that "
            "never clips, or name the rule to keep it",
            stacklevel=3,
        )
    return dataclasses.replace(result, name=name)


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
    change = given.get(product, ...)
    if change is None or isinstance(change, MatmulSpec):
        return False
    before, own = getattr(recipe, product), change if isinstance(change, Mapping) else {}
    return any(own.get(side, getattr(before, side)) is not None for side in TENSORS[product])


def _product(before: MatmulSpec, product: str, given: dict[str, Any]) -> MatmulSpec:
    """One product: its own word first, then those of its tensors, then those of all."""
    change = given.get(product, {})
    if change is None:
        return _HIGH
    if isinstance(change, MatmulSpec):
        return change
    if not isinstance(change, Mapping):
        raise TypeError(
            f"{product} must be a MatmulSpec, a dict of its parts ({', '.join(_OF_PRODUCT)}) or "
            f"None for high precision, got {product}={change!r}"
        )
    own = _parts(change, _OF_PRODUCT, product)
    quantizes = any(own.get(side, getattr(before, side)) is not None for side in TENSORS[product])
    if not quantizes:
        return dataclasses.replace(before, **own)
    operands = {
        side: _operand(getattr(before, side), own.get(side, given.get(word, ...)), word, given)
        for side, word in TENSORS[product].items()
    }
    if not any(operands.values()) and "transform" not in own:
        return _HIGH
    transform = own.get("transform", given.get("transform", before.transform))
    fast = own.get("fast_accumulation", before.fast_accumulation)
    return MatmulSpec(**operands, transform=transform, fast_accumulation=fast)


def _operand(
    before: OperandSpec | None, change: Any, word: str, given: dict[str, Any]
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
    format = block_format(own.get("format", before and before.format))
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
        scale_rule=scale_rule_for(rule, format),
        rounding=rounding,
        prescale=prescale,
    )


def _parts(change: Mapping[str, Any], known: tuple[str, ...], word: str) -> dict[str, Any]:
    for part in change:
        if part not in known:
            raise ValueError(
                f"{word} has no part {part!r}, got {word}={dict(change)!r}; its parts: "
                f"{', '.join(known)}"
            )
    return dict(change)


def _residuals(given: Any, operation: str) -> Residuals:
    try:
        return Residuals(given)
    except ValueError:
        names = " or ".join(repr(one.value) for one in Residuals)
        raise ValueError(
            f"{operation}: residuals must be {names}, got residuals={given!r}"
        ) from None


def _text(word: str, value: Any) -> str:
    """A change as names of recipes show it, the same however it was given: `weights=mxfp4`."""
    if isinstance(value, Mapping):
        known = (*_OF_PRODUCT, *_OF_OPERAND)
        parts = (_text(part, value[part]) for part in sorted(value, key=known.index))
        return f"{word}=({', '.join(parts)})"
    if word in (*TENSORS, *_OF_TENSORS, "lhs", "rhs") and value is None:
        return f"{word}=high precision"
    if word in (*_OF_TENSORS, "lhs", "rhs", "format") and not isinstance(value, OperandSpec):
        value = block_format(value)
    value = value.value if isinstance(value, Residuals) else getattr(value, "name", value)
    return f"{word}={value}"
