"""What a model's layers are multiplied with: second moments of their inputs."""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.module import InterceptorContext
from flax.traverse_util import flatten_dict
from jax import lax
from jax.extend.core import get_opaque_trace_state

from mx_jax.calibrate.scales import contracted

if TYPE_CHECKING:
    from flax import nnx

Moments = dict[str, jax.Array]
"""By path of the layer, float32 `[k, k]`: the sum of `x x^T` over its inputs."""

# What multiplies, and by which method.
_LINEN = {nn.Dense: "__call__", nn.DenseGeneral: "__call__", nn.Embed: "attend"}
# The collection of moments that layers sow, and of inputs that modules do.
_SOWN = "calibrate_inputs"
_MOMENT = "moment of a layer"


def moments(
    model: "nn.Module | nnx.Module",
    batches: Iterable[Any],
    *,
    variables: Mapping[str, Any] | None = None,
) -> Moments:
    """Sum of `x x^T` over the inputs x of every dense layer of a model, and of every head.

    Args:
      model: a flax.linen module or a flax.nnx model; of a converted one, `convert.original` of
        it. Observed are `Dense` and `DenseGeneral` of linen, `Linear` and `LinearGeneral` of nnx,
        and what an `Embed` of either `attend`s to, and what linen modules `tell_input`. A layer
        that contracts several axes has the features of all of them, as its kernel lists them. Not
        observed are layers in `nn.scan` and its like, nor in any transform of nnx.
      batches: what the model is called with: arrays, or tuples of arguments.
      variables: linen's variables; of linen modules only.

    Returns:
      By layer, named by its path as conversion rules name it: float32 `[k, k]`.

    Raises:
      TypeError: neither kind of model, or variables for nnx or none for linen.
      ValueError: no batch, or no layer.

    Examples:
      >>> import flax.linen as nn, jax, jax.numpy as jnp
      >>> from mx_jax import calibrate
      >>> model, x = nn.Sequential([nn.Dense(3), nn.relu, nn.Dense(2)]), jnp.ones((5, 4))
      >>> result = calibrate.moments(model, [x, x], variables=model.init(jax.random.key(0), x))
      >>> {path: moment.shape for path, moment in result.items()}, float(result["layers_0"].max())
      ({'layers_0': (4, 4), 'layers_2': (3, 3)}, 10.0)
    """
    if isinstance(model, nn.Module):
        if not isinstance(variables, Mapping):
            raise TypeError(
                "calibrate.moments: a flax.linen module needs variables=, got "
                f"variables={type(variables).__name__}"
            )
        observe, state = jax.jit(functools.partial(_moments_linen, model)), variables
    else:
        # Late: programs of flax.linen alone need not wait for it.
        from flax import nnx

        if not isinstance(model, nnx.Module):
            raise TypeError(
                "calibrate.moments: needs a flax.linen module or a flax.nnx model, got "
                f"model={type(model).__name__}; of a converted one pass convert.original(model)"
            )
        if variables is not None:
            raise TypeError("calibrate.moments: a flax.nnx model has its own; drop variables=")
        graph, state = nnx.split(model)
        observe = jax.jit(functools.partial(_moments_nnx, graph))
    total: Moments | None = None
    for batch in batches:
        batch_moments = observe(state, *(batch if isinstance(batch, tuple) else (batch,)))
        total = batch_moments if total is None else jax.tree.map(jnp.add, total, batch_moments)
    if total is None:
        raise ValueError("calibrate.moments: needs at least one batch, got none")
    if not total:
        raise ValueError(
            f"calibrate.moments: needs a dense layer, got none in {type(model).__name__}; those in "
            "nn.scan, in transforms of nnx and of converted models are not observed: of a "
            "converted one pass convert.original(model)"
        )
    return total


