"""capture: the layers of a scan have their index without the user's doing."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.core import axes_scan
from flax.nnx.transforms import iteration
from jax import lax

import mx_jax
from mx_jax import convert, inspect, recipes
from tests.quick import quick

X = np.linspace(0.1, 1, 8 * 32, dtype=np.float32).reshape(8, 32)
# Each layer has an amax of its own, by which its records are told apart.
WEIGHTS = np.stack([number * np.eye(32, dtype=np.float32) for number in (1, 2, 3)])
nnx_iteration: Any = iteration
RULE = convert.Rule(".*", recipes.mxfp8())


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.tanh(nn.Dense(32, use_bias=False, name="up")(x)), None


class Model(nn.Module):
    reverse: bool = False

    @nn.compact
    def __call__(self, x):
        options: Any = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        layers = nn.scan(nn.remat(Block), length=3, reverse=self.reverse, **options)
        return layers(name="layers")(x, None)[0]


def weights_by_index(records: inspect.Memory, product: str) -> dict[str, float]:
    found = {}
    for record in records.all():
        if (record.tag.product, record.tag.tensor) == (product, "weight"):
            name = f"{record.path}#{record.tag.call}"
            assert name not in found, "told once"
            found[name] = record.stats["amax"]
    return found


def by_index(path: str) -> dict[str, float]:
    return {f"{path}[{number}]#0": number + 1.0 for number in range(3)}


@pytest.mark.parametrize(
    "reverse", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["on", "back"]
)
def test_nn_scan(reverse):
    model = convert.linen(Model(reverse), RULE)
    variables = {"params": {"layers": {"up": {"kernel": WEIGHTS}}}}
    with inspect.capture(stats="amax") as records:
        quick(jax.grad(lambda v: model.apply(v, X).sum()))(variables)
    assert weights_by_index(records, "output") == by_index("layers/up")
    assert weights_by_index(records, "grad_input") == by_index("layers/up")


class Layer(nnx.Module):
    def __init__(self):
        self.up = nnx.Linear(32, 32, use_bias=False, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return nnx.tanh(self.up(x))


def test_nnx_scan():
    layer = Layer()
    layer.up.kernel[...] = jnp.zeros((32, 32))
    graph, _ = nnx.split(convert.nnx(layer, RULE))
    stacked = nnx.state(layer)
    stacked["up"]["kernel"] = nnx.Param(jnp.asarray(WEIGHTS))

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def run(layer, x):
        return layer(x)

    with inspect.capture(stats="amax") as records:
        quick(lambda stacked: run(nnx.merge(graph, stacked), X))(stacked)
    assert weights_by_index(records, "output") == by_index("up")


def stack(x, weights):
    def body(x, w):
        with jax.named_scope("block"):
            return jnp.tanh(x @ w), None

    return lax.scan(body, x, weights)[0].sum()


def test_a_converted_function():
    converted = convert.function(stack, RULE)
    off = str(jax.make_jaxpr(converted)(X, WEIGHTS))
    with inspect.capture(stats="amax") as records:
        quick(jax.grad(converted, argnums=1))(X, WEIGHTS)
    assert weights_by_index(records, "output") == by_index("block")
    assert weights_by_index(records, "grad_input") == by_index("block")
    assert str(jax.make_jaxpr(converted)(X, WEIGHTS)) == off and "iota" not in off


def test_an_index_by_hand_is_instead_of_the_counted_one():
    def body(x, given):
        w, number = given
        with inspect.tag("block", index=10 * number):
            return mx_jax.matmul(x, w, recipe="mxfp8"), None

    with inspect.capture(stats="amax") as records:
        nnx_iteration.jax.lax.scan(body, jnp.asarray(X), (WEIGHTS, np.arange(3)))
    assert {record.index for record in records.all()} == {(0,), (10,), (20,)}


def test_flax_has_jaxs_scan_again_once_nobody_watches():
    def scans():
        return axes_scan.lax.scan, nnx_iteration.jax.lax.scan

    with inspect.capture(stats="amax"):
        with inspect.capture(stats="amax"):
            assert lax.scan not in scans()
        assert lax.scan not in scans()
    assert scans() == (lax.scan, lax.scan) and nnx_iteration.jax is jax
