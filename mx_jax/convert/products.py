"""Products that conversion makes: a row for each primitive says what rules judge its equations by,
and how they are made anew (`jaxpr.py`).
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import JaxprEqn
from jax.extend.core.primitives import conv_general_dilated_p, dot_general_p, jit_p
from jax.lax import DotDimensionNumbers
from jax.sharding import NamedSharding, PartitionSpec

from mx_jax.axes import Axes
from mx_jax.convert.rules import Shape
from mx_jax.jaxpr.read import equations
from mx_jax.nn import linen as mx_linen
from mx_jax.nn import nnx as mx_nnx
from mx_jax.ops.arguments import QUANTIZABLE, Key
from mx_jax.ops.quantize import cast
from mx_jax.ops.ragged_dot import ragged_dot
from mx_jax.packed import Quantized, rows_of
from mx_jax.recipes import OperandSpec, Recipe
from mx_jax.reference.quantize import find_row_scales


class DotGeneral:
    """The type that rules see of a `jax.lax.dot_general`: matmul, einsum, `@`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from mx_jax import convert
      >>> layer = lambda w, x: jnp.tanh(x @ w)
      >>> rule = convert.Rule(".*", "mxfp8", types=convert.DotGeneral)
      >>> print(convert.report(layer, rule, jnp.ones((64, 8)), jnp.ones((2, 64))))
      layer  type        kernel        rule  recipe
      .      DotGeneral  2x64 by 64x8  0     mxfp8
      1 of 1 layers converted
    """


class RaggedDot:
    """The type that rules see of a `jax.lax.ragged_dot`.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from mx_jax import convert
      >>> def experts(w, x):
      ...     return jax.lax.ragged_dot(x, w, jnp.array([1, 3]))
      >>> w, x = jnp.ones((2, 64, 8)), jnp.ones((4, 64))
      >>> print(convert.report(experts, convert.Rule(".*", "mxfp4", types=convert.RaggedDot), w, x))
      layer  type       kernel          rule  recipe
      .      RaggedDot  4x64 by 2x64x8  0     mxfp4
      1 of 1 layers converted
    """


class Conv:
    """The type that rules see of a `jax.lax.conv_general_dilated`.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from mx_jax import convert
      >>> layer = lambda kernel, x: jax.lax.conv(x, kernel, (1,), "SAME")
      >>> kernel, x = jnp.ones((8, 32, 3)), jnp.ones((1, 32, 10))
      >>> print(convert.report(layer, convert.Rule(".*", "mxfp8", types=convert.Conv), kernel, x))
      layer  type  kernel             rule  recipe
      .      Conv  1x32x10 by 8x32x3  0     mxfp8
      1 of 1 layers converted
    """


class Lookup:
    """The type that rules see of rows taken from a table, as an embedding takes them."""


EMBEDDINGS = (nn.Embed, nnx.Embed)
# They are trained beside what rules quantize.
ADAPTERS = (nnx.LoRA,)
# Products as modules, each with its recipe.
OPERATIONS = (mx_linen.Operation, mx_nnx.Operation)
# Flax's attentions, and what rules call the two products of each, by the scopes that they stand in.
ATTENTIONS = (nn.MultiHeadDotProductAttention, nnx.MultiHeadAttention)
ATTENTION_PRODUCTS = {
    "...qhd,...khd->...hqk": "qk",
    "...qhgd,...kh1d->...hgqk": "qk",
    "BTNH,BSNH->BNTS": "qk",
    "...hqk,...khd->...qhd": "av",
    "...hgqk,...kh1d->...qhgd": "av",
    "BNTS,BSNH->BTNH": "av",
}

# What layers multiply with, unless a user put something else there, which then stays.
_DEFAULTS: dict[str, tuple[Any, ...]] = {
    "dot_general": (None, lax.dot_general),
    "conv_general_dilated": (None, lax.conv_general_dilated),
    "einsum_op": (jnp.einsum,),
}


def brings_recipe(layer: object) -> str | None:
    """Why a layer keeps its products, if it has a recipe."""
    # Past the attributes that nnx.bridge.ToLinen has of what is in it, by a call.
    has_recipe = isinstance(inspect.getattr_static(layer, "recipe", None), Recipe)
    return "has its own recipe" if has_recipe else None


def users_choice(layer: object) -> str | None:
    """Why a layer keeps its products, as its user chose; None if nothing was chosen."""
    # First: a property of our own layers draws a key when it is read.
    if obstacle := brings_recipe(layer):
        return obstacle
    fields = layer.__dataclass_fields__ if isinstance(layer, nn.Module) else vars(layer)
    attribute = next((name for name in _DEFAULTS if name in fields), None)
    if attribute is None:
        return None
    if getattr(layer, f"{attribute}_cls", None) is not None:
        return f"has its own {attribute}_cls"
    value = getattr(layer, attribute)
    is_default = any(value is default for default in _DEFAULTS[attribute])
    return None if is_default else f"has its own {attribute}"


Values = Sequence[jax.Array]
Params = dict[str, Any]
DotGeneralFn = Callable[..., jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TracedProduct:
    """How equations of one primitive are judged and made anew; operands have the kernel right."""

    # What rules know them as.
    type: type
    # From operands and parameters to fields of `Layer`.
    facts: Callable[..., dict[str, Any]]
    # From recipe, what multiplies by it as `jax.lax.dot_general` does, operands, parameters and a
    # key or None to the product.
    multiply: Callable[..., jax.Array]
    # From operands and parameters to those of the same product with its operands in the other
    # order, and what brings its result back; None where the right operand is the kernel.
    swapped: Callable[..., Any] | None = None


def _unfit(dtypes: tuple[Any, ...], params: dict[str, Any]) -> str | None:
    """Why what is multiplied, or the product, has no low precision; None if it has."""
    for dtype in dtypes:
        if jnp.dtype(dtype).name not in QUANTIZABLE:
            return f"operands of dtype={jnp.dtype(dtype).name} are not quantized"
    out = params["preferred_element_type"]
    if out is not None and not jnp.issubdtype(out, jnp.floating):
        return f"a product of dtype={jnp.dtype(out).name} is not quantized"
    return None


def _kernel_axes(numbers: DotDimensionNumbers, ndim: int) -> Axes | None:
    """A right operand's axes in a dot_general; None if nothing is contracted."""
    (_, contracting), (_, batch) = numbers
    kept = (axis for axis in range(ndim) if axis not in (*contracting, *batch))
    return Axes(tuple(batch), tuple(kept), tuple(contracting)) if contracting else None


