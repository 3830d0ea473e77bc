"""capture: layers of Flax have their names, and those of a scan their index."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import mx_jax
from mx_jax import convert, inspect, recipes
from tests.inspect.kit import X, by_layer, captured, of
from tests.quick import quick

# Each layer has an amax of its own, which parts its records from the others'.
WEIGHTS = np.stack([number * np.eye(64, dtype=np.float32) for number in (1, 2, 3)])
RULE = convert.Rule(".*", recipes.mxfp8())


class Pair(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = mx_jax.nn.linen.Dense(64, recipe="mxfp8", name="up")(x)
        return nn.Dense(64, dot_general=recipes.mxfp8().dot_general, name="down")(x)


class Shared(nn.Module):
    def setup(self):
        self.block = nn.remat(Pair)()

    def __call__(self, x):
        return self.block(self.block(x))


def test_linen_names_its_layers_and_shared_modules_count_their_calls():
    model = Shared()
    variables = quick(model.init)(jax.random.key(0), X)

    def loss(v):
        with jax.named_scope("student"):
            return jnp.sum(jnp.tanh(model.apply(v, X)))

    result = by_layer(captured(jax.grad(loss), variables, stats="amax"))
    # A gradient of the first input is not wanted.
    paths = {f"student/Shared/block/{name}" for name in ("up", "down")}
    assert set(result) == paths | {f"{path}#1" for path in paths}
    assert len(result["student/Shared/block/up#1"]) == 6
    assert len(result["student/Shared/block/up"]) == 4


def test_nnx_names_its_layers():
    rngs = nnx.Rngs(0)
    linear = mx_jax.nn.nnx.Linear(64, 64, recipe="mxfp8", rngs=rngs)
    attention = nnx.MultiHeadAttention(2, 64, decode=False, rngs=rngs)
    model = nnx.Sequential(linear, nnx.Linear(64, 64, rngs=rngs), attention)
    rules = convert.Rule(".*", recipes.mxfp8(), types=(nnx.Linear, nnx.MultiHeadAttention))
    graph, state = nnx.split(convert.nnx(mx_jax.nn.nnx.name_layers(model), rules))
    records = captured(lambda each, x: nnx.merge(graph, each)(x), state, X[None], stats="amax")
    assert {"layers/0", "layers/1", "layers/2/qk", "layers/2/av"} <= {tag.path for tag in records}


@pytest.mark.slow
def test_names_of_nnx_layers_part_them_only_in_captures():
    first, second = (
        mx_jax.nn.nnx.Linear(64, 64, recipe="mxfp8", rngs=nnx.Rngs(0)) for _ in range(2)
    )
    mx_jax.nn.nnx.name_layers(nnx.Sequential(first, second))
    traces = []

    @nnx.jit
    def outside(layer, x):
        traces.append(None)
        return layer(x)

    @nnx.jit
    def inside(layer, x):
        return layer(x)

    records = captured(lambda a, b, x: inside(b, inside(a, x)), first, second, X, stats="amax")
    assert {tag.path for tag in records} == {"layers/0", "layers/1"}
    outside(second, outside(first, X))
    assert len(traces) == 1


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.tanh(nn.Dense(64, use_bias=False, name="up")(x)), None


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        options: Any = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        layers = nn.scan(nn.remat(Block), length=3, **options)
        return layers(name="layers")(x, None)[0]


def weights_by_index(records: inspect.Records, product: str) -> dict[str, float]:
    result = of(records, "weight", product)
    amaxes = {f"{record.path}#{record.tag.call}": record.stats["amax"] for record in result}
    assert len(amaxes) == len(result), "recorded once"
    return amaxes


def by_index(path: str) -> dict[str, float]:
    return {f"{path}[{number}]#0": number + 1.0 for number in range(3)}


def test_nn_scan():
    model = convert.linen(Model(), RULE)
    variables = {"params": {"layers": {"up": {"kernel": WEIGHTS}}}}
    records = captured(jax.grad(lambda v: jnp.sum(model.apply(v, X))), variables, stats="amax")
    for product in ("output", "grad_input"):
        assert weights_by_index(records, product) == by_index("Model/layers/up")


def stack(x, weights):
    def body(x, w):
        with jax.named_scope("block"):
            return jnp.tanh(x @ w), None

    return lax.scan(body, x, weights)[0].sum()


def test_a_converted_function():
    converted = convert.function(stack, RULE)
    records = captured(jax.grad(converted, argnums=1), X, WEIGHTS, stats="amax")
    for product in ("output", "grad_input"):
        assert weights_by_index(records, product) == by_index("block")
    assert "iota" not in str(jax.make_jaxpr(converted)(X, WEIGHTS))


@pytest.mark.parametrize("way", ["of its jit", "in its jit", "plain"])
def test_a_step_that_changes_a_model_and_its_optimizer(way):
    """As without a capture, whether the step is due or not."""

    def step(model, optimizer, x):
        def loss(model):
            return jnp.mean(jnp.tanh(model(x)))

        value, gradients = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradients)
        return value

    def run(change):
        layer = mx_jax.nn.nnx.Linear(64, 64, recipe="mxfp8", rngs=nnx.Rngs(0))
        model = mx_jax.nn.nnx.name_layers(
            nnx.Sequential(layer, nnx.Linear(64, 8, rngs=nnx.Rngs(1)))
        )
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        changed = change(step)
        values = [changed(model, optimizer, X) for _ in range(3)]
        return changed, (values, nnx.state(model), nnx.state(optimizer))

    def change(step):
        if way == "in its jit":
            return nnx.jit(inspect.capture(step, stats="amax"))
        return inspect.capture(nnx.jit(step) if way == "of its jit" else step, every=2)

    changed: Any
    changed, results = run(change)
    _, expected = run(nnx.jit)
    for got, wanted in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-7)
    if way != "in its jit":
        assert {record.path for record in changed.records.all()} == {"layers/0"}
        assert {record.step for record in changed.records.all()} == {0, 2}
