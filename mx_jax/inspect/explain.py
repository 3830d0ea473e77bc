"""What `explain` says of a call: which backend takes each cast and product, and why.

The jaxpr says what is computed, where and how often; `select`, who computes it.
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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.extend.core import JaxprEqn
from jax.sharding import NamedSharding

from mx_jax.backends import calls
from mx_jax.backends.primitive import Work
from mx_jax.backends.select import Choice, on_request
from mx_jax.backends.target import Target, current_target, use_target
from mx_jax.inspect.records import Place, place_of
from mx_jax.jaxpr.read import Site, live, of_arrays, parted, walk
from mx_jax.ops.arguments import NAMED, as_recipe
from mx_jax.ops.dot_general import matmul
from mx_jax.sharding.movement import reduced_in
from mx_jax.specs import MatmulRecipe

_SIZES = ("m", "k", "n")


def explain(
    what: object, /, *args: Any, target: Target | None = None, **kwargs: Any
) -> "Explanation":
    """Say how the products of a recipe, or all casts and products of a function, are computed.

    The first form explains `[m, k] @ [k, n]` with a recipe, and both gradients. The second one
    traces a function, as `jit` would, without computing: who casts and multiplies what, where, how
    often and at what cost, and which products stay in high precision, and why.

    Args:
      what: a recipe or the name of one; or a function, a flax.nnx model, or a flax.linen module,
        which is initialized abstractly.
      *args: of a recipe `m`, `k` and `n`: rows of the left operand, contracting size, columns of
        the right one. Of a function its arguments; arrays may be `jax.ShapeDtypeStruct`, and say by
        their shardings how many devices the program has; a mesh in context does, too.
      target: the machine; default: the one that a call here is for, as `testing.target`,
        `jax.default_device` or jax itself says.
      **kwargs: of a recipe `dtype` of operands and products, float32 by default. Of a function its
        keyword arguments, and `backward`: whether to take the gradients by all its floats, and by
        a model's parameters, too.

    Returns:
      An `Explanation`: print it, or ask for its `rows`.

    Raises:
      ValueError: whatever the call itself raises.
      TypeError: neither a recipe nor a function, or a recipe without its three sizes, whole ones.

    Examples:
      >>> import jax, mx_jax
      >>> from mx_jax.backends.target import Target
      >>> recipe = mx_jax.recipes.weight_only("mxfp4")
      >>> target = Target(platform="rocm")
      >>> print(mx_jax.inspect.explain(recipe, 8, 64, 64, dtype="bfloat16", target=target))
      1 x cast bfloat16 [64, 64] to mxfp4 (even, nearest) in blocks of 32 along axis -2 -> reference
        in output/rhs.mxfp4.even.axis-2
      ...
      1 x product bfloat16 [8, 64] x mxfp4 [64, 64] over axes [1] and [0], to bfloat16 ->
          xla_bfloat16 (XLA bfloat16 dot, float32 sums)
        0.06554 Mflop; in output
        not xla: needs two operands in 8 bits, got lhs in high precision
        not cpu_ffi: runs on platform=cpu, got platform=rocm
        not xla_scaled: XLA has this product on platform=cuda, got platform=rocm
        not pallas_tpu: needs platform=tpu, got platform=rocm
      ...
      on platform=rocm, num_devices=1; 33.3 % of the flops are quantized

      >>> x, w = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((8, 64), (64, 64)))
      >>> def layer(x, w):
      ...     return mx_jax.matmul(x, w, recipe="mxfp8") @ w
      >>> result = mx_jax.inspect.explain(layer, x, w, target=target)
      >>> [(row.kind, row.times, row.backend) for row in result.rows]
      [('cast', 1, 'reference'), ('cast', 1, 'reference'), ('product', 1, 'xla_bfloat16'),
       ('high precision', 1, 'jax.lax')]
      >>> result.quantized_share
      0.5
    """
    with contextlib.nullcontext() if target is None else use_target(target):
        of_recipe = isinstance(what, str | MatmulRecipe) or any(what is f for f in NAMED.values())
        if of_recipe or not (callable(what) or _is_linen(what)):
            return _of_recipe(as_recipe(what, "explain"), args, kwargs)
        return _of_function(what, *args, **kwargs)


def _of_recipe(
    recipe: MatmulRecipe, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> "Explanation":
    options: dict[str, Any] = dict(zip(_SIZES, args, strict=False)) | kwargs
    once = len(options) == len(args) + len(kwargs)
    dtype = options.pop("dtype", jnp.float32)
    if not once or options.keys() != {*_SIZES} or not all(map(_is_size, options.values())):
        words = [("", x) for x in args] + [(f"{name}=", x) for name, x in kwargs.items()]
        shown = (f"{name}{getattr(x, 'shape', x)!r}" for name, x in words)
        raise TypeError(
            "explain: a recipe needs the sizes of a product [m, k] @ [k, n], whole, 0 or more, and "
            f"takes a dtype, got recipe={recipe.name!r} with ({', '.join(shown)}); give them, as "
            f"in explain({recipe.name!r}, 16, 4096, 4096), or explain a function that multiplies "
            "with the recipe, and its arguments"
        )
    m, k, n = (options[name] for name in _SIZES)
    key = jax.random.key(0) if recipe.is_stochastic else None
    operands = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((m, k), (k, n)))
    product = functools.partial(matmul, recipe=recipe, key=key)
    return _of_function(product, *operands, backward=True)


def _is_size(x: Any) -> bool:
    # Python counts True and False among whole numbers.
    if export.is_symbolic_dim(x):
        return True
    return isinstance(x, numbers.Integral) and not isinstance(x, bool) and int(x) >= 0


# Streams that layers draw from; a module takes those that it has.
_STREAMS = ("params", "dropout", "quantize")
_PRODUCTS = {"dot_general", "conv_general_dilated", "ragged_dot_general", "ragged_dot"}
_PACKAGE = str(Path(__file__).parents[1])
# The caller of the explained function: frames around it multiply nothing.
_EXPLAINER = str(Path(__file__).parent)
# Frames of libraries, not of the user.
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
      kind: "product", "ragged product", "cast", "dequantize", "transform", "attention",
        or "high precision" of a product of `jax.lax`.
      work: what is computed, in words, with the shapes and axes of the arrays; below `jax.vmap`
        those of one lane.
      backend: who computes it; "jax.lax" in high precision.
      times: how often, each lane of a `vmap` and each step of a scan counted: as the jaxpr has it.
        XLA may drop some; of `flax.linen.scan`, which traces its body once more, gradients show one
        too many.
      places: where: scopes joined by `/`, such as Flax's layers, and whether for a gradient.
      flops: of one execution; 0 for casts and symbolic sizes.
      how: how the backend computes it, where its name does not say.
      reasons: the measurement it rests on, why other backends do not take it, and which would if
        they were named; or why it is in high precision.
    """

    kind: str
    work: str
    backend: str
    times: int
    places: tuple[Place, ...]
    flops: float
    how: str = ""
    reasons: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        names = [f"{x.path or 'the function'}{' (gradient)' * x.backward}" for x in self.places]
        return ", ".join(dict.fromkeys(names))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explanation:
    """Each cast and product of a function: who computes it, why, and what it costs. Print it.

    Attributes:
      rows: in the order of the trace; products in high precision last.
      machine: the platform and number of devices, as selection sees them.

    Examples:
      >>> import jax, mx_jax
      >>> x, w = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((8, 64), (64, 64)))
      >>> shown = mx_jax.inspect.explain(lambda x, w: mx_jax.matmul(x, w, recipe="mxfp8") @ w, x, w)
      >>> [row.kind for row in shown.rows], len(shown.high), shown.quantized_share
      (['cast', 'cast', 'product', 'high precision'], 1, 0.5)
    """

    rows: tuple[Row, ...]
    machine: str

    @property
    def high(self) -> tuple[Row, ...]:
        """The products that stayed in high precision."""
        return tuple(row for row in self.rows if row.kind == "high precision")

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
            flops = f"{row.flops / 1e6:.4g} Mflop; " if row.flops else ""
            lines.append(f"{row.times} x {row.work} -> {row.backend}{how}")
            lines.append(f"  {flops}in {row.where}")
            lines += [f"  {reason}" for reason in row.reasons]
        return "\n".join([*lines, self.summary])


