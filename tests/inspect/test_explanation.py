"""explain of functions and layers: each cast and product, how often, where, and what stayed."""

import io
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from rich.console import Console

import mx_jax
import mx_jax.nn.linen as mx
from mx_jax import convert, recipes
from mx_jax.backends.select import MARK, recording
from mx_jax.inspect import Explanation

explain = mx_jax.inspect.explain
X, W = jax.ShapeDtypeStruct((16, 64), "float32"), jax.ShapeDtypeStruct((64, 64), "float32")


def kinds(found: Explanation) -> list[tuple[str, int]]:
    return [(row.kind, row.times) for row in found.rows]


def test_casts_products_and_what_stays():
    def function(x: jax.Array, w: jax.Array) -> Any:
        y = mx_jax.matmul(x, w, recipe="mxfp4")
        return y @ w, mx_jax.matmul(x, w, recipe=recipes.high_precision())

    with mx_jax.testing.target("tpu"):
        found = explain(function, X, W)
    assert kinds(found) == [("cast", 1), ("cast", 1), ("product", 1)] + 2 * [("high precision", 1)]
    cast, _, product, own, kept = found.rows
    assert product.flops == own.flops == 2 * 16 * 64 * 64
    assert found.quantized_share == pytest.approx(1 / 3)
    # Four bits and a byte for 32 of them; results are float32.
    assert product.bytes == (16 * 64 + 64 * 64) * 4.25 / 8 + 16 * 64 * 4
    assert cast.bytes == 16 * 64 * (4 + 4.25 / 8)
    assert own.bytes == (16 * 64 + 64 * 64 + 16 * 64) * 4
    assert own.why.startswith("no recipe reaches it: test_explanation.py:")
    assert own.why.endswith("(test_casts_products_and_what_stays.<locals>.function)")
    assert kept.why == "its recipe keeps both operands in high precision"
    assert any(reason.startswith("not cpu_ffi: runs on platform=cpu") for reason in cast.reasons)
    assert found.machine.startswith("on platform=tpu")


def test_gradients():
    found = explain(lambda x, w: mx_jax.matmul(x, w, recipe="mxfp8"), X, W, backward=True)
    products = [row for row in found.rows if row.kind == "product"]
    assert [[place.backward for place in row.places] for row in products] == [
        [False],
        [True],
        [True],
    ]
    assert found.quantized_share == 1 and not found.high


def test_equal_calls_are_counted():
    """Calls that share a trace, and every step of a scan."""

    @jax.jit
    def layer(x: jax.Array, w: jax.Array) -> jax.Array:
        return mx_jax.matmul(x, w, recipe="mxfp8")

    def deep(x: jax.Array, w: jax.Array) -> jax.Array:
        x = layer(layer(x, w), w)
        return jax.lax.scan(lambda x, _: (layer(x, w) + x @ w, None), x, None, length=3)[0]

    found = explain(deep, X, W)
    assert kinds(found) == [("cast", 5), ("cast", 5), ("product", 5), ("high precision", 3)]
    assert kinds(explain(lambda x, w: x @ w @ w, X, W)) == [("high precision", 2)]


def test_what_is_computed_again_is_counted_again():
    layer = jax.checkpoint(lambda x, w: jnp.sin(mx_jax.matmul(x, w, recipe="mxfp8")))
    again = explain(layer, X, W, backward=True)
    products = [row.times for row in again.rows if row.kind == "product"]
    assert sum(products) == 4


