"""Recipes by name: whatever takes a recipe takes the name of one.

The named recipes stand above the operations that take them, so they enter themselves here.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from mx_jax.formats import block_format
from mx_jax.specs import MatmulRecipe

R = TypeVar("R", bound=MatmulRecipe)

_NAMED: dict[str, Callable[[], MatmulRecipe]] = {}
# Those that a name alone does not make.
_TAKE_A_FORMAT = ("weight_only", "qat")


def enter_recipe(name: str, make: Callable[[], MatmulRecipe]) -> None:
    """Let a name stand for the recipe that a function without arguments makes."""
    _NAMED[name] = make


def recipe_names() -> tuple[str, ...]:
    """The names that stand for recipes."""
    return tuple(_NAMED)


def makes_recipe(what: Any) -> bool:
    """Whether it is the function of a named recipe, which somebody forgot to call."""
    return any(what is make for make in _NAMED.values())


def named_recipe(name: str) -> MatmulRecipe:
    """The recipe of a name; case and `-` for `_` do not matter, as in the names of formats.

    Raises:
      ValueError: unknown name; the message lists the known.
    """
    make = _NAMED.get(name.strip().lower().replace("-", "_"))
    if make is None:
        raise ValueError(f"unknown recipe name={name!r}{_meant(name)}; known: {', '.join(_NAMED)}")
    return make()


def _meant(name: str) -> str:
    """What to write instead of a name that is a format's, or that a format has to follow."""
    if name in _TAKE_A_FORMAT:
        return f", a recipe of a format: write recipes.{name}(format)"
    try:
        block_format(name)
    except ValueError:
        return ""
    return (
        ", a block format: recipes.weight_only and qat take one, and with_(weights=, activations=, "
        "gradients=) of a recipe"
    )


def as_recipe(recipe: Any, operation: str, kind: type[R] = MatmulRecipe) -> R:
    """A recipe as it is, a name as the recipe that it stands for.

    Args:
      recipe: what a user passed.
      operation: for the error.
      kind: class of recipe that the operation needs.

    Raises:
      ValueError: unknown name; the message lists the known.
      TypeError: neither a recipe nor a name, `None` and a function that was not called among them.
    """
    if isinstance(recipe, str):
        try:
            recipe = named_recipe(recipe)
        except ValueError as error:
            raise ValueError(f"{operation}: {error}") from None
    if isinstance(recipe, kind):
        return recipe
    hint = "call it: recipes are functions" if callable(recipe) else "e.g. mx_jax.recipes.mxfp8()"
    raise TypeError(
        f"{operation}: recipe must be a Recipe ({hint}), got recipe={recipe!r}; or the name of "
        f"one: {', '.join(_NAMED)}"
    )
