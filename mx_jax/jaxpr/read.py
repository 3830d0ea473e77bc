"""All equations of a program, those of its loops and calls among them, and what flows into them."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import (
    ClosedJaxpr,  # pyright: ignore[reportPrivateImportUsage]
    Jaxpr,
    JaxprEqn,
    Literal,
)
from jax.interpreters import partial_eval

from mx_jax.jaxpr.regions import bodies, closed, regions

# Place of an equation: its index, below the indices of those around it and of their bodies.
Where = tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Site:
    """An equation, and where it stands.

    Attributes:
      eqn: the equation.
      where: its place.
      around: the equations whose bodies it is in, outermost first.
      marked: which of its operands come from marked arguments.
    """

    eqn: JaxprEqn
    where: Where
    around: tuple[JaxprEqn, ...]
    marked: tuple[bool, ...]

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


def walk(program: Jaxpr | ClosedJaxpr, marked: Sequence[bool] | None = None) -> list[Site]:
    """All equations of a program in order, each before those in its bodies.

    Args:
      program: a jaxpr.
      marked: of each argument, whether what comes from it is to be marked.
    """
    program = closed(program)
    own = [False] * len(program.jaxpr.invars) if marked is None else marked
    return _walk(program, own, (), ())[1]


def _walk(
    program: ClosedJaxpr, marked: Sequence[bool], where: Where, around: tuple[JaxprEqn, ...]
) -> tuple[list[bool], list[Site]]:
    """Which results are marked, and the equations."""
    jaxpr = program.jaxpr
    known: dict[Any, bool] = dict(zip(jaxpr.invars, marked, strict=True))
    sites: list[Site] = []

    def read(atoms: Sequence[Any]) -> list[bool]:
        return [not isinstance(atom, Literal) and known.get(atom, False) for atom in atoms]

    for index, eqn in enumerate(jaxpr.eqns):
        site = Site(eqn=eqn, where=(*where, index), around=around, marked=tuple(read(eqn.invars)))
        results, inner = _walk_bodies(site)
        sites += [site, *inner]
        known |= zip(eqn.outvars, results, strict=True)
    return read(jaxpr.outvars), sites


def _walk_bodies(site: Site) -> tuple[list[bool], list[Site]]:
    """The same of an equation's bodies."""
    eqn, marked = site.eqn, list(site.marked)
    inner = bodies(eqn)
    # Of each body as it was met last: loops are gone round until nothing changes.
    below: dict[int, list[Site]] = {}

    def flow(i: int, marked: Sequence[bool]) -> list[bool]:
        results, below[i] = _walk(inner[i], marked, (*site.where, i), (*site.around, eqn))
        return results

    region = regions().get(eqn.primitive)
    if region is not None:
        results = region.flow(eqn.params, marked, flow)
    else:
        results = [any(marked)] * len(eqn.outvars)
        for i, body in enumerate(inner):
            flow(i, [True] * len(body.jaxpr.invars))
    return results, [own for i in sorted(below) for own in below[i]]


def definitions(sites: Sequence[Site]) -> dict[Any, JaxprEqn]:
    """The equation that computes each variable."""
    return {out: site.eqn for site in sites for out in site.eqn.outvars}


def used(program: ClosedJaxpr, sites: Sequence[Site]) -> set[Any]:
    """The variables that equations read, or programs return."""
    programs = [program, *(body for site in sites for body in bodies(site.eqn))]
    atoms = [atom for own in programs for atom in own.jaxpr.outvars]
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
