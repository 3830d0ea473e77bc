"""What `explain` and its like say of a call: which backend takes each cast and product, and why.

The jaxpr says what is computed, where and how often; a recorder, what selection decided meanwhile.
"""

import contextlib
import dataclasses
import functools
import math
import numbers
import re
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.extend.core import JaxprEqn
from jax.sharding import NamedSharding
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.markup import escape
from rich.table import Table

from mx_jax.backends import calls
from mx_jax.backends.select import MARK, Selection, recording
from mx_jax.backends.target import Target, current_target, use_target
from mx_jax.formats import BlockFormat
from mx_jax.inspect.scopes import Place, place_of
from mx_jax.jaxpr.calls import of_arrays
from mx_jax.jaxpr.read import Site, live, name_of, walk
from mx_jax.ops.arguments import NAMED, as_recipe
from mx_jax.ops.dot_general import matmul
from mx_jax.specs import MatmulRecipe

_SIZES = ("m", "k", "n")


@overload
def explain(
    recipe: MatmulRecipe | str,
    /,
    m: int,
    k: int,
    n: int,
    *,
    dtype: jax.typing.DTypeLike = jnp.float32,
    target: Target | None = None,
) -> str: ...


@overload
def explain(
    function: Callable[..., Any],
    /,
    *args: object,
    backward: bool = False,
    target: Target | None = None,
    **kwargs: object,
) -> "Explanation": ...


def explain(what: object, /, *args: object, target: Target | None = None, **kwargs: Any) -> Any:
    """Say how the products of a recipe, or all casts and products of a function, are computed.

    The first form explains the three products of `[m, k] @ [k, n]` with a recipe. The second one
    traces a function, as `jit` would, without computing: who casts and multiplies what, where, how
    often and at what cost, and which products stay in high precision, and why.

    Args:
      what: a recipe or the name of one; or a function, a flax.nnx model, or a flax.linen module,
        which is initialized abstractly.
      *args: of a recipe `m`, `k` and `n`: rows of the left operand, contracting size, columns of
        the right one. Of a function its arguments; arrays may be `jax.ShapeDtypeStruct`.
      target: the machine; default: the one that a call here is for, as `testing.target`,
        `jax.default_device` or jax itself says.
      **kwargs: of a recipe `dtype` of operands and products, float32 by default. Of a function its
        keyword arguments, and `backward`: whether to take the gradients by all its floats, and by
        a model's parameters, too.

    Returns:
      Of a recipe three paragraphs of text. Each has the product and its backend, what was measured
      if that is why it is asked, why no backend before it takes the product, and which ones would
      if they were named. Of a function an `Explanation`: print it, hand it to rich, or ask for its
      `rows`.

    Raises:
      ValueError: a size below 0, or whatever the call itself raises.
      TypeError: neither a recipe nor a function, or a recipe without its three sizes, whole ones.

    Examples:
      >>> import jax, mx_jax
      >>> from mx_jax.backends.target import Target
      >>> recipe = mx_jax.recipes.weight_only("mxfp4")
      >>> target = Target(platform="rocm")
      >>> print(mx_jax.inspect.explain(recipe, 8, 64, 64, dtype="bfloat16", target=target))
      output [8, 64] x [64, 64]: high precision x mxfp4 (even, nearest) -> xla_bfloat16
          (XLA bfloat16 dot, float32 sums)
        not xla: needs two float8 operands, got lhs in high precision
        not cpu_ffi: runs on platform=cpu, got platform=rocm
        not xla_scaled: XLA has this product on platform=cuda, got platform=rocm
      grad_input [8, 64] x [64, 64]: high precision x high precision -> jax.lax.dot_general
      grad_weight [64, 8] x [64, 8]: high precision x high precision -> jax.lax.dot_general

      >>> x, w = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((8, 64), (64, 64)))
      >>> def layer(x, w):
      ...     return mx_jax.matmul(x, w, recipe="mxfp8") @ w
      >>> found = mx_jax.inspect.explain(layer, x, w, target=target)
      >>> [(row.kind, row.times, row.backend) for row in found.rows]
      [('cast', 1, 'reference'), ('cast', 1, 'reference'), ('product', 1, 'xla_bfloat16'),
       ('high precision', 1, 'jax.lax')]
      >>> found.quantized_share
      0.5
    """
    with contextlib.nullcontext() if target is None else use_target(target):
        of_recipe = isinstance(what, str | MatmulRecipe) or any(what is f for f in NAMED.values())
        if of_recipe or not (callable(what) or _is_linen(what)):
            return _of_recipe(as_recipe(what, "explain"), args, kwargs)
        return _of_function(what, *args, **kwargs)