def tell_input(layer: nn.Module, name: str, x: jax.Array) -> None:
    """Say what a linen module multiplies a parameter of its own with, so that `moments` has it.

    Call it beside the product. It does nothing but where `moments` looks.

    Args:
      layer: the module.
      name: the parameter's.
      x: `[..., k]`, the product's other operand, which it contracts along the last axis.

    Examples:
      >>> import flax.linen as nn, jax, jax.numpy as jnp
      >>> from mx_jax import calibrate
      >>> class Head(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x):
      ...         table = self.param("table", nn.initializers.ones, (5, x.shape[-1]))
      ...         calibrate.tell_input(self, "table", x)
      ...         return x @ table.T
      >>> variables = Head().init(jax.random.key(0), jnp.ones((2, 3)))
      >>> result = calibrate.moments(Head(), [jnp.ones((2, 3))], variables=variables)
      >>> {name: moment.shape for name, moment in result.items()}
      {'table': (3, 3)}
    """
    # Initializing makes a variable of every collection.
    if not layer.is_initializing():
        layer.sow(_SOWN, name, x)


def _moment(x: jax.Array, axes: Sequence[int] = (-1,)) -> jax.Array:
    """Rows are all that is not contracted; features, of several axes, count as the kernel's do."""
    axes = contracted(axes, x.ndim)
    last = jnp.moveaxis(x, axes, range(-len(axes), 0))
    rows = last.reshape(-1, math.prod(x.shape[axis] for axis in axes)).astype(jnp.float32)
    return jnp.matmul(rows.T, rows, precision="highest")


def _moments_linen(model: nn.Module, variables: Mapping[str, Any], *args: object) -> Moments:
    def intercept(
        call: Callable[..., Any],
        args: tuple[Any, ...],
        options: dict[str, Any],
        context: InterceptorContext,
    ) -> Any:
        layer = context.module
        called = next((kind for kind in _LINEN if isinstance(layer, kind)), None)
        if called is not None and context.method_name == _LINEN[called]:
            x = (*args, *options.values())[0]
            # Flax contracts axes in the order in which they lie, however they are named.
            axes = sorted(contracted(getattr(layer, "axis", -1), x.ndim))
            # A variable, since remat and jit hand on no other.
            layer.sow(_SOWN, _MOMENT, _moment(x, axes), init_fn=lambda: 0, reduce_fn=jnp.add)
        return call(*args, **options)

    with nn.intercept_methods(intercept):
        applied: Any = model.apply(variables, *args, mutable=[_SOWN])
    sown: Any = flatten_dict(applied[1].get(_SOWN, {}))
    return {
        "/".join(path[:-1] if path[-1] == _MOMENT else path): (
            value if path[-1] == _MOMENT else functools.reduce(jnp.add, map(_moment, value))
        )
        for path, value in sown.items()
    }


def _moments_nnx(graph: "nnx.GraphDef", state: "nnx.State", *args: object) -> Moments:
    from flax import nnx

    result: Moments = {}
    model = nnx.merge(graph, state)
    for path, layer in nnx.iter_graph(model):
        if isinstance(layer, nnx.Embed):
            layer.attend = _observed(layer.attend, result, path)
        if isinstance(layer, nnx.Linear | nnx.LinearGeneral):
            layer.dot_general = _observed(layer.dot_general or lax.dot_general, result, path)
    model(*args)
    return result


def _observed(
    product: Callable[..., jax.Array], into: Moments, path: Sequence[Any]
) -> Callable[..., jax.Array]:
    """A `dot_general`, or an embedding's `attend`, whose first operand is added to the moments."""
    here, name = get_opaque_trace_state(convention="flax"), "/".join(map(str, path))

    def observed(lhs: jax.Array, *args: Any, **options: object) -> jax.Array:
        # What a transform inside traces stays in it.
        if get_opaque_trace_state(convention="flax") == here:
            # A dot_general's dimension numbers come after both operands.
            moment = _moment(lhs, args[1][0][0] if len(args) > 1 else (-1,))
            into[name] = into[name] + moment if name in into else moment
        return product(lhs, *args, **options)

    return observed
