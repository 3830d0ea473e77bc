"""Handlers where a program has one CPU device, and plain JAX everywhere else.

A traced function does not know the devices of its arguments, but JAX knows those of a program as it
lowers it. So where several devices exist and no mesh is in context, both ways are traced, and one
is lowered: on unsharded arrays the handlers', as on a machine with one device.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.core import Tracer
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from mx_jax.backends.cpu_ffi.handler import alone

# A function as a jaxpr. JAX's own type is hidden from type checkers.
ClosedJaxpr = Any

# What takes a handler or plain JAX, as `lax.platform_dependent` does, which stands where this is
# None. Part of jit's cache key.
dispatch = jax.make_user_context(default_value=None)


def deciding_at_lowering(run: Callable[..., Any], *operands: Any) -> Any:
    """What an offer runs, where only lowering tells whether the program has one device."""
    with dispatch(by_devices):
        return run(*operands)


def by_devices(*operands: Any, cpu: Callable[..., Any], default: Callable[..., Any]) -> Any:
    """`cpu(*operands)` on one CPU device, `default(*operands)` on anything else.

    Neither closes over arrays.
    """
    leaves, tree = jax.tree.flatten(operands)
    if not any(isinstance(leaf, Tracer) for leaf in leaves):
        # Outside jit JAX computes where the arrays are.
        with dispatch(None):
            if len(_committed_devices(leaves)) > 1:
                return default(*operands)
            return lax.platform_dependent(*operands, cpu=cpu, default=default)
    found: list[Any] = []

    def flat(run: Callable[..., Any], *leaves: jax.Array) -> list[jax.Array]:
        results, shape = jax.tree.flatten(run(*jax.tree.unflatten(tree, leaves)))
        found.append(shape)
        return results

    results = _bind(leaves, *(functools.partial(flat, run) for run in (cpu, default)))
    return jax.tree.unflatten(found[0], results)


def _committed_devices(leaves: Sequence[Any]) -> set[Any]:
    """The devices on which JAX has to compute."""
    arrays = (leaf for leaf in leaves if isinstance(leaf, jax.Array) and leaf.committed)
    return {device for array in arrays for device in array.devices()}


_either: Any = Primitive("mx_jax_on_one_cpu")
_either.multiple_results = True
# What newest JAX asks of a primitive whose ways have custom rules for batches: lowering runs them.
_either.is_high = lambda *types, **ways: False


def _bind(leaves: Sequence[Any], one: Callable[..., Any], several: Callable[..., Any]) -> Any:
    """Both ways traced; lowering keeps one."""
    with dispatch(None), alone(True):
        handler = jax.make_jaxpr(one)(*leaves)
    with dispatch(None):
        plain = jax.make_jaxpr(several)(*leaves)
    return _either.bind(*leaves, one=handler, several=plain)


@_either.def_abstract_eval
def _(*types: Any, one: ClosedJaxpr, several: ClosedJaxpr) -> Any:
    del types, one
    return several.out_avals


@_either.def_impl
def _(*leaves: jax.Array, one: ClosedJaxpr, several: ClosedJaxpr) -> Any:
    """Reached where a transformation outside jit leaves arrays."""
    return by_devices(*leaves, cpu=jaxpr_as_fun(one), default=jaxpr_as_fun(several))


def _batch(leaves: Any, dims: Any, *, one: ClosedJaxpr, several: ClosedJaxpr) -> Any:
    ways = (jax.vmap(jaxpr_as_fun(way), tuple(dims)) for way in (one, several))
    results = _bind(leaves, *ways)
    return results, [0] * len(results)


def _jvp(primals: Any, tangents: Any, *, one: ClosedJaxpr, several: ClosedJaxpr) -> Any:
    """Handlers have no derivatives; plain JAX has."""
    del one
    tangents = tuple(ad.instantiate_zeros(tangent) for tangent in tangents)
    return jax.jvp(jaxpr_as_fun(several), tuple(primals), tangents)


def _lower_several(ctx: Any, *values: Any, one: ClosedJaxpr, several: ClosedJaxpr) -> Any:
    del one
    return mlir.lower_fun(jaxpr_as_fun(several), multiple_results=True)(ctx, *values)


def _lower_on_cpu(ctx: Any, *values: Any, one: ClosedJaxpr, several: ClosedJaxpr) -> Any:
    way = one if _has_one_device(ctx.module_context.axis_context) else several
    return mlir.lower_fun(jaxpr_as_fun(way), multiple_results=True)(ctx, *values)


def _has_one_device(context: Any) -> bool:
    """Whether what is lowered runs on one device, or on each by itself."""
    if (number := getattr(context, "num_devices", None)) is not None:
        return number == 1
    # Inside shard_map; a context without a mesh is pmap's, whose devices are by themselves.
    mesh = getattr(context, "mesh", None)
    return mesh is None or mesh.size == 1 or {*context.manual_axes} == {*mesh.axis_names}


batching.primitive_batchers[_either] = _batch
ad.primitive_jvps[_either] = _jvp
mlir.register_lowering(_either, _lower_several)
mlir.register_lowering(_either, _lower_on_cpu, platform="cpu")
