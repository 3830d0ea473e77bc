"""convert.nnx: copies that share Variables, stacks of layers, and streams."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from mx_jax import convert
from mx_jax.convert import Rule

from .helpers import MXFP8, STOCHASTIC, recipe_names

WIDTH = 48
X = jnp.ones((2, WIDTH))


class Model(nnx.Module):
    """A shared layer, a norm, and layers in a list."""

    def __init__(self, rngs: nnx.Rngs):
        self.shared = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.again = self.shared
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.split = nnx.LinearGeneral(WIDTH, (2, 5), rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.blocks:
            x = layer(self.again(self.shared(self.norm(x))))
        return x + self.split(x).sum()


@pytest.fixture
def model() -> Model:
    """One that has shapes alone: no initializer runs."""
    return nnx.eval_shape(lambda: Model(nnx.Rngs(0)))


def state_paths(model: nnx.Module, *filters: Any) -> list[str]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(nnx.state(model, *filters))
    return [jax.tree_util.keystr(path) for path, _ in leaves]


def test_a_copy_shares_variables(model: Model):
    before, paths = nnx.graphdef(model), state_paths(model)
    converted = convert.nnx(model, Rule(".*", MXFP8))
    assert isinstance(converted, Model) and type(converted).__name__ == "Model"
    assert converted.split is not model.split
    assert converted.split.kernel is model.split.kernel
    assert converted.shared is converted.again, "sharing is kept"
    assert nnx.graphdef(model) == before, "the model itself is as it was"
    assert state_paths(converted) == paths


def test_a_shared_layer_has_several_paths(model: Model):
    for pattern in ("again", "shared"):
        assert recipe_names(model, Rule(pattern, MXFP8), X)["again"] == "mxfp8"
    both = nnx.Sequential(nnx.Sequential(model, model))
    names = recipe_names(both, Rule("layers/0/layers/1/split", MXFP8), X)
    assert names["layers/0/layers/0/split"] == "mxfp8"


def test_a_stack_whose_streams_are_not_mapped():
    """Layers made by nnx.vmap, run by nnx.scan; the numbers are tested with stored kernels."""
    make = nnx.vmap(lambda rngs: nnx.Linear(WIDTH, WIDTH, rngs=rngs))
    layers = make(nnx.Rngs(0).split(3))
    (decision,) = convert.weights_report(layers, Rule(".*", MXFP8)).decisions
    assert (decision.layer.kernel, decision.layer.shape) == ((3, WIDTH, WIDTH), (WIDTH, WIDTH))
    converted = convert.nnx(layers, Rule(".*", STOCHASTIC), rngs=nnx.Rngs(5))
    axes = nnx.StateAxes({nnx.Param: 0, ...: None})
    run = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, axes), out_axes=nnx.Carry)
    with pytest.raises(ValueError, match=r"got the streams 'quantize' of all its layers, of "):
        run(jnp.ones((2, 3, WIDTH)), converted)


def test_only_streams_are_added(model: Model):
    converted = convert.nnx(model, Rule("split", STOCHASTIC), rngs=nnx.Rngs(0))
    assert state_paths(converted, nnx.Param) == state_paths(model)
    # One of the model is for products that its code writes.
    streams = [path.split("]")[0] for path in state_paths(converted, nnx.RngState)]
    assert streams == [*["['mx_stream'"] * 2, *["['split'"] * 2]


class Encoder(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (WIDTH, WIDTH)))

    def encode(self, x: jax.Array) -> jax.Array:
        return x @ self.w

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.encode(x)


def test_methods_that_are_called_from_outside():
    model = Encoder(nnx.Rngs(0))
    converted = convert.nnx(model, Rule(".*", MXFP8), methods=["encode"])
    assert (converted.encode(X) == converted(X)).all() and (model(X) != converted(X)).any()
    without = convert.nnx(model, Rule(".*", MXFP8))
    assert (without.encode(X) == model(X)).all(), "a part runs as it is written"
    with pytest.raises(ValueError, match=r"got methods=\('encode', 'decode'\), .* has 'decode'"):
        convert.nnx(model, Rule(".*", MXFP8), methods=["encode", "decode"])


class Modes(nnx.Module):
    """Layers of which a call reaches one, a product by an attribute, and what calls leave."""

    def __init__(self, rngs: nnx.Rngs):
        self.one, self.other = (nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2))
        self.w = nnx.Param(jax.random.normal(rngs.params(), (WIDTH, WIDTH)))
        self.dot_general = functools.partial(jax.lax.dot_general, precision="highest")
        self.seen = nnx.Intermediate(())

    def encode(self, x: jax.Array) -> jax.Array:
        return self.dot_general(x, self.w[...], (((1,), (0,)), ((), ())))

    def __call__(self, x: jax.Array, first: bool = True) -> jax.Array:
        self.seen.set_value((*self.seen.get_value(), x))
        return self.encode(self.one(x) if first else self.other(x))


def test_a_call_that_does_not_reach_all_layers():
    rules = [Rule("one", MXFP8), Rule("other", MXFP8), Rule("", MXFP8)]
    converted = convert.nnx(Modes(nnx.Rngs(0)), rules, strict=True, methods=["encode"])
    y = converted.encode(X)
    assert (y != Modes(nnx.Rngs(0)).encode(X)).any()
    with pytest.warns(convert.UnusedRuleWarning, match="which of its axes a product contracts"):
        stored = convert.weights(converted, rules)
    assert (stored.encode(X) == y).all(), "methods stay"
    # What each call adds is a leaf more.
    for _ in range(2):
        converted(X)
    assert len(converted.seen.get_value()) == 2
    assert recipe_names(Modes(nnx.Rngs(0)), Rule(".*", MXFP8), X) == {"one": "mxfp8", "": "mxfp8"}


def test_errors():
    with pytest.raises(TypeError, match="methods must be several names, got methods='encode'"):
        convert.nnx(Encoder(nnx.Rngs(0)), Rule(".*", MXFP8), methods="encode")
    with pytest.raises(TypeError, match=r"needs example arguments of a call of Encoder, .*'x'"):
        convert.report(Encoder(nnx.Rngs(0)), Rule(".*", MXFP8))
    linear = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    for rngs, streams in ((None, "no rngs"), (nnx.Rngs(params=0), "rngs with 'params'")):
        message = rf"convert.nnx: '': recipe 'stochastic weight' .* got {streams}; pass rngs=nnx"
        with pytest.raises(ValueError, match=message):
            convert.nnx(linear, Rule(".*", STOCHASTIC), rngs=rngs)
    with pytest.raises(TypeError, match=r"needs a flax.nnx module, got str"):
        convert.report("model", Rule(".*", None))
    with pytest.raises(TypeError, match=r"needs a flax.nnx module, got str"):
        convert.original("model")