def _reasons(call: calls.Call, target: Target, choice: Choice) -> tuple[str, ...]:
    """What a choice rests on, why other backends do not take the call, and which would."""
    proof = () if choice.measured is None else (f"{choice.backend.name}: {choice.measured}",)
    names: dict[str, list[str]] = {}
    for name, reason in choice.rejections:
        names.setdefault(reason, []).append(name)
    rejected = (f"not {', '.join(backends)}: {reason}" for reason, backends in names.items())
    named = (
        f"{name} takes it if named, by prefer_backends({name!r}): {why}"
        for name, why in on_request(call, target)
    )
    return (*proof, *rejected, *named)


def _machine(target: Target) -> str:
    """A machine as selection sees it."""
    capability = target.compute_capability
    shown = "" if capability is None else f", compute_capability={capability}"
    split = f", num_devices={target.num_devices}"
    if target.num_devices > 1 and target.unsplit:
        split += f", whose parts are XLA's: {target.unsplit}"
    return f"on platform={target.platform}{shown}{split}"


def _described(call: calls.Call) -> tuple[str, str, float]:
    """Its kind, its work in words, and its flops."""
    match call:
        case calls.MatmulCall(lhs=lhs, rhs=rhs):
            left, right = (list(operand.axes.contracting) for operand in (lhs, rhs))
            how = f" over axes {left} and {right}, to {call.out_dtype}"
            if call.reduce_dtype is not None:
                how += f", added up in {reduced_in(call.out_dtype, call.reduce_dtype)}"
            return _product("product", call, how, rhs.rows)
        case calls.RaggedCall(rhs=rhs, num_groups=groups):
            # Sums over rows have columns of rhs as they are, in as many groups.
            columns = rhs.shape[-1] if call.contracts_rows else rhs.rows
            how = f", {groups} groups, to {call.out_dtype}"
            return _product("ragged product", call, how, columns)
        case calls.QuantizeCall():
            how = f"{call.format.name} ({call.scale_rule.name}, {call.rounding.name})"
            blocks = " and ".join(f"{size} along axis {axis}" for axis, size in call.blocks)
            return (
                "cast",
                f"cast {_array(call.dtype, call.shape)} to {how} in blocks of {blocks}",
                0.0,
            )
        case calls.QuantizeBothCall():
            first, second = (_described(cast)[1] for cast in (call.first, call.second))
            return "cast", f"{first}; with it {second}", 0.0
        case calls.DequantizeCall():
            work = f"dequantize {call.format.name} {list(call.shape)} to {call.dtype}"
            return "dequantize", work, 0.0
        case calls.TransformCall():
            return "transform", f"Hadamard transform of {_array(call.dtype, call.shape)}", 0.0
        case calls.AttendCall():
            matrices, length, features = call.keys
            kind = call.dtypes[1] if call.format is None else call.format.name
            work = f"attention of {list(call.queries)} over {list(call.keys)}, {kind}"
            return "attention", work, 4.0 * matrices * call.queries[1] * features * length
    raise AssertionError(f"no equation is read for {call}")


