"""What tests of captures share: a layer, its operands, and what was recorded of it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mx_jax
from mx_jax import inspect
from tests.quick import quick

W = (np.random.default_rng(0).normal(size=(64, 64)) / 8).astype(np.float32)
X = np.random.default_rng(1).normal(size=(32, 64)).astype(np.float32)


def layer(x: Any, w: Any, name: str = "layer") -> jax.Array:
    with jax.named_scope(name):
        return jnp.tanh(mx_jax.matmul(x, w, recipe="mxfp8"))


def both(function: Any) -> Any:
    """Gradients by two operands, and the value."""
    return jax.value_and_grad(function, argnums=(0, 1))


def captured(function: Any, *operands: Any, **options: Any) -> inspect.Records:
    """What is recorded of a compiled call."""
    step = inspect.capture(function, **options)
    quick(step)(*operands)
    return step.records


def of(records: inspect.Records, tensor: str, product: str = "output") -> list[inspect.Record]:
    """Records of one operand in the order of the program."""
    return [r for r in records.all() if (r.tag.product, r.tag.tensor) == (product, tensor)]


def by_layer(records: inspect.Records) -> dict[str, list[tuple[str, str]]]:
    """What was recorded of each layer, with its index and call: products and tensors."""
    result: dict[str, list[tuple[str, str]]] = {}
    for record in records.all():
        name = f"{record.path}#{record.tag.call}" if record.tag.call else record.path
        result.setdefault(name, []).append((record.tag.product, record.tag.tensor))
    return result


def same_numbers(each: inspect.Record, other: inspect.Record) -> None:
    """Counts are equal, and sums up to their order."""
    assert set(each.stats) == set(other.stats)
    for name, value in each.stats.items():
        exact = name in ("scales", "channels", "blocks", "nonfinite_blocks")
        expected = other.stats[name]
        same = value == expected if exact else np.isclose(value, expected, rtol=1e-4, atol=0)
        assert same, (each.tag, name)