class Model(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = mx.Dense(64, recipe="mxfp8", name="up")(x)
        return nn.Dense(8, name="head")(x)


def test_a_linen_module_and_its_layers():
    found = explain(Model(), X)
    places = {row.kind: row.places[0].path for row in found.rows}
    assert "up" in places["product"] and "up" in places["cast"]
    assert places["high precision"].endswith("head")
    assert "no recipe reaches it: test_explanation.py:" in found.high[0].why
    gradients = explain(Model(), X, backward=True)
    # Of the head's weights and of its input, which the layer below needs.
    assert sum(row.times for row in gradients.high) == 3


def test_an_nnx_model():
    model = convert.nnx(nnx.Linear(64, 8, rngs=nnx.Rngs(0)), convert.Rule(".*", "mxfp4"))
    found = explain(model, X, backward=True)
    assert [row.times for row in found.rows if row.kind == "product"] == [1, 1, 1]
    assert not found.high


def test_reasons_of_what_stays_high():
    def function(x: jax.Array, image: jax.Array) -> Any:
        convolved = jax.lax.conv(image, jnp.ones((4, 3, 3, 3)), (1, 1), "SAME")
        nothing = mx_jax.einsum("bk,bk->bk", x, x, recipe="mxfp8")
        integers = jnp.ones((4, 4), jnp.int32) @ jnp.ones((4, 4), jnp.int32)
        return convolved, nothing, integers

    found = explain(function, X, jax.ShapeDtypeStruct((1, 3, 8, 8), "float32"))
    convolution = next(row for row in found.high if row.work.startswith("conv"))
    assert convolution.flops == 2 * (4 * 8 * 8) * (3 * 3 * 3)
    assert not any("int32" in row.work for row in found.rows)
    key = jax.random.key(0)
    recipe = recipes.nvfp4_pretraining()
    turned = explain(lambda x, w: mx_jax.matmul(x, w, recipe=recipe, key=key), X, W, backward=True)
    assert not turned.high
    transforms = [row for row in turned.rows if row.kind == "transform"]
    assert [(row.work, row.times) for row in transforms] == [
        (f"Hadamard transform of float32 {list(X.shape)}", 2)
    ]


def test_nothing_is_left_behind():
    """Who is not explaining has a program without marks, from the same caches."""

    @jax.jit
    def layer(x: jax.Array) -> jax.Array:
        return mx_jax.matmul(x, x.T, recipe="mxfp8")

    x = jnp.ones((16, 64))
    before = layer.lower(x).as_text(debug_info=True)
    explain(layer, x)
    with recording():
        assert MARK not in layer.lower(x).as_text(debug_info=True)
    assert layer.lower(x).as_text(debug_info=True) == before
    with recording(marks=True):
        assert MARK in layer.lower(x).as_text(debug_info=True)


def test_printed():
    found = explain(Model(), X)
    text = str(found)
    assert "1 x product mxfp8_e4m3 [16, 64] x mxfp8_e4m3 [64, 64]" in text
    assert text.endswith(found.summary) and "% of the flops are quantized" in found.summary
    console = Console(width=150, record=True, file=io.StringIO())
    console.print(found)
    table = console.export_text()
    assert "Casts and products" in table
    assert table.count("quantizes nothing: XLA fuses") == 1, "a reason that rows share is told once"
    assert found.summary in table


def test_what_cannot_be_explained():
    with pytest.raises(TypeError, match="explain: recipe must be a Recipe"):
        explain(None, 8, 64, 32)


def test_a_plain_layer_of_a_converted_nnx_model():
    layers = (nnx.Linear(64, 64, rngs=nnx.Rngs(0)), nnx.Linear(64, 8, rngs=nnx.Rngs(1)))
    model = convert.nnx(nnx.Sequential(*layers), convert.Rule("layers/0", "mxfp8"))
    found = explain(model, jax.ShapeDtypeStruct((16, 64), "float32"))
    assert [row.why for row in found.high] == ["no rule converts its layer"]
    assert [place.path for row in found.high for place in row.places] == ["layers/1"]


def test_the_share_counts_every_step_of_a_scan():
    """Three quantized products in a scan, and one in float32 of the same size outside."""
    x, stack = jnp.ones((8, 64)), jnp.ones((3, 64, 64))

    def run(x, stack):
        x, _ = jax.lax.scan(lambda x, w: (mx_jax.matmul(x, w, recipe="mxfp8"), None), x, stack)
        return x @ stack[0]

    assert explain(run, x, stack).quantized_share == pytest.approx(3 / 4)
