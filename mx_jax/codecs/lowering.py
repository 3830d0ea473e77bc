"""What codecs do inside of a program that is lowered for one platform."""

import contextlib
import functools
import math
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

R = TypeVar("R")

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


class Lowering(NamedTuple):
    """What is known of the program that a call is lowered in.

    Attributes:
      platform: its name; None while nothing is lowered.
      converts_float8: whether it is of TPUs that convert to float8 in one instruction.
      on_one_device: whether no devices share a call.
    """

    platform: str | None = None
    converts_float8: bool = False
    on_one_device: bool = False


lowering: Any = jax.make_user_context(default_value=Lowering())


def platform_dependent(*operands: Any, default: Callable[..., R], **named: Callable[..., R]) -> R:
    """`lax.platform_dependent`, which traces one implementation where the platform is known."""
    platform = lowering.value.platform
    if platform is None:
        return lax.platform_dependent(*operands, default=default, **named)
    return named.get(platform, default)(*operands)


def devices_sharing(context: Any) -> int:
    """Between how many devices the compiler may split what is lowered."""
    if (number := getattr(context, "num_devices", None)) is not None:
        return number
    # Inside shard_map; a context without a mesh is pmap's, whose devices are by themselves.
    mesh = getattr(context, "mesh", None)
    sizes = {} if mesh is None else mesh.shape
    return math.prod(size for name, size in sizes.items() if name not in context.manual_axes)


def register_lowering(primitive: Primitive, compute: Callable[..., Any]) -> None:
    """Have a primitive of one result lowered as what a function of arrays traces, which knows
    where."""
    lower = mlir.lower_fun(compute, multiple_results=False)

    def rule(ctx: Any, *arrays: Any, platform: str, **params: Hashable) -> Any:
        here = lowering.value
        if here.platform is None:
            alone = devices_sharing(ctx.module_context.axis_context) == 1
            here = Lowering(platform, on_one_device=alone)
        # Tracing may have been inside of `enable_x64`, and lowering not.
        is_wide = ctx.avals_out[0].dtype.itemsize == 8
        with lowering(here), jax.enable_x64(True) if is_wide else contextlib.nullcontext():
            return lower(ctx, *arrays, **params)

    for platform in PLATFORMS:
        # Equal equations of a program call one function.
        on_platform = functools.partial(rule, platform=platform)
        mlir.register_lowering(primitive, on_platform, platform=platform, inline=False)


def eager(primitive: Primitive, *operands: jax.Array, **params: Hashable) -> Any:
    """A primitive's implementation for concrete operands: a program of one equation."""
    with jax.disable_jit(False):  # else jit would come back here
        return _jitted(primitive, tuple(params.items()))(*operands)


@functools.lru_cache(maxsize=4096)
def _jitted(primitive: Primitive, params: tuple[tuple[str, Hashable], ...]) -> Any:
    run = functools.partial(primitive.bind, **dict(params))
    # As JAX marks its own, or jax_debug_nans would run it again, which comes back here.
    vars(run).update(_apply_primitive=True, __qualname__=primitive.name)
    return jax.jit(run)


def by_halves(function: Callable[..., jax.Array], x: jax.Array, axis: int) -> jax.Array:
    """A function of the two halves of an axis that has a length, and so on until that is 1; of an
    odd length the one in the middle counts twice."""
    while (length := x.shape[axis]) > 1:
        ends = (0, (length + 1) // 2), (length // 2, length)
        x = function(*(lax.slice_in_dim(x, *end, axis=axis) for end in ends))
    return x