def shape_in_product(axes: Axes | None, kernel: tuple[int, ...]) -> Shape:
    """A kernel as filters see it; None if nothing is contracted: nothing to lay blocks along."""
    if axes is None:
        return None
    _, kept, contracting = axes.sizes(kernel)
    return (*contracting, math.prod(kept))


def _dot_facts(lhs: ShapedArray, rhs: ShapedArray, params: dict[str, Any]) -> dict[str, Any]:
    axes = _kernel_axes(params["dimension_numbers"], rhs.ndim)
    shape = shape_in_product(axes, rhs.shape)
    obstacle = _unfit((lhs.dtype, rhs.dtype), params) if shape else "contracts no axis"
    return {"kernel": tuple(rhs.shape), "shape": shape, "obstacle": obstacle, "axes": axes}


def _swapped(
    lhs: jax.Array | ShapedArray, rhs: jax.Array | ShapedArray, params: dict[str, Any]
) -> tuple[Any, Any, dict[str, Any], Any]:
    """A dot_general with its operands in the other order, and what brings its result back."""
    contracting, batch = params["dimension_numbers"]
    start, rank = len(batch[0]), lhs.ndim + rhs.ndim - len(batch[0]) - 2 * len(contracting[0])
    kept_right = rhs.ndim - len(batch[1]) - len(contracting[1])
    # [batch, kept of rhs, kept of lhs] to [batch, kept of lhs, kept of rhs].
    front = range(start, start + kept_right)
    order = (*range(start), *(axis for axis in range(start, rank) if axis not in front), *front)
    params = params | {"dimension_numbers": (contracting[::-1], batch[::-1])}
    out = params.get("out_sharding")
    if isinstance(out, NamedSharding):
        parts = [*out.spec, *[None] * (rank - len(out.spec))]
        spec = [parts[order.index(axis)] for axis in range(rank)]
        params["out_sharding"] = NamedSharding(out.mesh, PartitionSpec(*spec))
    return rhs, lhs, params, lambda product: lax.transpose(product, order)