def _array(dtype: np.dtype, shape: Sequence[int]) -> str:
    return f"{dtype} {list(shape)}"


def _product(
    kind: str, call: calls.MatmulCall | calls.RaggedCall, how: str, columns: int
) -> tuple[str, str, float]:
    """A product of lhs and so many columns."""
    lhs, rhs = (f"{operand.text} {list(operand.shape)}" for operand in (call.lhs, call.rhs))
    return kind, f"{kind} {lhs} x {rhs}{how}", 2.0 * _count((*call.lhs.shape, columns))


def _count(shape: Sequence[int]) -> float:
    """Number of elements; 0 if a size is symbolic."""
    is_known = all(isinstance(size, int) for size in shape)
    return float(math.prod(shape)) if is_known else 0.0


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
        return results, [gradient for gradient in gradients if gradient.dtype != jax.dtypes.float0]

    with parted(True):
        program = jax.make_jaxpr(with_gradients if backward else call)(arrays)
    # XLA computes nothing that is not used. Flax, for one, traces the body of a scan twice.
    sites = walk(live(program))
    rows: dict[Row, Row] = {}
    shardings = (getattr(x, "sharding", None) for x in arrays)
    meshes = [sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)]
    num_devices = max((mesh.size for mesh in meshes), default=1)  # as far as arguments say
    selected = [pair for site in sites for pair in _selected(site, num_devices)]
    for row in (*(row for row, _ in selected), *filter(None, map(_high, sites))):
        # Rows of the same work are one.
        key = dataclasses.replace(row, times=0, places=())
        known = rows.get(key, key)
        places = tuple(dict.fromkeys((*known.places, *row.places)))
        rows[key] = dataclasses.replace(known, times=known.times + row.times, places=places)
    target = selected[0][1] if selected else current_target()
    return Explanation(rows=tuple(rows.values()), machine=_machine(target))


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

        def apply(variables: Mapping[str, Any], *arguments: object, **keywords: object) -> Any:
            return function.apply(variables, *arguments, rngs=rngs, mutable=True, **keywords)[0]

        return apply, (variables, *args)
    if jax.tree.leaves(function) != [function]:
        # A model that is a pytree, as those of flax.nnx are.
        return lambda model, *arguments, **keywords: model(*arguments, **keywords), (
            function,
            *args,
        )
    return function, args


