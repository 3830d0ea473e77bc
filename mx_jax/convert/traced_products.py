"""Products in a jaxpr, one row each: what rules judge by, and how they are made anew."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core.primitives import conv_general_dilated_p, dot_general_p
from jax.sharding import NamedSharding, PartitionSpec

from mx_jax.convert.operations import ConvOfDotGeneral, conv_obstacle
from mx_jax.ops.arguments import QUANTIZABLE
from mx_jax.ops.ragged_dot import ragged_dot
from mx_jax.recipes import Recipe


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class TracedProduct:
    """How equations of one primitive are judged and made anew.

    Attributes:
      type: what rules know them as.
      facts: from parameters and operands with the kernel on the right, to fields of `Layer`.
      multiply: from recipe, what multiplies by it as `jax.lax.dot_general` does, operands with the
        kernel on the right, parameters and a key or None to the product.
      turned: from operands and parameters to those of the same product with its operands in the
        other order, and what brings its result back; None where the right operand is the kernel.
    """

    type: type
    facts: Callable[..., dict[str, Any]]
    multiply: Callable[..., jax.Array]
    turned: Callable[..., Any] | None = None


def _unfit(dtypes: tuple[Any, ...], params: dict[str, Any]) -> str | None:
    """Why what is multiplied, or the product, has no low precision; None if it has."""
    for dtype in dtypes:
        if jnp.dtype(dtype).name not in QUANTIZABLE:
            return f"operands of dtype={jnp.dtype(dtype).name} are not quantized"
    out = params["preferred_element_type"]
    if out is not None and not jnp.issubdtype(out, jnp.floating):
        return f"a product of dtype={jnp.dtype(out).name} is not quantized"
    return None


def _dot_facts(lhs: Any, rhs: Any, params: dict[str, Any]) -> dict[str, Any]:
    (_, contracting), (_, batch) = params["dimension_numbers"]
    kept = [n for axis, n in enumerate(rhs.shape) if axis not in (*contracting, *batch)]
    shape = (*(rhs.shape[axis] for axis in contracting), math.prod(kept))
    unfit = _unfit((lhs.dtype, rhs.dtype), params)
    return {
        "kernel": tuple(rhs.shape),
        "shape": shape if contracting else None,
        "obstacle": unfit if contracting else "contracts no axis",
    }


def _dot(
    recipe: Recipe, dot_general: Any, values: Any, params: dict[str, Any], key: Any
) -> jax.Array:
    del recipe
    options = dict(params)
    return dot_general(*values, options.pop("dimension_numbers"), **options, key=key)


def turned(lhs: Any, rhs: Any, params: dict[str, Any]) -> tuple[Any, Any, dict[str, Any], Any]:
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


def _ragged_facts(lhs: Any, rhs: Any, sizes: Any, params: dict[str, Any]) -> dict[str, Any]:
    plain = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (1,)), ((), ())),
        lhs_ragged_dimensions=(0,),
        rhs_group_dimensions=(0,),
    )
    numbers = params["ragged_dot_dimension_numbers"]
    obstacle = _unfit((lhs.dtype, rhs.dtype), params)
    if numbers != plain or params["group_offset"] is not None:
        obstacle = "no product of rows in groups, as jax.lax.ragged_dot makes it"
    shape = tuple(rhs.shape)
    return {"kernel": shape, "shape": shape[1:], "obstacle": obstacle}


def _ragged(
    recipe: Recipe, dot_general: Any, values: Any, params: dict[str, Any], key: Any
) -> jax.Array:
    del dot_general
    lhs, rhs, sizes = values
    options = {name: params[name] for name in ("precision", "preferred_element_type")}
    return ragged_dot(lhs, rhs, sizes, recipe=recipe, **options, key=key)


def _conv_facts(lhs: Any, rhs: Any, params: dict[str, Any]) -> dict[str, Any]:
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
    }


def _conv(
    recipe: Recipe, dot_general: Any, values: Any, params: dict[str, Any], key: Any
) -> jax.Array:
    """The product of patches and kernel; channels go last, and back."""
    del recipe
    lhs, rhs = values
    (batch, features, *space), (out, into, *taps), to = params["dimension_numbers"]
    product = ConvOfDotGeneral(dot_general=dot_general)(
        lax.transpose(lhs, (batch, *space, features)),
        lax.transpose(rhs, (*taps, into, out)),
        params["window_strides"],
        params["padding"],
        rhs_dilation=params["rhs_dilation"],
        precision=params["precision"],
        preferred_element_type=params["preferred_element_type"],
        key=key,
    )
    # `to` has the axes of batch, features and space in the result.
    axes = (to[0], *to[2:], to[1])
    return lax.transpose(product, [axes.index(axis) for axis in range(len(axes))])


@functools.cache
def traced_products() -> dict[Any, TracedProduct]:
    """The rows, by primitive."""
    return {
        dot_general_p: TracedProduct(
            type=DotGeneral, facts=_dot_facts, multiply=_dot, turned=turned
        ),
        conv_general_dilated_p: TracedProduct(type=Conv, facts=_conv_facts, multiply=_conv),
        _ragged_primitive(): TracedProduct(type=RaggedDot, facts=_ragged_facts, multiply=_ragged),
    }


def _ragged_primitive() -> Any:
    """What `jax.lax.ragged_dot` traces to: `jax.extend` does not give it."""
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, 1), (1, 1, 1))]
    sizes = jax.ShapeDtypeStruct((1,), jnp.int32)
    return jax.make_jaxpr(lax.ragged_dot)(*shapes, sizes).eqns[-1].primitive
