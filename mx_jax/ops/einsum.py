"""einsum of two operands, as one dot_general between a sum and a transpose."""

import dataclasses

import jax
import jax.numpy as jnp

from mx_jax.backends.calls import AnyOperand
from mx_jax.codecs.explicit_axes import Spec
from mx_jax.ops.arguments import Key, as_operand, as_recipe, check_out_dtype, goes_to_lax
from mx_jax.ops.dot_general import constrain, dot_general
from mx_jax.ops.sharded_operands import permuted_sharding
from mx_jax.packed import OperandLike, Quantized
from mx_jax.specs import MatmulRecipe


@dataclasses.dataclass(frozen=True)
class _Subscripts:
    """One letter an axis; letters of an ellipsis are upper-case Greek, which nobody types."""

    lhs: str
    rhs: str
    out: str


def einsum(
    subscripts: str,
    lhs: OperandLike,
    rhs: OperandLike,
    *,
    recipe: MatmulRecipe | str,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    out_sharding: Spec | None = None,
    key: Key = None,
) -> jax.Array:
    """`jnp.einsum` of two operands with a recipe.

    Letters in both operands and not in the result are contracted, blocks lie along the last of
    them in lhs's order; letters in all three are batch axes. Letters of one operand that are in
    nothing else are summed first, in high precision. Without a contracted letter there is nothing
    to quantize.

    Args:
      subscripts: e.g. `"...td,dhk->...thk"`; without `->`, letters that occur once, in order.
      lhs: values or an MXArray blocked along the last contracted axis.
      rhs: likewise.
      recipe: what to quantize, or a recipe's name.
      precision: as in `jax.lax.dot_general`.
      preferred_element_type: dtype of the product.
      out_sharding: sharding of the product.
      key: PRNG key, if a product that runs draws random bits; others do not use it.

    Returns:
      The product, axes as the subscripts say.

    Raises:
      ValueError: subscripts that do not fit the operands; a letter twice in one operand; a sum
        over an MXArray's own axis.
      TypeError: subscripts that are no string.

    Examples:
      >>> import jax.numpy as jnp, mx_jax
      >>> x, w = jnp.ones((2, 5, 64)), jnp.ones((64, 4, 8))
      >>> mx_jax.einsum("btd,dhk->bthk", x, w, recipe=mx_jax.recipes.mxfp8()).shape
      (2, 5, 4, 8)
    """
    recipe = as_recipe(recipe, "einsum")
    lhs = as_operand(lhs, "lhs", recipe, "einsum")
    rhs = as_operand(rhs, "rhs", recipe, "einsum")
    terms = _parse(subscripts, lhs.ndim, rhs.ndim)
    lhs, left = _sum_alone(lhs, terms.lhs, terms.rhs + terms.out, subscripts)
    rhs, right = _sum_alone(rhs, terms.rhs, terms.lhs + terms.out, subscripts)
    batch = [letter for letter in left if letter in right and letter in terms.out]
    contracted = [letter for letter in left if letter in right and letter not in terms.out]
    if contracted and not goes_to_lax(recipe, lhs, rhs):
        check_out_dtype(preferred_element_type, "einsum")
    _check_sizes(subscripts, lhs, left, rhs, right)
    kept = [c for c in left if c not in right] + [c for c in right if c not in left]
    order = batch + kept
    product = dot_general(
        lhs,
        rhs,
        (_axes(contracted, left, right), _axes(batch, left, right)),
        recipe=recipe,
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=permuted_sharding(out_sharding, [terms.out.index(c) for c in order]),
        key=key,
    )
    product = jnp.transpose(product, [order.index(letter) for letter in terms.out])
    return constrain(product, out_sharding)


def _axes(letters: list[str], left: str, right: str) -> tuple[list[int], list[int]]:
    return [left.index(c) for c in letters], [right.index(c) for c in letters]


def _parse(subscripts: str, lhs_ndim: int, rhs_ndim: int) -> _Subscripts:
    if not isinstance(subscripts, str):
        raise TypeError(
            "einsum: subscripts must be a string such as 'mk,kn->mn', got "
            f"subscripts={subscripts!r}"
        )
    text = subscripts.replace(" ", "")
    inputs, arrow, out = text.partition("->")
    if inputs.count(",") != 1:
        raise ValueError(f"einsum: needs exactly two operands, got subscripts={subscripts!r}")
    left, right = inputs.split(",")
    num_dots = max(_num_dots(left, lhs_ndim, text), _num_dots(right, rhs_ndim, text))
    left, right = _expand(left, lhs_ndim, num_dots), _expand(right, rhs_ndim, num_dots)
    if arrow:
        out = _expand(out, None, num_dots)
    else:
        # Implicit form: ellipsis axes first, then letters that occur once, in alphabetical order.
        dots = _expand("...", None, num_dots)
        both = left + right
        out = dots + "".join(sorted(c for c in set(both) - set(dots) if both.count(c) == 1))
    for term in (left, right, out):
        if len(set(term)) != len(term):
            raise ValueError(
                f"einsum: a letter may occur once in each term, got subscripts={subscripts!r}"
            )
    unknown = set(out) - set(left + right)
    if unknown:
        raise ValueError(
            f"einsum: result letters {sorted(unknown)} are in no operand, "
            f"got subscripts={subscripts!r}"
        )
    return _Subscripts(left, right, out)


def _num_dots(term: str, ndim: int, text: str) -> int:
    """How many axes the ellipsis of one operand stands for."""
    letters = term.replace("...", "", 1)
    if not all(c.isascii() and c.isalpha() for c in letters):
        raise ValueError(f"einsum: subscripts are letters and '...', got subscripts={text!r}")
    dots = ndim - len(letters)
    if dots < 0 or (dots and "..." not in term):
        raise ValueError(
            f"einsum: term {term!r} of subscripts={text!r} names {len(letters)} axes, "
            f"the operand has ndim={ndim}"
        )
    return dots


def _expand(term: str, ndim: int | None, num_dots: int) -> str:
    """Replace the ellipsis by its letters; shorter ellipses align at the right, as in NumPy."""
    own = num_dots if ndim is None else ndim - len(term.replace("...", "", 1))
    letters = "".join(chr(0x0391 + index) for index in range(num_dots))
    return term.replace("...", letters[num_dots - own :], 1)


def _sum_alone(
    operand: AnyOperand, term: str, others: str, subscripts: str
) -> tuple[AnyOperand, str]:
    """Sum over the letters that are in this operand alone."""
    alone = [axis for axis, letter in enumerate(term) if letter not in others]
    if not alone:
        return operand, term
    if isinstance(operand, Quantized):
        raise ValueError(
            f"einsum: subscripts={subscripts!r} sum over an axis of an MXArray alone; pass "
            "dequantize() instead"
        )
    return operand.sum(alone), "".join(c for c in term if c in others)


def _check_sizes(subscripts: str, lhs: AnyOperand, left: str, rhs: AnyOperand, right: str) -> None:
    sizes = dict(zip(left, lhs.shape, strict=True))
    for letter, size in zip(right, rhs.shape, strict=True):
        if sizes.get(letter, size) != size:
            raise ValueError(
                f"einsum: sizes of {letter!r} in subscripts={subscripts!r} must agree, got "
                f"lhs.shape={lhs.shape} with {sizes[letter]} and rhs.shape={rhs.shape} with {size}"
            )
