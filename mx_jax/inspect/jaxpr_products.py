"""How often a jaxpr computes what was selected, where, and which products nobody selected."""

import dataclasses
import math
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params  # pyright: ignore[reportPrivateImportUsage]
from jax.interpreters import partial_eval

from mx_jax.backends.select import MARK

_MARK = re.compile(rf"{re.escape(MARK)}(\d+)")
# What transformations and calls add to names of scopes.
_WRAPPERS = re.compile(r"\b(jvp|vmap|transpose|jit|pjit|checkpoint|remat\w*)\(|[()]")
_NOISE = {"", "checkpoint", "rematted_computation", "while", "body", "cond", "scan", "remat"}
_PRODUCTS = {"dot_general", "conv_general_dilated", "ragged_dot_general", "ragged_dot"}
_PACKAGE = str(Path(__file__).parents[1])
# What calls the function that is explained: beyond it nobody asks for a product.
_EXPLAINER = str(Path(__file__).parent)
# Where a caller's own code does not lie.
_LIBRARIES = re.compile(r"[/\\](jax|jaxlib|flax)[/\\]")
_STDLIB = sysconfig.get_paths()["stdlib"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where in a function something is computed.

    Attributes:
      path: scopes joined by `/`, layers of Flax among them; `""` outside of all.
      backward: whether a gradient asks for it.
    """

    path: str
    backward: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Computed:
    """An entry of a recorder, or a product in high precision, as often as the jaxpr has it there.

    Attributes:
      entry: index in the recorder; None of a product that no backend was asked for.
      place: where.
      times: how often, each step of a scan counted.
      product: the equation's operands and result, in words, of those in high precision.
      flops: of one, of those in high precision.
      bytes: read and written by one, likewise.
      why: why it stays in high precision.
    """

    entry: int | None
    place: Place
    times: int
    product: str = ""
    flops: float = 0.0
    bytes: float = 0.0
    why: str = ""


def computed(jaxpr: Any) -> Iterator[Computed]:
    """What a closed jaxpr computes, scans and calls included, as marked while it was traced."""
    # XLA computes nothing that is not used. Flax, for one, traces the body of a scan twice.
    needed, _ = partial_eval.dce_jaxpr(jaxpr.jaxpr, [True] * len(jaxpr.jaxpr.outvars))
    yield from _walk(needed, 1, "", marked=False)


def _walk(jaxpr: Any, times: int, scopes: str, *, marked: bool) -> Iterator[Computed]:
    here: dict[int, str] = {}
    for eqn in jaxpr.eqns:
        own = str(eqn.source_info.name_stack)
        stack = f"{scopes}/{own}" if own else scopes
        inside = False
        for index in map(int, _MARK.findall(own)):
            here.setdefault(index, stack)
            inside = True
        if eqn.primitive.name in _PRODUCTS:
            if not marked and not inside and _is_float(eqn):
                yield _high(eqn, times, stack)
            continue
        again = int(eqn.params.get("length", 1)) if eqn.primitive.name == "scan" else 1
        for inner in _inner(eqn):
            yield from _walk(inner, times * again, stack, marked=marked or inside)
    for index, stack in here.items():
        yield Computed(entry=index, place=_place(stack), times=times)


def _inner(eqn: Any) -> Iterator[Any]:
    """The jaxprs that an equation calls; kernels of Pallas are a backend's own."""
    if eqn.primitive.name != "pallas_call":
        yield from jaxprs_in_params(eqn.params)


def _place(stack: str) -> Place:
    plain = _WRAPPERS.sub("", _MARK.sub("", stack))
    # `convert` writes the path of a module in brackets.
    names = [name for part in plain.split("/") if (name := part.strip("[=]")) not in _NOISE]
    return Place(path="/".join(dict.fromkeys(names)), backward="transpose(" in stack)


def _is_float(eqn: Any) -> bool:
    return all(jnp.issubdtype(x.aval.dtype, jnp.floating) for x in (*eqn.invars[:2], *eqn.outvars))


def _high(eqn: Any, times: int, stack: str) -> Computed:
    """A product that no backend was asked for."""
    lhs, rhs, out = (x.aval for x in (*eqn.invars[:2], eqn.outvars[0]))
    contracted = _contracted(eqn)
    size = float(math.prod(out.shape))
    return Computed(
        entry=None,
        place=_place(stack),
        times=times,
        product=f"{eqn.primitive.name} {_shown(lhs)} x {_shown(rhs)}, to {out.dtype}",
        flops=2 * size * contracted,
        bytes=float(sum(math.prod(x.shape) * x.dtype.itemsize for x in (lhs, rhs, out))),
        why=_why(eqn, contracted),
    )


def _contracted(eqn: Any) -> int:
    """How many products each element of the result sums."""
    numbers = eqn.params.get("dimension_numbers")
    lhs, rhs = (x.aval.shape for x in eqn.invars[:2])
    if eqn.primitive.name == "dot_general":
        return math.prod(lhs[axis] for axis in numbers[0][0])
    if eqn.primitive.name == "conv_general_dilated":
        features = numbers.rhs_spec[0]
        return math.prod(rhs) // rhs[features]
    return lhs[-1]


def _shown(aval: Any) -> str:
    return f"{aval.dtype} {list(aval.shape)}"


def _why(eqn: Any, contracted: int) -> str:
    """Who asked for a product in high precision: a recipe, a rule, or code that has none."""
    frame = _caller(eqn)
    if frame is None:
        return "no recipe reaches it"
    where = f"{Path(frame.file_name).name}:{frame.line_num} ({frame.function_name})"
    if not frame.file_name.startswith(_PACKAGE):
        return f"no recipe reaches it: {where}"
    if contracted == 1:
        return "it contracts nothing: there is nothing to quantize along"
    folder = Path(frame.file_name).relative_to(_PACKAGE).parts[0]
    return _OWN.get(folder, f"mx_jax's own, not of a recipe: {where}")


# Whose decision a product is that mx_jax itself leaves to JAX, by the folder that asks for it.
_OWN = {
    "ops": "its recipe keeps both operands in high precision",
    "convert": "no rule converts its layer",
    "nn": "its layer keeps it in high precision",
}


def _caller(eqn: Any) -> Any:
    """The innermost frame that is no library's, or None where JAX kept none."""
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        name = frame.file_name
        if name.startswith(_EXPLAINER):
            return None
        if name.startswith(_PACKAGE):
            return frame
        is_stdlib = name.startswith(_STDLIB) and "site-packages" not in name
        if not is_stdlib and not _LIBRARIES.search(name) and not name.startswith("<frozen"):
            return frame
    return None