def conv_obstacle(
    feature_group_count: int, input_dilation: int | Sequence[int] | None
) -> str | None:
    """Why a convolution is no product of patches and kernel, or None."""
    if feature_group_count != 1:
        return f"feature_group_count={feature_group_count}: each group contracts other features"
    dilation = (input_dilation,) if isinstance(input_dilation, int) else input_dilation or ()
    if any(step != 1 for step in dilation):
        return f"input_dilation={input_dilation}: a transposed convolution"
    return None


def _conv_facts(lhs: ShapedArray, rhs: ShapedArray, params: dict[str, Any]) -> dict[str, Any]:
    out, into, *space = params["dimension_numbers"].rhs_spec
    taps = math.prod(rhs.shape[axis] for axis in space)
    obstacle = conv_obstacle(params["feature_group_count"], params["lhs_dilation"])
    if params["batch_group_count"] != 1:
        obstacle = f"batch_group_count={params['batch_group_count']}: a gradient of a convolution"
    return {
        "kernel": tuple(rhs.shape),
        "shape": (taps, rhs.shape[into], rhs.shape[out]),
        "named_only": True,
        "obstacle": obstacle or _unfit((lhs.dtype, rhs.dtype), params),
        "axes": Axes.ordered(contracting=rhs.ndim - 1, k_first=True),
    }


def _conv(_: Recipe, dot_general: DotGeneralFn, values: Values, params: Params, key: Key) -> Any:
    """The product of patches and kernel, whose blocks run along the input features of one tap."""
    lhs, rhs = values
    # Features go last, and back: `[batch, *space, in]` by `[*taps, in, out]`.
    (batch, features, *space), (out, into, *taps), to = params["dimension_numbers"]
    order = (*taps, into, out)
    # What is packed stays as it lies.
    kernel = rhs if order == tuple(range(rhs.ndim)) else rhs.transpose(order)
    patches = _patches(
        lax.transpose(lhs, (batch, *space, features)),
        kernel.shape[:-2],
        params["window_strides"],
        params["padding"],
        params["rhs_dilation"],
    )
    if isinstance(kernel, Quantized):
        # What is stored keeps its layout, packed for all of its taps.
        patches = patches.reshape(*patches.shape[:-2], *kernel.shape[:-2], patches.shape[-1])
    else:
        kernel = kernel.reshape(-1, *kernel.shape[-2:])
    count = kernel.ndim - 1
    product = dot_general(
        patches,
        kernel,
        ((tuple(range(patches.ndim - count, patches.ndim)), tuple(range(count))), ((), ())),
        params["precision"],
        preferred_element_type=params["preferred_element_type"],
        key=key,
    )
    # `to` has the axes of batch, features and space in the result.
    axes = (to[0], *to[2:], to[1])
    return lax.transpose(product, [axes.index(axis) for axis in range(len(axes))])


