"""What a model's layers are multiplied with: second moments of their inputs."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

Moments = dict[str, jax.Array]
"""By path of the layer, float32 `[k, k]`: the sum of `x x^T` over its inputs."""


def moments(
    model: nn.Module | nnx.Module, batches: Iterable[Any], *, variables: Any = None
) -> Moments:
    """Sum of `x x^T` over the inputs x of every dense layer of a model.

    Args:
      model: a flax.linen module or a flax.nnx model, in high precision or converted. Layers that
        contract the last axis of their input are observed: `Dense` and `DenseGeneral` of linen,
        `Linear` and `LinearGeneral` of nnx. Not those in `nn.scan` and its like.
      batches: what the model is called with: arrays, or tuples of arguments.
      variables: linen's variables; of linen modules only.

    Returns:
      By layer, named by its path as conversion rules name it: float32 `[k, k]`.

    Raises:
      TypeError: neither kind of model, or variables for nnx or none for linen.
      ValueError: no batch, or no layer.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp
      >>> from mx_jax import calibrate
      >>> model, x = nn.Sequential([nn.Dense(3), nn.relu, nn.Dense(2)]), jnp.ones((5, 4))
      >>> found = calibrate.moments(model, [x, x], variables=model.init(jax.random.key(0), x))
      >>> {path: moment.shape for path, moment in found.items()}, float(found["layers_0"].max())
      ({'layers_0': (4, 4), 'layers_2': (3, 3)}, 10.0)
    """
    observe = _observer(model, variables)
    total: Moments | None = None
    for batch in batches:
        found = observe(*batch) if isinstance(batch, tuple) else observe(batch)
        total = found if total is None else jax.tree.map(jnp.add, total, found)
    if not total:
        raise ValueError(
            "calibrate.moments: needs at least one batch and one dense layer, got "
            f"{'no batch' if total is None else f'no dense layer in {type(model).__name__}'}"
        )
    return total


def _observer(model: Any, variables: Any) -> Callable[..., Moments]:
    if isinstance(model, nn.Module):
        if not isinstance(variables, Mapping):
            raise TypeError(
                "calibrate.moments: a flax.linen module needs variables=, got "
                f"variables={type(variables).__name__}"
            )
        return _linen(model, variables)
    if isinstance(model, nnx.Module):
        if variables is not None:
            raise TypeError("calibrate.moments: a flax.nnx model has its own; drop variables=")
        return _nnx(model)
    raise TypeError(
        "calibrate.moments: needs a flax.linen module or a flax.nnx model, got "
        f"model={type(model).__name__}"
    )


def _add(into: Moments, path: str, x: jax.Array) -> None:
    rows = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    moment = jnp.matmul(rows.T, rows, precision="highest")
    into[path] = into[path] + moment if path in into else moment


def _contracts_last(axis: Any) -> bool:
    return axis in (-1, (-1,))


def _linen(model: nn.Module, variables: Any) -> Callable[..., Moments]:
    def observe(variables: Any, *args: Any) -> Moments:
        found: Moments = {}

        def look(call: Any, args: Any, options: Any, context: Any) -> Any:
            layer = context.module
            dense = isinstance(layer, nn.Dense) or (
                isinstance(layer, nn.DenseGeneral) and _contracts_last(layer.axis)
            )
            if dense and context.method_name == "__call__":
                _add(found, "/".join(layer.path), args[0])
            return call(*args, **options)

        with nn.intercept_methods(look):
            model.apply(variables, *args)
        return found

    jitted = jax.jit(observe)
    return lambda *args: jitted(variables, *args)


def _nnx(model: nnx.Module) -> Callable[..., Moments]:
    graph, state = nnx.split(model)

    def observe(state: Any, *args: Any) -> Moments:
        found: Moments = {}
        watched = nnx.merge(graph, state)
        for path, layer in nnx.iter_graph(watched):
            dense = isinstance(layer, nnx.Linear) or (
                isinstance(layer, nnx.LinearGeneral) and _contracts_last(layer.axis)
            )
            if dense:
                name = "/".join(map(str, path))
                layer.dot_general = _watching(layer.dot_general or lax.dot_general, found, name)
        watched(*args)
        return found

    jitted = jax.jit(observe)
    return lambda *args: jitted(state, *args)


def _watching(dot_general: Any, found: Moments, path: str) -> Any:
    def watching(lhs: jax.Array, *args: Any, **options: Any) -> Any:
        _add(found, path, lhs)
        return dot_general(lhs, *args, **options)

    return watching
