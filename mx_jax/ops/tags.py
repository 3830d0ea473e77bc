"""What a quantized operand is called and where in a model it is.

While nobody watches, all of this is names in the program: no operation, no part of jit's key.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state

from mx_jax.axes import Side
from mx_jax.ops.moments import at, check_scalar, eager, moment, numbers, watching

Product = Literal["output", "grad_input", "grad_weight"]

# The product that gives which operand's cotangent, as tags and the program's names call it.
GRADIENT: dict[Side, Product] = {"lhs": "grad_input", "rhs": "grad_weight"}

_TENSORS: dict[tuple[str, str], str] = {
    ("output", "lhs"): "input",
    ("output", "rhs"): "weight",
    ("grad_input", "lhs"): "gradient",
    ("grad_input", "rhs"): "weight",
    ("grad_weight", "lhs"): "gradient",
    ("grad_weight", "rhs"): "input",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tag:
    """Which operand of which product of which layer, and how it is quantized.

    Attributes:
      path: of the module, parts parted by `/`; names of `tag` for plain functions.
      product: `"output"`, or the product that gives the gradient of the left operand
        (`"grad_input"`) or of the right one (`"grad_weight"`).
      side: `"lhs"` or `"rhs"`, as the recipe has them: of a gradient's product, lhs is the incoming
        gradient. None: the product itself.
      axis: that blocks lie along, from the end; None for a product.
      format: name of the block format; of a product, of both operands.
      rule: name of the scale rule, likewise; `"stored"` of an operand that came quantized.
      call: which use of the module in its function, from 0.

    Examples:
      >>> from mx_jax.ops.tags import Tag
      >>> operand = {"side": "lhs", "axis": -1, "format": "mxfp4", "rule": "even"}
      >>> tag = Tag(path="mlp/up", product="output", **operand)
      >>> print(tag, "|", tag.tensor)
      mlp/up output lhs mxfp4 even axis -1 | input
    """

    path: str
    product: Product
    side: Side | None
    axis: int | None
    format: str
    rule: str
    call: int = 0

    @property
    def tensor(self) -> str:
        """What is quantized: the layer's `"input"`, its `"weight"`, or the incoming `"gradient"`;
        `"product"` for a product."""
        return "product" if self.side is None else _TENSORS[self.product, self.side]

    def __str__(self) -> str:
        call = f" call {self.call}" if self.call else ""
        own = "" if self.side is None else f" {self.side}"
        axis = "" if self.axis is None else f" axis {self.axis}"
        return f"{self.path} {self.product}{own} {self.format} {self.rule}{axis}{call}"


@dataclasses.dataclass(frozen=True)
class Place:
    """Where in a model a trace is.

    Attributes:
      names: parts of the path.
      module: path of the innermost module of Flax's, as Flax has it.
      base: the names around the outermost of these.
      loops: for each index in context, its place in the order of the trace.
      counted: whether the innermost index was counted for the user, who may give a better one.
      calls: which use of each part of the path this is, in its function.
      uses: how often each path below was entered from here.
    """

    names: tuple[str, ...] = ()
    module: tuple[str, ...] = ()
    base: tuple[str, ...] = ()
    loops: tuple[int, ...] = ()
    counted: bool = False
    calls: tuple[int, ...] = ()
    uses: dict[str, int] = dataclasses.field(default_factory=dict, compare=False)

    @property
    def path(self) -> str:
        """The names, parted by `/`."""
        return "/".join(self.names)


place: Any = jax.make_user_context(default_value=Place())


@contextlib.contextmanager
def tag(name: str, *, index: Any = None) -> Iterator[None]:
    """A context that names products: a part of their path, and of the program's names.

    Modules of Flax are named without it. While nobody watches, it is `jax.named_scope(name)`.

    Args:
      name: a part of the path, below those in context.
      index: of the layer, an integer scalar, in a function that `jax.lax.scan` runs for each layer:
        a counter in the carry, or one of the scanned arrays. Scans of Flax's, and of functions that
        `convert.function` made, are counted without it.

    Raises:
      TypeError: no name, or an index that is no integer scalar.

    Examples:
      >>> import jax.numpy as jnp, mx_jax
      >>> with mx_jax.inspect.capture() as records, mx_jax.inspect.tag("scores"):
      ...     _ = mx_jax.matmul(jnp.ones((4, 64)), jnp.ones((64, 8)), recipe="mxfp8")
      >>> print(records.all()[0].tag)
      scores output lhs mxfp8_e4m3 rceil axis -1
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f"tag: needs a name, got name={name!r}")
    if index is not None:
        check_scalar(index, "tag", "index")
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.named_scope(name))
        if watching.value:
            here = place.value
            here = dataclasses.replace(here, names=(*here.names, *name.split("/")))
            if index is not None:
                here = stack.enter_context(_indexed(here, index))
            stack.enter_context(place(entered(here)))
        yield


@contextlib.contextmanager
def _indexed(here: Place, index: Any) -> Iterator[Place]:
    """A context in which a place has one index more, or a user's for the one that was counted."""
    value, now, outer = jnp.asarray(index, jnp.int32), moment(), len(here.loops) - here.counted
    loops = (*here.loops[:outer], next(numbers))
    with at(dataclasses.replace(now, index=(*now.index[:outer], value)), value):
        yield dataclasses.replace(here, loops=loops, counted=False)


@contextlib.contextmanager
def iteration(index: Any) -> Iterator[None]:
    """A context around the body of a scan, which is told its index without the user's doing.

    However often the body is traced, its products are the same ones.

    Args:
      index: int32 scalar, of the slice that the body gets.
    """
    here: Place = dataclasses.replace(place.value, counted=False)
    with contextlib.ExitStack() as stack:
        inside = stack.enter_context(_indexed(here, index))
        stack.enter_context(place(dataclasses.replace(inside, counted=True, uses={})))
        yield


def entered(here: Place) -> Place:
    """A place that is entered now: with the number of times that it was before, from where it is.

    Traced again, the same use has the same number. What is entered from nowhere counts in each
    trace for itself; nothing says where a function begins that nothing traces.
    """
    around: Place = place.value
    if around.calls:
        count = around.uses.get(here.path, 0)
        around.uses[here.path] = count + 1
    elif eager():
        count = 0
    else:
        state = get_opaque_trace_state()
        uses = watching.value[0].uses
        before, known = uses.get(here.path, (None, 0))
        count = known if before == state else 0
        uses[here.path] = (state, count + 1)
    return dataclasses.replace(here, calls=(*here.calls, count), uses={})


def within(module: tuple[str, ...]) -> AbstractContextManager[Any]:
    """A context below a module of Flax's, by its path.

    A part of the module around it adds its own names; another, such as a shared one, starts anew.
    """
    here: Place = place.value
    known = len(here.module)
    if known and module == here.module:
        return contextlib.nullcontext()
    if not known:
        names, base = (*here.names, *module), here.names
    elif module[:known] == here.module:
        names, base = (*here.names, *module[known:]), here.base
    else:
        names, base = (*here.base, *module), here.base
    here = dataclasses.replace(here, names=names, module=module, base=base)
    return place(entered(here))
