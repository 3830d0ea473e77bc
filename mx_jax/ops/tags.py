"""What a quantized operand is called and where in a model it is.

While no capture runs, all of this is names in the program: no operation, no part of jit's key.
"""

import contextlib
import contextvars
import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import get_opaque_trace_state

from mx_jax.axes import Side
from mx_jax.backends.select import active

IntScalar = int | np.integer | jax.Array
Product = Literal["output", "grad_input", "grad_weight"]

SIDES: tuple[Side, Side] = ("lhs", "rhs")
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


def remark(text: str) -> None:
    """Say something of a call to whoever records it, as `explain` does."""
    if (recorder := active.value) is not None:
        recorder.entries.append(text)


@jax.tree_util.register_static
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
    """Where in a model a trace is, by the parts of its path."""

    names: tuple[str, ...] = ()
    module: tuple[str, ...] = ()  # path of the innermost module of Flax's, as Flax has it
    base: tuple[str, ...] = ()  # the names around the outermost of these
    loops: tuple[int, ...] = ()  # for each index in context, its place in the order of the trace
    # Whether the innermost index was counted for the user, who may give a better one.
    counted: bool = False
    calls: tuple[int, ...] = ()  # which use of each part of the path this is, in its function
    # How often each path below was entered from here.
    uses: dict[str, int] = dataclasses.field(default_factory=dict, compare=False)

    @property
    def path(self) -> str:
        return "/".join(self.names)


place: Any = jax.make_user_context(default_value=Place())


@contextlib.contextmanager
def tag(name: str, *, index: IntScalar | None = None) -> Iterator[None]:
    """A context that names products: a part of their path, and of the program's names.

    Modules of Flax are named without it. While no capture runs, it is `jax.named_scope(name)`.

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
        _check_scalar(index, "tag", "index")
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
def _indexed(here: Place, index: IntScalar) -> Iterator[Place]:
    """A context in which a place has one index more, or a user's for the one that was counted."""
    value, now, outer = jnp.asarray(index, jnp.int32), counters(), len(here.loops) - here.counted
    loops = (*here.loops[:outer], next(numbers))
    with at(dataclasses.replace(now, index=(*now.index[:outer], value)), value):
        yield dataclasses.replace(here, loops=loops, counted=False)


@contextlib.contextmanager
def iteration(index: IntScalar) -> Iterator[None]:
    """A context around the body of a scan that counts: one index, however often it is traced."""
    here: Place = dataclasses.replace(place.value, counted=False)
    with contextlib.ExitStack() as stack:
        inside = stack.enter_context(_indexed(here, index))
        stack.enter_context(place(dataclasses.replace(inside, counted=True, uses={})))
        yield


def entered(here: Place) -> Place:
    """A place that is entered now, with the number of times that it was before from here."""
    # Traced again, the same use has the same number. What is entered from nowhere counts in each
    # trace for itself; nothing says where a function begins that nothing traces.
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


def within(module: tuple[str, ...]) -> contextlib.AbstractContextManager[Any]:
    """A context below a module of Flax's, by its path; a shared one starts its names anew."""
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


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("step", "index"), meta_fields=("on_host",)
)
@dataclasses.dataclass(frozen=True, eq=False)
class Counters:
    """The step of training and the indices of loops, int32, known only while the program runs."""

    step: jax.Array | None = None
    index: tuple[jax.Array, ...] = ()  # of the layer, for each loop in context, outermost first
    on_host: bool = False  # whether the step is a Python number, known outside the program


# The captures in context. In jit's cache key: what was traced without one, elsewhere or for other
# captures is not reused.
watching: Any = jax.make_user_context(default_value=())
# Traced values cannot be in a key: a number stands for them.
_counters_key: Any = jax.make_user_context(default_value=None)
_counters: contextvars.ContextVar[Counters | None] = contextvars.ContextVar(
    "counters", default=None
)
_EAGER = get_opaque_trace_state()
# The order of what traces meet.
numbers = itertools.count()


def counters() -> Counters:
    """Step and index in context."""
    return _counters.get() or Counters()


def eager() -> bool:
    """Whether nothing traces."""
    return get_opaque_trace_state() == _EAGER


@contextlib.contextmanager
def at(new: Counters, value: IntScalar | str) -> Iterator[None]:
    """A context with other counters, of which a value is new: a number, or what stands for it."""
    traced = isinstance(value, Tracer)
    key = next(numbers) if traced else value if isinstance(value, str) else int(value)
    token = _counters.set(new)
    try:
        with _counters_key((_counters_key.value, key)):
            yield
    finally:
        _counters.reset(token)


@contextlib.contextmanager
def at_step(step: IntScalar) -> Iterator[None]:
    """A context whose products belong to a step of training: how `capture` knows the step.

    While no capture runs, it does nothing, so it may stay where it is written:

    - around the call of the function that `jit` compiles, if the step is known there. A step that
      is not due runs the program without a capture, and costs what that costs; one that is due is
      waited for. Both are compiled once.
    - inside that function, with a step that is traced: one program for all steps, with a condition
      for each product. A number that is not traced becomes a part of the program there, which is
      compiled again for the next.

    Args:
      step: integer scalar, traced or not.

    Raises:
      TypeError: not an integer scalar.

    Examples:
      >>> import jax, jax.numpy as jnp, mx_jax
      >>> loss = jax.jit(lambda x, w: mx_jax.matmul(x, w, recipe="mxfp8").sum())
      >>> with mx_jax.inspect.capture(every=10) as records:
      ...     for step in range(25):
      ...         with mx_jax.inspect.at_step(step):
      ...             _ = loss(jnp.ones((4, 64)), jnp.ones((64, 8)))
      >>> sorted({record.step for record in records.all()})
      [0, 10, 20]
    """
    _check_scalar(step, "at_step", "step")
    if not watching.value:
        yield
    elif not eager() or isinstance(step, Tracer):
        value = jnp.asarray(step, jnp.int32)
        with at(dataclasses.replace(counters(), step=value, on_host=False), value):
            yield
    else:
        watchers = tuple(watcher for watcher in watching.value if watcher.is_due(int(step)))
        with watching(watchers), contextlib.ExitStack() as stack:
            for watcher in watchers:
                stack.enter_context(watcher.at_host_step(int(step)))
            if watchers:
                # The step is in no key: programs are the same for all that are due.
                now = dataclasses.replace(counters(), step=None, on_host=True)
                stack.enter_context(at(now, "on_host"))
                # Callbacks that still run come before the next step.
                stack.callback(jax.effects_barrier)
            yield


def _check_scalar(value: jax.typing.ArrayLike, operation: str, what: str) -> None:
    """Raise TypeError if a value is no integer scalar."""
    shape, dtype = jnp.shape(value), jnp.result_type(value)
    if shape != () or not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(
            f"{operation}: {what} must be an integer scalar, got {what} of dtype={dtype}, "
            f"shape={shape}"
        )


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class LayerName:
    """A layer's path, where equal layers are to share a trace: equal to any other while no capture
    runs. What jit compiled for one of them then keeps that one's name.

    Attributes:
      path: parts parted by `/`.
    """

    path: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LayerName) and (not watching.value or self.path == other.path)

    def __hash__(self) -> int:
        return hash(LayerName)

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """A context below the layer, in the program's names too."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(jax.named_scope(self.path))
            if watching.value:
                stack.enter_context(within(tuple(self.path.split("/"))))
            yield


class Free(NamedTuple):
    """An axis of operand 0 or 1 that a product has from it alone, and the one that it becomes."""

    operand: int
    axis: int
    result: int
