"""All equations of a program, those of its loops and calls among them, and what flows into them."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import (
    ClosedJaxpr,  # pyright: ignore[reportPrivateImportUsage]
    Jaxpr,
    JaxprEqn,
    Literal,
)
from jax.interpreters import partial_eval

from mx_jax.jaxpr.regions import Marks, bodies, closed, joined, regions

# Place of an equation: its index, below the indices of those around it and of their bodies.
Where = tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Site:
    """An equation, and where it stands.

    Attributes:
      eqn: the equation.
      where: its place.
      around: the equations whose bodies it is in, outermost first.
      marks: of each operand, those of the arguments that it comes from.
    """

    eqn: JaxprEqn
    where: Where
    around: tuple[JaxprEqn, ...]
    marks: Marks

    @functools.cached_property
    def scope(self) -> str:
        """The names of its scopes, joined by `/`."""
        names = (name_of(eqn) for eqn in (*self.around, self.eqn))
        return "/".join(filter(None, names))

    @property
    def times(self) -> int:
        """How often it runs, each step of a scan counted."""
        scans = (eqn for eqn in self.around if eqn.primitive.name == "scan")
        return math.prod(int(eqn.params["length"]) for eqn in scans)


def name_of(eqn: JaxprEqn) -> str:
    """The names of the scopes that an equation has in its own program."""
    return str(eqn.source_info.name_stack)


def equations(program: Jaxpr | ClosedJaxpr) -> Sequence[JaxprEqn]:
    """The equations of a program itself."""
    return closed(program).jaxpr.eqns


def live(program: ClosedJaxpr) -> ClosedJaxpr:
    """A program without what its results do not use."""
    jaxpr, _ = partial_eval.dce_jaxpr(
        program.jaxpr, [True] * len(program.jaxpr.outvars), instantiate=True
    )
    return program.replace(jaxpr=jaxpr)


def walk(program: Jaxpr | ClosedJaxpr, marks: Marks | None = None) -> list[Site]:
    """All equations of a program in order, each before those in its bodies.

    Args:
      program: a jaxpr.
      marks: of each argument, bits that what is computed from it is to have.
    """
    program = closed(program)
    return _walk(program, marks or [0] * len(program.jaxpr.invars), (), ())[1]


def _walk(
    program: ClosedJaxpr, marks: Marks, where: Where, around: tuple[JaxprEqn, ...]
) -> tuple[list[int], list[Site]]:
    """The marks of the results, and the equations."""
    jaxpr = program.jaxpr
    known: dict[Any, int] = dict(zip(jaxpr.invars, marks, strict=True))
    sites: list[Site] = []

    def read(atoms: Sequence[Any]) -> list[int]:
        return [0 if isinstance(atom, Literal) else known.get(atom, 0) for atom in atoms]

    for index, eqn in enumerate(jaxpr.eqns):
        site = Site(eqn=eqn, where=(*where, index), around=around, marks=read(eqn.invars))
        results, inner = _walk_bodies(site)
        sites += [site, *inner]
        known |= zip(eqn.outvars, results, strict=True)
    return read(jaxpr.outvars), sites


def _walk_bodies(site: Site) -> tuple[list[int], list[Site]]:
    """The same of an equation's bodies."""
    eqn, marks = site.eqn, list(site.marks)
    inner = bodies(eqn)
    # Of each body as it was met last: loops are gone round until nothing changes.
    below: dict[int, list[Site]] = {}

    def flow(i: int, marks: Marks) -> list[int]:
        results, below[i] = _walk(inner[i], marks, (*site.where, i), (*site.around, eqn))
        return results

    region = regions().get(eqn.primitive)
    if region is not None:
        results = region.flow(eqn.params, marks, flow)
    else:
        results = [joined(marks)] * len(eqn.outvars)
        for i, body in enumerate(inner):
            flow(i, [joined(marks)] * len(body.jaxpr.invars))
    return results, [inner_site for i in sorted(below) for inner_site in below[i]]


def used(program: ClosedJaxpr, sites: Sequence[Site]) -> set[Any]:
    """The variables that equations read, or programs return."""
    programs = [program, *(body for site in sites for body in bodies(site.eqn))]
    atoms = [atom for body in programs for atom in body.jaxpr.outvars]
    atoms += [atom for site in sites for atom in site.eqn.invars]
    return {atom for atom in atoms if not isinstance(atom, Literal)}


# Whether layers that differ by their names alone are parted. In jit's key.
parted: Any = jax.make_user_context(default_value=False)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class LayerName:
    """A layer's path, where equal layers are to share a trace: equal to any other but where names
    are `parted`. What jit compiled for one of them otherwise keeps that one's name.

    Attributes:
      path: parts parted by `/`.
    """

    path: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LayerName) and (not parted.value or self.path == other.path)

    def __hash__(self) -> int:
        return hash(LayerName)

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """A context below the layer, in the program's names."""
        return jax.named_scope(self.path)


# A leaf that is no array, with its type, and a float with its text; None stands for an array.
Constant = tuple[Any, type, str] | None


@dataclasses.dataclass(frozen=True)
class Static:
    """What of a call is no array, equal to what nothing can tell from it: True is not 1.

    Attributes:
      structure: of `(args, kwargs)`.
      constants: for each leaf.
    """

    structure: Any
    constants: tuple[Constant, ...]

    def arguments(self, arrays: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the call, with other arrays."""
        left = iter(arrays)
        leaves = [next(left) if constant is None else constant[0] for constant in self.constants]
        return jax.tree.unflatten(self.structure, leaves)


def is_array(leaf: object) -> bool:
    """Whether a leaf has a shape and a dtype."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def split(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Static, list[Any]]:
    """A call as what of it is no array, and its arrays."""
    # Flags such as `train=True`, strings and functions have to stay Python values under a trace.
    leaves, structure = jax.tree.flatten((tuple(args), kwargs))
    constants: list[Constant] = []
    for leaf in leaves:
        text = repr(leaf) if isinstance(leaf, float | complex) else ""
        constants.append(None if is_array(leaf) else (leaf, type(leaf), text))
    return Static(structure, tuple(constants)), [leaf for leaf in leaves if is_array(leaf)]


def of_arrays(
    function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], list[Any]]:
    """A call as a function of the list of its arrays alone, and that list."""
    static, arrays = split(args, kwargs)

    def call(arrays: Sequence[Any]) -> Any:
        positional, keywords = static.arguments(arrays)
        return function(*positional, **keywords)

    return call, arrays


def traced(
    function: Callable[..., Any], static: Static, arrays: Sequence[Any]
) -> tuple[ClosedJaxpr, Callable[[Sequence[Any]], Any]]:
    """The program of a call, and a function from the program's results to the call's, a tree whose
    leaves may be other things than arrays."""
    structures: list[tuple[Any, list[Any]]] = []

    def call(arrays: Sequence[Any]) -> list[Any]:
        args, kwargs = static.arguments(arrays)
        results, structure = jax.tree.flatten(function(*args, **kwargs))
        structures[:] = [(structure, [None if is_array(leaf) else leaf for leaf in results])]
        return [leaf for leaf in results if is_array(leaf)]

    program = jax.make_jaxpr(call)(arrays)
    ((structure, leaves),) = structures

    def result(values: Sequence[Any]) -> Any:
        left = iter(values)
        return jax.tree.unflatten(structure, [next(left) if x is None else x for x in leaves])

    return program, result
