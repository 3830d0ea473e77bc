"""Calls as JAX primitives: one equation each in a jaxpr, whose implementation lowering picks.

Lowering knows what tracing cannot: the platform of the program, and its number of devices. So an
equation carries two implementations, and only the one that is lowered is traced.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from mx_jax.backends.calls import (
    Call,
    CastStatisticsCall,
    QuantizeBothCall,
    QuantizeCall,
    result_of,
)
from mx_jax.codecs.explicit_axes import has_explicit_axes, vary_alike
from mx_jax.packed import unpacked

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
_CASTS = (QuantizeCall, QuantizeBothCall, CastStatisticsCall)


@dataclasses.dataclass(frozen=True)
class Implementations:
    """What computes a call, as `Offer.run`: bound as one equation of a jaxpr.

    Attributes:
      own: on the platform, and on one device alone if `one_device`.
      other: anywhere else, in plain JAX.
      platform: of `own`; None: every one.
      one_device: whether `own` serves no program of several devices.
    """

    own: Callable[..., Any]
    other: Callable[..., Any]
    platform: str | None
    one_device: bool

    def __call__(self, *operands: Any) -> Any:
        """What a call asks for: the operands, the call last."""
        *arrays, call = operands
        if has_explicit_axes():
            # Types would have to say where results lie: plain JAX's do.
            return self.own(*operands)
        leaves, tree = jax.tree.flatten(tuple(arrays))
        if jax.sharding.get_abstract_mesh().manual_axes:
            leaves = vary_alike(leaves)
        shapes = tuple((x.shape, x.dtype) for x in map(jax.typeof, leaves))
        types, result = _result(self, call, tree, shapes)
        work = Work(implementations=self, call=call, tree=tree, types=types)
        return jax.tree.unflatten(result, _primitive(type(call)).bind(*leaves, work=work))


@dataclasses.dataclass(frozen=True)
class Unpacking:
    """An implementation for weights that may have been packed for another backend."""

    run: Callable[..., Any]

    def __call__(self, *operands: Any) -> Any:
        """As `Offer.run`."""
        return self.run(*map(unpacked, operands))


@dataclasses.dataclass(frozen=True)
class Singly:
    """A `QuantizeBothCall` as two single casts, each as `Offer.run`."""

    first: Callable[..., Any]
    second: Callable[..., Any]

    def __call__(self, x: Any, random_bits: Any, tensor_scale: Any, call: Any) -> Any:
        """As `Offer.run`."""
        first, second = random_bits
        return (
            self.first(x, first, tensor_scale, call.first),
            self.second(x, second, tensor_scale, call.second),
        )


@dataclasses.dataclass(frozen=True, repr=False)
class Work:
    """The static parameter of an equation.

    Attributes:
      implementations: of the call.
      call: what is computed.
      tree: of the operands, whose leaves are the equation's.
      types: (shape, dtype) of the results, before any batch.
      batches: for each `vmap`, the innermost first, its size and the batched axis of each leaf.
    """

    implementations: Implementations
    call: Call
    tree: Any
    types: tuple[tuple[Any, Any], ...]
    batches: tuple[tuple[Any, tuple[int | None, ...]], ...] = ()

    def __repr__(self) -> str:
        return self.call.text

    def compute(self, own: bool, *leaves: jax.Array) -> list[jax.Array]:
        """The results' leaves."""
        run = self.implementations.own if own else self.implementations.other

        def compute(*leaves: jax.Array) -> list[jax.Array]:
            return jax.tree.leaves(run(*jax.tree.unflatten(self.tree, leaves), self.call))

        for _, axes in self.batches:
            compute = jax.vmap(compute, axes)
        return compute(*leaves)


@functools.lru_cache(maxsize=4096)
def _result(implementations: Implementations, call: Call, tree: Any, shapes: Any) -> Any:
    """Types of a call's results and their tree, by arithmetic where the call tells them."""
    leaves = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    operands = jax.tree.unflatten(tree, leaves)
    result = result_of(call, *operands)
    if result is None:
        result = jax.eval_shape(lambda *given: implementations.other(*given, call), *operands)
    found, result_tree = jax.tree.flatten(result)
    return tuple((x.shape, jnp.dtype(x.dtype)) for x in found), result_tree


def implementation(equation: Any) -> Any:
    """What an equation of a call computes, as a closed jaxpr; None of any other equation."""
    work = equation.params.get("work")
    if not isinstance(work, Work):
        return None
    return jax.make_jaxpr(functools.partial(work.compute, True))(*(x.aval for x in equation.invars))


