"""What the names of an equation's scopes say: where in a model it is, and of which product."""

import re
from collections.abc import Iterator
from typing import NamedTuple, cast

from mx_jax.axes import GRADIENT, Pass, Side

UNNAMED = "unnamed"
# What transformations and calls add to names of scopes.
_WRAPPERS = re.compile(r"\b(jvp|vmap|transpose|jit|pjit|checkpoint|remat\w*)\(|[()]")
_AGAIN = "rematted_computation"
_NOISE = {"", "checkpoint", _AGAIN, "while", "body", "cond", "scan", "remat"}
_PRODUCTS = {"output", *GRADIENT.values()}
_CAST = re.compile(r"(lhs|rhs)\..*\.axis(-\d+)")
_PAIR = ["first", "second"]
_BOTH = re.compile(r"axis(-\d+)\.axis(-\d+)")


class Place(NamedTuple):
    """Where in a function something is computed."""

    path: str  # scopes joined by `/`, layers of Flax among them; `""` outside of all
    backward: bool  # whether a gradient asks for it


class Part(NamedTuple):
    """A product, or an operand of one that is cast."""

    path: str
    product: Pass
    side: Side | None
    axis: int | None  # that the blocks of a cast lie along


def names_of(scope: str) -> list[str]:
    """The names in a scope that people gave."""
    # `convert` writes the path of a module in brackets.
    parts = _WRAPPERS.sub("", scope).split("/")
    return [name for part in parts if (name := part.strip("[=]")) not in _NOISE]


def place_of(scope: str) -> Place:
    """The place that a scope names."""
    return Place("/".join(dict.fromkeys(names_of(scope))), "transpose(" in scope)


def is_again(scope: str) -> bool:
    """Whether `jax.checkpoint` computes it once more."""
    return _AGAIN in scope


def product_of(scope: str) -> Part | None:
    """The product that a scope is of, or None."""
    *outer, last = names_of(scope) or [""]
    return _part(outer, cast(Pass, last)) if last in _PRODUCTS else None


def casts_of(scope: str) -> Iterator[Part]:
    """The operand that each cast of an equation of this scope casts; none if it is nobody's."""
    names = names_of(scope)
    # Of a pair of casts that are made one by one.
    number = _PAIR.index(names.pop()) if names and names[-1] in _PAIR else None
    *outer, product, own = ["", "", *names]
    if product in _PRODUCTS and (found := _CAST.fullmatch(own)):
        yield _part(outer, cast(Pass, product), cast(Side, found[1]), int(found[2]))
    elif product == "grad_both" and (found := _BOTH.fullmatch(own)):
        for i, name in enumerate(GRADIENT.values()):
            if number in (None, i):
                yield _part(outer, name, "lhs", int(found[i + 1]))


def _part(
    outer: list[str], product: Pass, side: Side | None = None, axis: int | None = None
) -> Part:
    path = "/".join(filter(None, dict.fromkeys(outer)))
    return Part(path or UNNAMED, product, side, axis)