def _selected(site: Site, num_devices: int) -> Iterator[tuple[Row, Target]]:
    """What an equation asks backends for, each with its machine."""
    work = site.eqn.params.get("work")
    # What is drawn, and what a capture counts, is a part of a cast.
    unlisted = calls.RandomBitsCall | calls.CastStatisticsCall
    if not isinstance(work, Work) or isinstance(work.call, unlisted):
        return
    lanes = math.prod(size for size, _ in work.batches)
    for call, target, choice in work.answers(num_devices):
        with dataclasses.replace(work.context, target=target).restore():
            reasons = _reasons(call, target, choice)
        kind, text, flops = _described(call)
        row = Row(
            kind=kind,
            work=text,
            flops=flops,
            backend=choice.backend.name,
            times=site.times * lanes,
            places=(place_of(site.scope),),
            how=choice.label,
            reasons=reasons,
        )
        yield row, target


def _high(site: Site) -> Row | None:
    """A product of `jax.lax`, or None: a recipe, a rule or code without one leaves it there."""
    eqn, operation = site.eqn, site.eqn.primitive.name
    # Kernels of Pallas multiply for themselves.
    if operation not in _PRODUCTS or any(x.primitive.name == "pallas_call" for x in site.around):
        return None
    avals: list[Any] = [x.aval for x in (*eqn.invars[:2], eqn.outvars[0])]
    if not all(jnp.issubdtype(x.dtype, jnp.floating) for x in avals):
        return None
    dimensions: Any = eqn.params.get("dimension_numbers")
    lhs, rhs, out = avals
    left, right = (_array(x.dtype, x.shape) for x in (lhs, rhs))
    # How many products each element of the result sums.
    if operation == "dot_general":
        contracted = math.prod(lhs.shape[axis] for axis in dimensions[0][0])
    elif operation == "conv_general_dilated":
        contracted = math.prod(rhs.shape) // rhs.shape[dimensions.rhs_spec[0]]
    else:
        contracted = lhs.shape[-1]
    return Row(
        kind="high precision",
        work=f"{operation} {left} x {right}, to {out.dtype}",
        backend="jax.lax",
        times=site.times,
        places=(place_of(site.scope),),
        flops=2.0 * _count((*out.shape, contracted)),
        reasons=(_why_high(eqn, contracted == 1),),
    )


def _why_high(eqn: JaxprEqn, contracts_nothing: bool) -> str:
    """Why a product is in high precision, by who asks for it."""
    if (frame := _caller(eqn)) is None:
        return "no recipe reaches it"
    file = Path(frame.file_name)
    where = f"{file.name}:{frame.line_num} ({frame.function_name})"
    if not frame.file_name.startswith(_PACKAGE):
        return f"no recipe reaches it: {where}"
    if contracts_nothing:
        return "it contracts nothing: there is nothing to quantize along"
    folder = file.relative_to(_PACKAGE).parts[0]
    return _DECIDED.get(folder, f"mx_jax's own, not of a recipe: {where}")


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