# Set where lowering knows that no devices share a call: then a compiled handler need not tell the
# compiler how they may split it.
on_one_device: Any = jax.make_user_context(default_value=False)


@functools.cache
def _primitive(kind: type[Call]) -> Any:
    """The primitive of a kind of call, with its rules."""
    name = kind.__name__.removesuffix("Call")
    p: Any = Primitive("mx_" + "".join(f"_{c.lower()}" if c.isupper() else c for c in name)[1:])
    p.multiple_results = True
    # Newest JAX asks this of every primitive whose implementations may have custom rules.
    p.is_high = lambda *types, **params: False
    p.def_abstract_eval(_types)
    p.def_impl(functools.partial(_eager, p))
    batching.primitive_batchers[p] = functools.partial(_batch, p)
    ad.primitive_jvps[p] = functools.partial(_no_slope if issubclass(kind, _CASTS) else _jvp, p)
    for platform in PLATFORMS:
        rule = functools.partial(_lower, platform)
        # JAX lowers equal equations of a program once; not inlined, they call one function.
        mlir.register_lowering(p, rule, platform=platform, inline=False)
    return p


def _types(*types: Any, work: Work) -> list[Any]:
    # Made from an operand's type, results vary along the same axes of shard_map.
    like, sizes = types[0], tuple(size for size, _ in reversed(work.batches))
    return [
        like.update(
            shape=(*sizes, *shape),
            dtype=dtype,
            weak_type=False,
            sharding=like.sharding.update(spec=(None,) * (len(sizes) + len(shape))),
        )
        for shape, dtype in work.types
    ]


@functools.lru_cache(maxsize=4096)
def _jitted(p: Any, work: Work) -> Any:
    return jax.jit(functools.partial(p.bind, work=work))


def _eager(p: Any, *leaves: jax.Array, work: Work) -> Any:
    with jax.disable_jit(False):  # else jit would come back here
        return _jitted(p, work)(*leaves)


def _batch(p: Any, leaves: Any, axes: Any, *, work: Work) -> Any:
    size = next(x.shape[axis] for x, axis in zip(leaves, axes, strict=True) if axis is not None)
    axes = tuple(None if axis is None else int(axis) for axis in axes)
    wider = dataclasses.replace(work, batches=(*work.batches, (size, axes)))
    results = p.bind(*leaves, work=wider)
    return results, [0] * len(results)


def _no_slope(p: Any, primals: Any, tangents: Any, *, work: Work) -> Any:
    """Codes do not change with values: who wants a straight-through gradient links it outside."""
    results = p.bind(*primals, work=work)
    return results, [ad.Zero(jax.typeof(result).to_tangent_aval()) for result in results]


def _jvp(p: Any, primals: Any, tangents: Any, *, work: Work) -> Any:
    """Kernels have no derivatives; plain JAX has."""
    del p
    tangents = tuple(map(ad.instantiate_zeros, tangents))
    return jax.jvp(functools.partial(work.compute, False), tuple(primals), tangents)


def _lower(platform: str, ctx: Any, *values: Any, work: Work) -> Any:
    given, module = work.implementations, ctx.module_context
    context = module.axis_context
    devices = num_devices(context)
    own = given.platform in (None, platform) and (devices == 1 or not given.one_device)
    if own and devices > 1 and (known := _devices_of(context, platform)) is not None:
        # Custom partitioning wants to see devices, and JAX shows them to its own primitives alone.
        # By their position: any that are as many will do.
        context = dataclasses.replace(context, device_assignment=known)
        ctx = ctx.replace(module_context=module.replace(axis_context=context))
    with on_one_device(devices == 1):
        compute = functools.partial(work.compute, own)
        return mlir.lower_fun(compute, multiple_results=True)(ctx, *values)


def num_devices(context: Any) -> int:
    """Between how many devices the compiler may split what is lowered."""
    if (number := getattr(context, "num_devices", None)) is not None:
        return number
    # Inside shard_map; a context without a mesh is pmap's, whose devices are by themselves.
    mesh = getattr(context, "mesh", None)
    sizes = {} if mesh is None else mesh.shape
    return math.prod(size for name, size in sizes.items() if name not in context.manual_axes)


def _devices_of(context: Any, platform: str) -> Sequence[Any] | None:
    if getattr(context, "num_devices", None) is None or context.device_assignment:
        return None
    try:
        found = tuple(jax.devices(platform)[: context.num_devices])
    except RuntimeError:  # lowered for a machine that is not there
        return None
    return found if len(found) == context.num_devices else None