def _of_recipe(recipe: MatmulRecipe, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    given: dict[str, Any] = dict(zip(_SIZES, args, strict=False)) | kwargs
    sizes: dict[str, Any] = {name: given.get(name) for name in _SIZES}
    # Python counts True and False among whole numbers.
    plain = {
        name: int(x)
        for name, x in sizes.items()
        if isinstance(x, numbers.Integral) and not isinstance(x, bool)
    }
    known = all(name in plain or export.is_symbolic_dim(x) for name, x in sizes.items())
    once = len(given) == len(args) + len(kwargs)
    if not known or not once or not given.keys() <= {*_SIZES, "dtype"}:
        words = [("", x) for x in args] + [(f"{name}=", x) for name, x in kwargs.items()]
        got = (
            f"{name}{type(x).__name__} {list(x.shape)}" if hasattr(x, "shape") else f"{name}{x!r}"
            for name, x in words
        )
        raise TypeError(
            f"explain: a recipe needs the whole sizes of a product [m, k] @ [k, n], and takes a "
            f"dtype, got recipe={recipe.name!r} with ({', '.join(got)}); give them, as in "
            f"explain({recipe.name!r}, 16, 4096, 4096), or explain a function that multiplies with "
            "the recipe, and its arguments"
        )
    if any(size < 0 for size in plain.values()):
        raise ValueError(
            "explain: the sizes of a product [m, k] @ [k, n] must be 0 or more, got "
            f"{', '.join(f'{name}={x}' for name, x in sizes.items())}; an open one "
            "is a dimension of jax.export.symbolic_shape"
        )
    m, k, n = (sizes | plain).values()
    dtype = given.get("dtype", jnp.float32)
    key = jax.random.key(0) if recipe.is_stochastic else None

    def gradients(lhs: jax.Array, rhs: jax.Array) -> Any:
        product, pullback = jax.vjp(lambda x, y: matmul(x, y, recipe=recipe, key=key), lhs, rhs)
        return pullback(product)

    with recording() as recorder:
        jax.eval_shape(gradients, *(jax.ShapeDtypeStruct(x, dtype) for x in ((m, k), (k, n))))
    # In the order of the products; what is in high precision is JAX's own, and no backend is asked.
    selections = iter([x for x in recorder.selections if isinstance(x.call, calls.MatmulCall)])
    lines: list[str] = []
    for name, spec, lhs_shape, rhs_shape in (
        ("output", recipe.fwd, (m, k), (n, k)),
        ("grad_input", recipe.dlhs, (m, n), (k, n)),
        ("grad_weight", recipe.drhs, (n, m), (k, m)),
    ):
        title = f"{name} {list(lhs_shape)} x {list(rhs_shape)}: {spec}"
        if spec.is_high_precision:
            lines.append(f"{title} -> jax.lax.dot_general")
        else:
            lines += _answer(title, next(selections))
    remarks = dict.fromkeys(own for own in recorder.entries if isinstance(own, str))
    return "\n".join([*lines, *remarks])


def explain_call(function: Callable[..., Any], *args: object, **kwargs: object) -> str:
    """Say how each cast and each quantized product of a call will be computed.

    The function is traced as `jit` would, without computing; take a `jax.grad` for the backward
    products. What stays in high precision is JAX's own, and is not listed.

    Args:
      function: what is called, of any kind: a model's `apply`, a train step.
      *args: its arguments; arrays may be `jax.ShapeDtypeStruct`.
      **kwargs: likewise.

    Returns:
      For each call that differs from those before, with its target where that changes: the work
      and the backend that takes it, why no backend before does, and which would if they were named.

    Raises:
      ValueError: whatever the call itself raises.

    Examples:
      >>> import jax.numpy as jnp, mx_jax
      >>> with mx_jax.testing.target("tpu"):
      ...     print(mx_jax.inspect.explain_call(mx_jax.quantize, jnp.ones((8, 64)), "mxfp4"))
      on platform=tpu, num_devices=1
      cast float32 [8, 64] to mxfp4 (floor, nearest) in blocks of 32 along axis -1 -> reference
        not xla: quantizes nothing: XLA fuses the reference's own code
        not cpu_ffi: runs on platform=cpu, got platform=tpu
        not xla_scaled: quantizes nothing: XLA fuses the reference's own code
        not xla_bfloat16: quantizes nothing: XLA fuses the reference's own code
    """
    call, arrays = of_arrays(function, args, kwargs)
    with recording(axes=_sharded_along(arrays)) as recorder:
        jax.eval_shape(call, arrays)
    lines, target = [], None
    for entry in dict.fromkeys(recorder.entries):
        if isinstance(entry, str):
            lines.append(entry)
            continue
        if entry.target != target:
            target = entry.target
            lines.append(machine_text(target))
        lines += _answer(described(entry.call).work, entry)
    return "\n".join(lines)


def _answer(title: str, selection: Selection) -> list[str]:
    how = f" ({selection.how})" if selection.how else ""
    answer = f"{title} -> {selection.backend or 'two casts'}{how}"
    return [answer, *(f"  {reason}" for reason in reasons(selection))]


# Streams that layers draw from; a module takes those that it has.
_STREAMS = ("params", "dropout", "quantize")
_MARK = re.compile(rf"{re.escape(MARK)}(\d+)")
_PRODUCTS = {"dot_general", "conv_general_dilated", "ragged_dot_general", "ragged_dot"}
_PACKAGE = str(Path(__file__).parents[1])
# The caller of the explained function: beyond it no frame asks for a product.
_EXPLAINER = str(Path(__file__).parent)
# Not the user's own code.
_LIBRARIES = re.compile(r"[/\\](jax|jaxlib|flax)[/\\]")
_STDLIB = sysconfig.get_paths()["stdlib"]
# Who decided on a product that mx_jax itself leaves to JAX, by the folder that asks for it.
_DECIDED = {
    "ops": "its recipe keeps both operands in high precision",
    "convert": "no rule converts its layer",
    "nn": "its layer keeps it in high precision",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """Equal casts or products of a function.

    Attributes:
      kind: "product", "ragged product", "cast", "dequantize", "pack", or "high precision" of a
        product that no backend was asked for.
      work: what is computed, in words, with the shapes and axes of the arrays; below `jax.vmap` of
        something jitted those of one lane.
      backend: who computes it; "jax.lax" in high precision.
      times: how often, each step of a scan counted: as the jaxpr has it. XLA may drop some; of
        `flax.linen.scan`, which traces its body once more, gradients show one too many.
      places: where: scopes joined by `/`, such as Flax's layers, and whether for a gradient.
      flops: of one; 0 of casts.
      bytes: read and written by one: codes and scales as stored in bits, values by their dtype.
      why: of high precision: why.
      how: how the backend computes it, where its name does not say.
      selection: the decision: why other backends do not take it, which would if they were named,
        and the measurement it rests on; None in high precision.
    """

    kind: str
    work: str
    backend: str
    times: int
    places: tuple[Place, ...]
    flops: float
    bytes: float
    why: str = ""
    how: str = ""
    selection: Selection | None = None

    @property
    def where(self) -> str:
        names = [f"{x.path or 'the function'}{' (gradient)' * x.backward}" for x in self.places]
        return ", ".join(dict.fromkeys(names))

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why no other backend computes it, what it rests on, and which would take it if named."""
        return (self.why,) if self.selection is None else reasons(self.selection)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explanation:
    """Each cast and product of a function: who computes it, why, and what it costs. Print it.

    Attributes:
      rows: in the order of the trace; products in high precision last.
      remarks: what is done besides, such as weights that are unpacked at every call.
      machine: what selection was asked for.

    Examples:
      >>> import jax, mx_jax
      >>> x, w = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((8, 64), (64, 64)))
      >>> found = mx_jax.inspect.explain(lambda x, w: mx_jax.matmul(x, w, recipe="mxfp8") @ w, x, w)
      >>> [row.kind for row in found.rows], len(found.high), found.quantized_share
      (['cast', 'cast', 'product', 'high precision'], 1, 0.5)
    """

    rows: tuple[Row, ...]
    remarks: tuple[str, ...]
    machine: str

    @property
    def high(self) -> tuple[Row, ...]:
        """The products that stayed in high precision."""
        return tuple(row for row in self.rows if row.selection is None)

    @property
    def quantized_share(self) -> float:
        """The share of all flops of products that is quantized, 0 to 1."""
        flops = sum(row.times * row.flops for row in self.rows)
        high = sum(row.times * row.flops for row in self.high)
        return 1 - high / flops if flops else 0.0

    @property
    def summary(self) -> str:
        """The machine, and how much is quantized."""
        return f"{self.machine}; {100 * self.quantized_share:.3g} % of the flops are quantized"

    def __str__(self) -> str:
        lines = []
        for row in self.rows:
            how = f" ({row.how})" if row.how else ""
            flops = f"{row.flops / 1e6:.4g} Mflop, " if row.flops else ""
            lines.append(f"{row.times} x {row.work} -> {row.backend}{how}")
            lines.append(f"  {flops}{row.bytes / 1e3:.4g} kB; in {row.where}")
            lines += [f"  {reason}" for reason in row.reasons]
        return "\n".join([*lines, *self.remarks, self.summary])

    def __rich__(self) -> Group:
        """A table, and below it the reasons, each once: most rows share theirs."""
        table = Table(title="Casts and products", title_justify="left", box=SIMPLE_HEAD)
        for name in ("where", "what", "times", "backend", "Mflop", "kB", "why"):
            numbers = name in ("times", "Mflop", "kB")
            table.add_column(name, justify="right" if numbers else "left", overflow="fold")
        notes: dict[str, int] = {}
        for row in self.rows:
            texts = (*filter(None, (row.how,)), *row.reasons)
            table.add_row(
                escape(row.where),
                escape(row.work),
                str(row.times),
                row.backend,
                f"{row.flops / 1e6:.4g}" if row.flops else "",
                f"{row.bytes / 1e3:.4g}",
                ", ".join(str(notes.setdefault(text, len(notes) + 1)) for text in texts),
                style=None if row.selection else "dim",
            )
        lines = (*(f"{number}: {text}" for text, number in notes.items()), *self.remarks)
        return Group(table, *map(escape, lines), escape(self.summary))


def reasons(selection: Selection) -> tuple[str, ...]:
    """What a selection rests on, why other backends do not take the call, and which would."""
    own = selection.measured
    proof = () if own is None else (f"{selection.backend}: {own}",)
    rejected = (f"not {name}: {reason}" for name, reason in selection.rejections)
    named = (
        f"{name} takes it if named, by prefer_backends({name!r}): {why}"
        for name, why in selection.on_request
    )
    return (*proof, *rejected, *named)


def machine_text(target: Target) -> str:
    """A machine as selection sees it."""
    capability = target.compute_capability
    shown = "" if capability is None else f", compute_capability={capability}"
    number = target.num_devices if target.counted else f"1 to {target.num_devices}"
    return f"on platform={target.platform}{shown}, num_devices={number}"


class Described(NamedTuple):
    """A call: its kind, its work in words, its flops, and the bytes that it reads and writes."""

    kind: str
    work: str
    flops: float
    bytes: float


def described(call: calls.Call) -> Described:
    """What a call is, with the shapes and axes of its arrays, and what it costs."""
    match call:
        case calls.MatmulCall(lhs=lhs, rhs=rhs):
            left, right = (list(own.axes.contracting) for own in (lhs, rhs))
            batch = math.prod(lhs.shape[axis] for axis in lhs.axes.batch)
            return _product("product", call, f" over axes {left} and {right}", rhs.rows, batch)
        case calls.RaggedCall(rhs=rhs, num_groups=groups):
            # Sums over rows have columns of rhs as they are, in as many groups.
            sizes = (rhs.shape[-1], groups) if call.contracts_rows else (rhs.rows, 1)
            return _product("ragged product", call, f", {groups} groups", *sizes)
        case calls.QuantizeCall():
            how = f"{call.format.name} ({call.scale_rule.name}, {call.rounding.name})"
            blocks = " and ".join(f"{size} along axis {axis}" for axis, size in call.blocks)
            work = f"cast {call.dtype} {list(call.shape)} to {how} in blocks of {blocks}"
            return Described("cast", work, 0.0, _values_and_codes(call))
        case calls.QuantizeBothCall():
            first, second = described(call.first), described(call.second)
            # The values are read once.
            moved = first.bytes + _bytes(call.second.shape, call.second.format)
            return Described("cast", f"{first.work}; with it {second.work}", 0.0, moved)
        case calls.DequantizeCall():
            work = f"dequantize {call.format.name} {list(call.shape)} to {call.dtype}"
            return Described("dequantize", work, 0.0, _values_and_codes(call))
        case calls.CastStatisticsCall():
            work = f"statistics of a cast of {list(call.shape)} to {call.format.name}"
            return Described("statistics", work, 0.0, _values_and_codes(call))
        case calls.PackCall(weights=own):
            work = f"pack {_operand(own)} for axes {list(own.axes.contracting)}"
            return Described("pack", work, 0.0, 2 * _bytes(own.shape, own.format, own.dtype))
        case calls.TransformCall():
            work = f"Hadamard transform of {call.dtype} {list(call.shape)}"
            moved = math.prod(call.shape) * (call.dtype.itemsize + 4.0)
            return Described("transform", work, 0.0, moved)
        case calls.AttendCall():
            matrices, length, features = call.keys
            dtype = call.dtypes[1]
            queries = matrices * call.queries[1] * features
            work = f"attention of {list(call.queries)} over {list(call.keys)}, "
            work += str(dtype) if call.format is None else call.format.name
            moved = _bytes((queries,), dtype=dtype) + _bytes(call.keys, call.format, dtype)
            return Described("attention", work, 4.0 * queries * length, 2 * moved)
        case calls.RandomBitsCall():
            work = f"random bits {list(call.shape)}, {call.text}"
            return Described("random bits", work, 0.0, 4.0 * math.prod(call.shape))


def _operand(own: calls.OperandType) -> str:
    return f"{own.text} {list(own.shape)}"


def _product(
    kind: str, call: calls.MatmulCall | calls.RaggedCall, how: str, columns: int, times: int
) -> Described:
    """A product of lhs and so many columns; bytes are of both operands and of so many results."""
    size = float(times * call.lhs.rows * columns * call.out_dtype.itemsize)
    size += sum(_bytes(own.shape, own.format, own.dtype) for own in (call.lhs, call.rhs))
    work = f"{kind} {_operand(call.lhs)} x {_operand(call.rhs)}{how}, to {call.out_dtype}"
    return Described(kind, work, 2.0 * math.prod(call.lhs.shape) * columns, size)


def _values_and_codes(
    call: calls.QuantizeCall | calls.DequantizeCall | calls.CastStatisticsCall,
) -> float:
    return _bytes(call.shape, dtype=call.dtype) + _bytes(call.shape, call.format)


def _bytes(
    shape: Sequence[int], format: BlockFormat | None = None, dtype: np.dtype | None = None
) -> float:
    """Of codes and their scales, or of values."""
    if format is not None:
        return math.prod(shape) * format.bits_per_element / 8
    return 0.0 if dtype is None else float(math.prod(shape) * dtype.itemsize)


def _sharded_along(arrays: Sequence[Any]) -> tuple[str, ...]:
    """The axes of the mesh that arguments are sharded on; none if a device has all of them."""
    shardings = (getattr(x, "sharding", None) for x in arrays)
    meshes = (own.mesh for own in shardings if isinstance(own, NamedSharding))
    return next((mesh.axis_names for mesh in meshes if mesh.size > 1), ())


def _of_function(
    function: object, *args: object, backward: bool = False, **kwargs: object
) -> Explanation:
    function, args = _with_parameters(function, args, kwargs)
    call, arrays = of_arrays(function, args, kwargs)

    def cotangent(x: jax.Array) -> Any:
        is_float = jnp.issubdtype(jnp.result_type(x), jnp.inexact)
        return jnp.ones_like(x) if is_float else np.zeros(jnp.shape(x), jax.dtypes.float0)

    def with_gradients(arrays: list[Any]) -> Any:
        """The call and its gradients by every float, of cotangents of ones."""
        results, pullback = jax.vjp(call, arrays)
        (gradients,) = pullback(jax.tree.map(cotangent, results))
        return results, [own for own in gradients if own.dtype != jax.dtypes.float0]

    with recording(marks=True, axes=_sharded_along(arrays)) as recorder:
        program = jax.make_jaxpr(with_gradients if backward else call)(arrays)
    # XLA computes nothing that is not used. Flax, for one, traces the body of a scan twice.
    found = sorted(_rows(walk(live(program)), recorder.entries), key=lambda pair: pair[0])
    selections = recorder.selections
    # Rows of the same work are one.
    rows: dict[Row, Row] = {}
    for _, row in found:
        key = dataclasses.replace(row, times=0, places=())
        known = rows.get(key, key)
        places = tuple(dict.fromkeys((*known.places, *row.places)))
        rows[key] = dataclasses.replace(known, times=known.times + row.times, places=places)
    return Explanation(
        rows=tuple(rows.values()),
        remarks=tuple(dict.fromkeys(own for own in recorder.entries if isinstance(own, str))),
        machine=machine_text(selections[0].target if selections else current_target()),
    )


def _is_linen(what: object) -> bool:
    """By what it offers: only the layers of models import Flax."""
    return callable(getattr(what, "init", None)) and callable(getattr(what, "apply", None))


def _with_parameters(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A model as a function of its parameters: so they are no constants, and have gradients."""
    if _is_linen(function):
        rngs = {name: jax.random.key(0) for name in _STREAMS}
        init = functools.partial(function.init, rngs)
        variables = jax.eval_shape(*of_arrays(init, args, kwargs))

        def apply(variables: Mapping[str, Any], *own: object, **named: object) -> Any:
            return function.apply(variables, *own, rngs=rngs, mutable=True, **named)[0]

        return apply, (variables, *args)
    if jax.tree.leaves(function) != [function]:
        # A model that is a pytree, as those of flax.nnx are.
        return lambda model, *own, **named: model(*own, **named), (function, *args)
    return function, args


def _rows(sites: Sequence[Site], entries: Sequence[Selection | str]) -> Iterator[tuple[float, Row]]:
    """What equations compute, each with the index of its entry."""
    # An entry stands for all equations that bear its mark, and for their bodies.
    marked: dict[tuple[Any, ...], Site] = {}
    for site in sites:
        for index in _MARK.findall(name_of(site.eqn)):
            marked.setdefault((site.where[:-1], int(index)), site)
        # Kernels of Pallas are a backend's own.
        inside = any(eqn.primitive.name == "pallas_call" for eqn in site.around)
        if site.eqn.primitive.name in _PRODUCTS and not inside and not _MARK.search(site.scope):
            avals: list[Any] = [x.aval for x in (*site.eqn.invars[:2], *site.eqn.outvars)]
            if all(jnp.issubdtype(x.dtype, jnp.floating) for x in avals):
                yield math.inf, _high(site)
    for (_, index), site in marked.items():
        if isinstance(selection := entries[index], Selection):
            row = Row(
                **described(selection.call)._asdict(),
                backend=selection.backend or "",
                times=site.times,
                places=(_place(site.scope),),
                how=selection.how,
                selection=selection,
            )
            yield index, row


def _place(scope: str) -> Place:
    return place_of(_MARK.sub("", scope))


def _high(site: Site) -> Row:
    """A product that no backend was asked for: by a recipe, a rule, or code that has none."""
    eqn = site.eqn
    operation = eqn.primitive.name
    dimensions: Any = eqn.params.get("dimension_numbers")
    avals: list[Any] = [x.aval for x in (*eqn.invars[:2], eqn.outvars[0])]
    lhs, rhs, out = avals
    # How many products each element of the result sums.
    if operation == "dot_general":
        contracted = math.prod(lhs.shape[axis] for axis in dimensions[0][0])
    elif operation == "conv_general_dilated":
        contracted = math.prod(rhs.shape) // rhs.shape[dimensions.rhs_spec[0]]
    else:
        contracted = lhs.shape[-1]
    why, frame = "no recipe reaches it", _caller(eqn)
    if frame is not None:
        file = Path(frame.file_name)
        where = f"{file.name}:{frame.line_num} ({frame.function_name})"
        if not frame.file_name.startswith(_PACKAGE):
            why = f"no recipe reaches it: {where}"
        elif contracted == 1:
            why = "it contracts nothing: there is nothing to quantize along"
        else:
            folder = file.relative_to(_PACKAGE).parts[0]
            why = _DECIDED.get(folder, f"mx_jax's own, not of a recipe: {where}")
    left, right = (f"{x.dtype} {list(x.shape)}" for x in (lhs, rhs))
    return Row(
        kind="high precision",
        work=f"{operation} {left} x {right}, to {out.dtype}",
        backend="jax.lax",
        times=site.times,
        places=(_place(site.scope),),
        flops=2.0 * math.prod(out.shape) * contracted,
        bytes=sum(_bytes(x.shape, dtype=x.dtype) for x in avals),
        why=why,
    )


def _caller(eqn: JaxprEqn) -> Any:
    """The innermost frame that is no library's, or None if JAX has none."""
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