def _patches(
    x: jax.Array,
    window: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: Sequence[int],
) -> jax.Array:
    """`[batch, *space, features]` as `[batch, *out_space, taps, features]`."""
    # If strides are the kernel's size (patch embeddings, 1 x 1), the input is only rearranged; any
    # others repeat it, up to once a tap.
    spans = [(size - 1) * step + 1 for size, step in zip(window, dilation, strict=True)]
    # lax takes negative padding, which cuts.
    edges = ((0, 0, 0), *((int(low), int(high), 0) for low, high in padding), (0, 0, 0))
    x = lax.pad(x, jnp.zeros((), x.dtype), edges)
    if tuple(window) == tuple(strides) and tuple(spans) == tuple(window):
        # They do not overlap: a reshape and a transpose instead of copies.
        batch, *space, features = x.shape
        counts = [size // step for size, step in zip(space, window, strict=True)]
        # A remainder that no window covers is not read.
        x = x[:, *(slice(count * step) for count, step in zip(counts, window, strict=True))]
        split = [size for pair in zip(counts, window, strict=True) for size in pair]
        n = len(window)
        order = (0, *range(1, 2 * n, 2), *range(2, 2 * n + 1, 2), 2 * n + 1)
        tiles = x.reshape(batch, *split, features).transpose(order)
        return tiles.reshape(batch, *counts, math.prod(window), features)
    sizes = [
        max((size - span) // stride + 1, 0)
        for size, span, stride in zip(x.shape[1:-1], spans, strides, strict=True)
    ]
    if 0 in sizes:  # cut below the kernel: no patch at all
        return jnp.zeros((x.shape[0], *sizes, math.prod(window), x.shape[-1]), x.dtype)
    taps = []
    for tap in np.ndindex(*window):
        starts = [index * step for index, step in zip(tap, dilation, strict=True)]
        cuts = [
            slice(start, start + (size - 1) * stride + 1, stride)
            for start, size, stride in zip(starts, sizes, strides, strict=True)
        ]
        taps.append(x[:, *cuts])
    return jnp.stack(taps, axis=-2)


def _cast_table(table: jax.Array | Quantized, recipe: Recipe, key: Key) -> Any:
    """An embedding's table `[entries, features]` as the recipe's products see a weight."""
    # Blocks run along the features: what is looked up and what is attended to have the same values.
    spec: OperandSpec | None = recipe.output.rhs
    if spec is None or isinstance(table, Quantized):
        return table
    table = table if spec.prescale == 1.0 else table * spec.prescale
    tensor_scale = None
    if spec.tensor_scale == "row":
        axes, largest = Axes.ordered(), spec.scale_rule.largest_value(spec.format)
        tensor_scale = find_row_scales(table, axes, axes.blocks(spec.format), largest)
    values = cast(
        table,
        spec.format,
        axis=-1,
        scale_rule=spec.scale_rule,
        rounding=spec.rounding,
        key=key if spec.random_bits else None,
        tensor_scale=tensor_scale,
    )
    return values if spec.prescale == 1.0 else values / spec.prescale


def _look_up(recipe: Recipe, _: object, values: Values, params: Params, key: Key) -> Any:
    """Rows of the quantized table; of codes, only these rows are decoded."""
    table, indices = values
    if isinstance(table, Quantized) and table.ndim == 2:
        return rows_of(table, indices).dequantize(table.dtype)
    if isinstance(table, Quantized):
        # Of a stack, below vmap.
        return jit_p.bind(table.dequantize(), indices, **params)[0]
    return jit_p.bind(_cast_table(table, recipe, key), indices, **params)[0]


def row_of(eqn: JaxprEqn) -> "TracedProduct | None":
    """How an equation is judged and made anew, if it is a product."""
    if eqn.primitive is jit_p and eqn.params["name"] == "_take" and len(eqn.invars) == 2:
        table: Any = eqn.invars[0].aval
        shape = tuple(table.shape)[-2:]
        facts = {"kernel": shape, "shape": shape[::-1], "obstacle": None}
        return TracedProduct(type=Lookup, facts=lambda *_: facts, multiply=_look_up)
    return traced_products().get(eqn.primitive)


@functools.cache
def traced_products() -> dict[Any, TracedProduct]:
    """The rows, by primitive."""
    # `jax.extend` does not give what `jax.lax.ragged_dot` traces to.
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, 1), (1, 1, 1))]
    sizes = jax.ShapeDtypeStruct((1,), jnp.int32)
    plain = equations(jax.make_jaxpr(lax.ragged_dot)(*shapes, sizes))[-1]

    def dot(_: Recipe, dot_general: DotGeneralFn, values: Values, params: Params, key: Key) -> Any:
        options = dict(params)
        return dot_general(*values, options.pop("dimension_numbers"), **options, key=key)

    def ragged_facts(lhs: ShapedArray, rhs: ShapedArray, _: object, params: Params) -> Any:
        obstacle = _unfit((lhs.dtype, rhs.dtype), params)
        special = ("ragged_dot_dimension_numbers", "group_offset")
        if any(params[name] != plain.params[name] for name in special):
            obstacle = "no product of rows in groups, as jax.lax.ragged_dot makes it"
        shape = tuple(rhs.shape)
        return {"kernel": shape, "shape": shape[1:], "obstacle": obstacle}

    def ragged(recipe: Recipe, _: object, values: Values, params: Params, key: Key) -> Any:
        options = {name: params[name] for name in ("precision", "preferred_element_type")}
        return ragged_dot(*values, recipe=recipe, **options, key=key)

    return {
        dot_general_p: TracedProduct(
            type=DotGeneral, facts=_dot_facts, multiply=dot, swapped=_swapped
        ),
        conv_general_dilated_p: TracedProduct(type=Conv, facts=_conv_facts, multiply=_conv),
        plain.primitive: TracedProduct(type=RaggedDot, facts=ragged_facts, multiply=ragged),
    }
