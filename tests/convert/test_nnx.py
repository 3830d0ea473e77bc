"""convert.nnx: copies that share Variables, equal to models written by hand, and the way back."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mx_jax
from mx_jax import convert, recipes
from mx_jax.convert import Rule

from .helpers import MXFP8, STOCHASTIC, by_hand, recipe_names

WIDTH = 48


class Model(nnx.Module):
    """Every kind of layer, a shared one, a list, a dict and a norm."""

    def __init__(self, rngs: nnx.Rngs):
        self.shared = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.again = self.shared
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.split = nnx.LinearGeneral(WIDTH, (2, 5), rngs=rngs)
        self.each_head = nnx.Einsum("bthk,hkf->bthf", (2, 5, 7), (2, 7), rngs=rngs)
        self.merge = nnx.LinearGeneral((2, 7), WIDTH, axis=(-2, -1), rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2)])
        self.heads = nnx.Dict(left=nnx.Linear(WIDTH, 3, rngs=rngs))

    def __call__(self, x):
        x = self.again(self.norm(self.shared(x)))
        x = self.merge(self.each_head(self.split(x)))
        for block in self.blocks:
            x = x + block(x)
        return self.heads["left"](x)


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(7).standard_normal(shape, np.float32)


def example_input() -> np.ndarray:
    return draw(2, 3, WIDTH)


def abstract() -> Model:
    """A model that has shapes alone: no initializer runs."""
    return nnx.eval_shape(lambda: Model(nnx.Rngs(0)))


def program(model: nnx.Module, *args: Any, grad: bool = True) -> str:
    """Output and gradients, as a jaxpr: equal programs give equal bits."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def run(params, *args):
        def loss(params):
            return jnp.sum(nnx.merge(graph, params, rest)(*args) ** 2)  # pyright: ignore

        return jax.value_and_grad(loss)(params) if grad else loss(params)

    return str(jax.make_jaxpr(run)(params, *args))


def state_paths(model: nnx.Module, *filters: Any) -> list[str]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(nnx.state(model, *filters))
    return [jax.tree_util.keystr(path) for path, _ in leaves]


class TestModel:
    def test_equals_a_model_by_hand(self):
        model, x = abstract(), example_input()
        converted = convert.nnx(model, Rule(".*", MXFP8))
        with by_hand(nnx, mx_jax.nn.nnx, MXFP8):
            expected = abstract()
        assert program(converted, x) == program(expected, x) != program(model, x)

    def test_copy_shares_variables(self):
        model = abstract()
        before, paths = nnx.graphdef(model), state_paths(model)
        converted = convert.nnx(model, Rule(".*", MXFP8))
        assert isinstance(converted, Model) and type(converted).__name__ == "Model"
        assert converted.split is not model.split
        assert converted.split.kernel is model.split.kernel
        assert converted.shared is converted.again, "sharing is kept"
        assert nnx.graphdef(model) == before, "the model itself is as it was"
        assert state_paths(converted) == paths


class TestLayers:
    def test_a_shared_layer_has_several_paths(self):
        model = abstract()
        for pattern in ("again", "shared"):
            assert recipe_names(model, Rule(pattern, MXFP8))["again"] == "mxfp8"
        outer = nnx.Dict(left=model, right=model)
        names = recipe_names(nnx.Sequential(outer), Rule("layers/0/right/split", MXFP8))
        assert names["layers/0/left/split"] == "mxfp8"


class TestStacks:
    """Layers made by nnx.vmap, run by nnx.scan or nnx.vmap."""

    @staticmethod
    def stack(make: Any) -> nnx.Module:
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def build(rngs: nnx.Rngs) -> nnx.Module:
            return make(rngs)

        return build(nnx.Rngs(0))

    @staticmethod
    def scan(layers: nnx.Module, x: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, layer):
            return layer(x)

        return run(x, layers)

    def test_scan_equals_by_hand(self):
        layers = self.stack(lambda rngs: nnx.Linear(WIDTH, WIDTH, rngs=rngs))
        converted = convert.nnx(layers, Rule(".*", MXFP8))
        by_hand = self.stack(
            lambda rngs: mx_jax.nn.nnx.Linear(WIDTH, WIDTH, recipe=MXFP8, rngs=rngs)
        )
        x = example_input()
        np.testing.assert_array_equal(self.scan(converted, x), self.scan(by_hand, x))
        report = convert.report(layers, Rule(".*", MXFP8))
        assert report.decisions[0].layer.kernel == (3, WIDTH, WIDTH)
        assert report.decisions[0].layer.shape == (WIDTH, WIDTH)

    def test_streams_that_are_not_mapped(self):
        layers = self.stack(lambda rngs: nnx.Linear(WIDTH, WIDTH, rngs=rngs))
        converted = convert.nnx(layers, Rule(".*", STOCHASTIC), rngs=nnx.Rngs(5))
        axes = nnx.StateAxes({nnx.Param: 0, ...: None})
        run = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, axes), out_axes=nnx.Carry)
        with pytest.raises(ValueError, match=r"got the streams 'quantize' of all its layers, of "):
            run(example_input(), converted)


class TestRandomness:
    @pytest.mark.parametrize("streams", [{"default": 0}, {"params": 0, "quantize": 1}], ids=str)
    def test_every_layer_has_a_stream_of_its_own(self, streams: dict[str, int]):
        model = nnx.List([nnx.Linear(8, 4, rngs=nnx.Rngs(0)) for _ in range(3)])
        converted = convert.nnx(model, Rule(".*", STOCHASTIC), rngs=nnx.Rngs(**streams))
        keys = jax.tree.leaves(nnx.state(converted, nnx.RngKey))
        assert len({jax.random.key_data(key).tobytes() for key in keys}) == 3

    def test_only_streams_are_added(self):
        model = abstract()
        converted = convert.nnx(model, Rule("split", STOCHASTIC), rngs=nnx.Rngs(0))
        assert state_paths(converted, nnx.Param) == state_paths(model)
        # One of the model is for products that its code writes.
        assert [path.split("]")[0] for path in state_paths(converted, nnx.RngState)] == [
            *["['mx_stream'"] * 2,
            *["['split'"] * 2,
        ]

    @pytest.mark.slow
    def test_attention_and_embed(self):
        attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
        embed = nnx.Embed(9, 33, rngs=nnx.Rngs(0))
        x = draw(1, 5, 8)
        # Of weights alone it would leave the two products of an attention.
        rule = Rule("qk", recipes.mxfp8().with_(weights={"rounding": "stochastic"}))
        converted = convert.nnx(attention, rule, rngs=nnx.Rngs(0))
        assert np.any(converted(x) != converted(x))
        rule = Rule(".*", STOCHASTIC, types=nnx.Embed)
        table = convert.nnx(embed, rule, rngs=nnx.Rngs(0))
        assert np.any(table(jnp.arange(9)) != table(jnp.arange(9)))


def test_errors():
    linear = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    for rngs, found in ((None, "no rngs"), (nnx.Rngs(params=0), "rngs with 'params'")):
        message = rf"convert.nnx: '': recipe 'stochastic weight' .* got {found}; pass rngs=nnx.Rngs"
        with pytest.raises(ValueError, match=message):
            convert.nnx(linear, Rule(".*", STOCHASTIC), rngs=rngs)
    with pytest.raises(TypeError, match=r"needs a flax.nnx module, got str"):
        convert.report("model", Rule(".*", None))
    with pytest.raises(TypeError, match=r"needs a flax.nnx module, got str"):
        convert.original("model")
