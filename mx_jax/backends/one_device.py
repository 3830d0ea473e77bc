"""What one device computes in one way and several in another, as only lowering can tell.

A traced function does not know the devices of its arguments, but JAX knows those of a program as it
lowers it. So where several devices exist and no mesh is in context, both ways are traced, and one
is lowered: on unsharded arrays that of one device, as on a machine that has no other.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax import lax
from jax.core import Tracer
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from mx_jax.packed import unpacked

# A function as a jaxpr. JAX's own type is hidden from type checkers.
ClosedJaxpr = Any
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


@dataclasses.dataclass(frozen=True)
class Ways:
    """Two ways to compute the same; neither closes over arrays.

    Attributes:
      platform: where `one` runs; elsewhere `several` does.
      one: on one device.
      several: on several, and on any other platform.
      tracing: a context in which `one` is traced.
    """

    platform: str
    one: Callable[..., Any]
    several: Callable[..., Any]
    tracing: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext

    def __call__(self, *operands: Any) -> Any:
        """One of them, of pytrees of arrays, of which at least one is traced."""
        leaves, tree = jax.tree.flatten(operands)
        found: list[Any] = []

        def flat(run: Callable[..., Any], *leaves: jax.Array) -> list[jax.Array]:
            results, shape = jax.tree.flatten(run(*jax.tree.unflatten(tree, leaves)))
            found.append(shape)
            return results

        ways = (functools.partial(flat, run) for run in (self.one, self.several))
        results = _bind(leaves, *ways, platform=self.platform, tracing=self.tracing)
        assert found[0] == found[1], found
        return jax.tree.unflatten(found[0], results)


@dataclasses.dataclass(frozen=True)
class Offered:
    """What one offer runs on one device and another on several, as `Offer.run`.

    Attributes:
      platform: where the first runs.
      one: the first.
      several: the second.
      tracing: a context in which the first is traced.
    """

    platform: str
    one: Callable[..., Any]
    several: Callable[..., Any]
    tracing: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext

    def __call__(self, *operands: Any) -> Any:
        """As `Offer.run`: the call is last."""
        *arrays, call = operands
        leaves = jax.tree.leaves(arrays)
        if is_traced(leaves):
            one, several = (lambda *given, run=run: run(*given, call) for run in self._ways)
            return Ways(self.platform, one, several, self.tracing)(*arrays)
        return self._ways[len(committed_devices(leaves)) > 1](*operands)

    @property
    def _ways(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        return self.one, self.several


@dataclasses.dataclass(frozen=True)
class Unpacking:
    """What an offer runs, of weights that may have been packed for another backend."""

    run: Callable[..., Any]

    def __call__(self, *operands: Any) -> Any:
        """As `Offer.run`."""
        return self.run(*map(unpacked, operands))


@dataclasses.dataclass(frozen=True)
class Singly:
    """What runs a `QuantizeBothCall` by two single casts.

    Attributes:
      first: runs the first of them, as `Offer.run`.
      second: runs the other.
    """

    first: Callable[..., Any]
    second: Callable[..., Any]

    def __call__(self, x: Any, random_bits: Any, tensor_scale: Any, call: Any) -> Any:
        """As `Offer.run`."""
        first, second = random_bits
        return (
            self.first(x, first, tensor_scale, call.first),
            self.second(x, second, tensor_scale, call.second),
        )


def is_traced(leaves: Sequence[Any]) -> bool:
    """Whether lowering will decide: outside jit JAX computes where the arrays are."""
    return any(isinstance(leaf, Tracer) for leaf in leaves)


def committed_devices(leaves: Sequence[Any]) -> set[Any]:
    """The devices on which JAX has to compute."""
    arrays = (leaf for leaf in leaves if isinstance(leaf, jax.Array) and leaf.committed)
    return {device for array in arrays for device in array.devices()}


_either: Any = Primitive("mx_jax_on_one_device")
_either.multiple_results = True
# What newest JAX asks of a primitive whose ways have custom rules for batches: lowering runs them.
_either.is_high = lambda *types, **ways: False


def _bind(
    leaves: Sequence[Any], one: Any, several: Any, *, platform: str, tracing: Callable[..., Any]
) -> Any:
    """Both ways traced; lowering keeps one."""
    with tracing():
        first = jax.make_jaxpr(one)(*leaves)
    second = jax.make_jaxpr(several)(*leaves)
    found: list[Any] = [way.out_avals for way in (first, second)]
    types = [[(kind.shape, kind.dtype) for kind in way] for way in found]
    assert types[0] == types[1], types
    return _either.bind(*leaves, one=first, several=second, platform=platform, tracing=tracing)


@_either.def_abstract_eval
def _(*types: Any, several: ClosedJaxpr, **others: Any) -> Any:
    del types, others
    return several.out_avals


@_either.def_impl
def _(*leaves: jax.Array, one: Any, several: Any, platform: str, **others: Any) -> Any:
    """Reached where a transformation outside jit leaves arrays."""
    del others
    first, second = jaxpr_as_fun(one), jaxpr_as_fun(several)
    if len(committed_devices(leaves)) > 1:
        return second(*leaves)
    return lax.platform_dependent(*leaves, **{platform: first}, default=second)


def _batch(leaves: Any, dims: Any, *, one: Any, several: Any, platform: str, tracing: Any) -> Any:
    ways = (jax.vmap(jaxpr_as_fun(way), tuple(dims)) for way in (one, several))
    results = _bind(leaves, *ways, platform=platform, tracing=tracing)
    return results, [0] * len(results)


def _jvp(primals: Any, tangents: Any, *, several: ClosedJaxpr, **others: Any) -> Any:
    """Kernels have no derivatives; plain JAX has."""
    del others
    tangents = tuple(ad.instantiate_zeros(tangent) for tangent in tangents)
    return jax.jvp(jaxpr_as_fun(several), tuple(primals), tangents)


def _lower_several(ctx: Any, *values: Any, several: ClosedJaxpr, **others: Any) -> Any:
    del others
    return mlir.lower_fun(jaxpr_as_fun(several), multiple_results=True)(ctx, *values)


def _lower_on(
    own: str, ctx: Any, *values: Any, one: Any, several: Any, platform: str, tracing: Any
) -> Any:
    del tracing
    is_one = platform == own and _has_one_device(ctx.module_context.axis_context)
    way = one if is_one else several
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
for _platform in PLATFORMS:
    mlir.register_lowering(_either, functools.partial(_lower_on, _platform), platform=_platform)
