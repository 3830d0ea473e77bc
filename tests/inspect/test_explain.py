"""explain: each cast and product, how often, where, who takes it and why no other backend does."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mx_jax
import mx_jax.nn.linen as mx
from mx_jax import convert, recipes
from mx_jax.backends.select import current_target, only_backend
from mx_jax.backends.target import Target
from mx_jax.inspect import Explanation
from mx_jax.ops.quantize import quantize_both
from tests.backends.mosaic import with_any_jax
from tests.needs import needs_library

H200 = Target(platform="cuda", compute_capability=(9, 0))
X, W = jax.ShapeDtypeStruct((8, 64), "float32"), jax.ShapeDtypeStruct((64, 32), "float32")
ROWS, SQUARE = (jax.ShapeDtypeStruct((n, 64), "float32") for n in (16, 64))
PLAIN = "xla_bfloat16 (XLA bfloat16 dot, float32 sums)"
E4M3 = "mxfp8_e4m3 (rceil, nearest) in blocks of 32 along axis"
explain = mx_jax.inspect.explain


def kinds(result: Explanation) -> list[tuple[str, int]]:
    return [(row.kind, row.times) for row in result.rows]


def takers(result: Explanation) -> list[str]:
    """Who computes the products."""
    return [row.backend for row in result.rows for _ in range(row.times) if "product" in row.kind]


def loss(x: jax.Array, w: jax.Array) -> jax.Array:
    return mx_jax.matmul(x, w, recipe=recipes.mxfp8()).sum()


def test_the_target_decides():
    """A pure function: what a GPU would do is known on a machine without one."""
    recipe = recipes.float8_rowwise()
    result = explain(recipe, 8, 64, 32, target=H200)
    assert takers(result) == 3 * ["xla"] and takers(explain(recipe, 8, 64, 32)) != 3 * ["xla"]
    assert result.machine == "on platform=cuda, compute_capability=(9, 0), num_devices=1"
    assert explain(recipe, 8, 64, 32) == explain(recipe, 8, 64, 32, target=current_target())


def by_weights(x: jax.Array, w: mx_jax.PackedMXArray) -> jax.Array:
    return mx_jax.matmul(x, w, recipe=recipes.weight_only("mxfp4"))


def test_what_waits_for_its_name(monkeypatch: pytest.MonkeyPatch):
    """Backends behind the reference: by default not asked, but shown."""
    with_any_jax(monkeypatch)
    b200 = Target(platform="cuda", compute_capability=(10, 0))
    with mx_jax.testing.target("cuda", (10, 0)):
        result = explain(recipes.mxfp8(), 8, 64, 32, dtype="bfloat16")
        assert result == explain(recipes.mxfp8(), 8, 64, 32, dtype="bfloat16", target=b200)
    # The third contracts eight rows, which are no whole block.
    assert takers(result) == ["xla_scaled", "xla_scaled", "xla_bfloat16"]
    assert "takes it if named" not in str(result)
    with mx_jax.testing.target("cuda", (9, 0)):
        with mx_jax.prefer_backends("pallas_gpu"):
            packed = mx_jax.pack_weights(mx_jax.quantize(jnp.ones((64, 32)), "mxfp4", axis=0))
            named = explain(by_weights, jnp.ones((8, 64), jnp.bfloat16), packed)
        result = explain(by_weights, jnp.ones((8, 64), jnp.bfloat16), packed)
    line = "  pallas_gpu takes it if named, by prefer_backends('pallas_gpu'): nothing was measured"
    assert str(result).count(line) == 1
    assert takers(named) == ["pallas_gpu"] and "takes it if named" not in str(named)


def test_only_backend_is_seen():
    with only_backend("reference"):
        result = explain(recipes.float8_rowwise(), 8, 64, 32, target=H200)
    assert takers(result) == 3 * ["reference"]
    assert str(result).count("xla_bfloat16, xla_rounded: not asked: only_backend('reference')") == 9
    with only_backend("xla"), pytest.raises(ValueError, match="no backend takes Quantize"):
        explain(recipes.mxfp4(), 8, 64, 32, target=H200)


def test_every_cast_and_product_of_a_call():
    """What training does, in its order: the operands as they lie, the cotangent cast twice."""
    with mx_jax.testing.target("tpu"):
        result = explain(jax.value_and_grad(loss, (0, 1)), X, W)
    assert [line for line in str(result).splitlines()[:-1] if line[0] != " "] == [
        f"1 x cast float32 [8, 64] to {E4M3} -1 -> reference",
        f"1 x cast float32 [64, 32] to {E4M3} -2 -> reference",
        "1 x product mxfp8_e4m3 [8, 64] x mxfp8_e4m3 [64, 32] over axes [1] and [0], to float32 "
        f"-> {PLAIN}",
        f"1 x cast float32 [8, 32] to {E4M3} -1 -> reference",
        f"1 x cast float32 [8, 32] to {E4M3} -2 -> reference",
        f"1 x cast float32 [64, 32] to {E4M3} -1 -> reference",
        "1 x product mxfp8_e4m3 [8, 32] x mxfp8_e4m3 [64, 32] over axes [1] and [1], to float32 "
        f"-> {PLAIN}",
        f"1 x cast float32 [8, 64] to {E4M3} -2 -> reference",
        "1 x product mxfp8_e4m3 [8, 64] x mxfp8_e4m3 [8, 32] over axes [0] and [0], to float32 "
        f"-> {PLAIN}",
    ]


@needs_library
def test_weights_that_are_packed_for_nothing():
    def serve(x: jax.Array, w: Any) -> jax.Array:
        packed = mx_jax.pack_weights(mx_jax.quantize(w, "mxfp4", axis=0))
        with only_backend("reference"):
            return mx_jax.matmul(x, packed, recipe=recipes.weight_only("mxfp4"))

    with mx_jax.testing.target("cpu"):
        (row,) = explain(serve, X, W).rows[-1:]
    assert row.backend == "reference"
    assert row.how.endswith("weights packed for cpu_ffi are unpacked at every call")


def test_several_devices():
    """As the arguments, or a mesh in context, say; TPUs' compiler is told nothing of codes."""
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    with mx_jax.testing.target("tpu", num_devices=8), jax.set_mesh(mesh):
        result = explain(jax.grad(loss, (0, 1)), X, W)
    assert result.machine.endswith("whose parts are XLA's: TPUs have no custom partitioning")
    assert not any("codes move" in row.how for row in result.rows)
    cut = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=NamedSharding(mesh, P("fsdp")))
    result = explain(loss, cut, W)
    assert result.machine == "on platform=cpu, num_devices=8"
    assert all(row.how.endswith("codes move between devices") for row in result.rows)
    assert explain(loss, X, W).machine == "on platform=cpu, num_devices=1"


@pytest.mark.parametrize(
    ("args", "kwargs", "got"),
    [
        ((), {}, "()"),
        ((16, 64, 32), {"m": 8}, "(16, 64, 32, m=8)"),
        ((2.5, 64, 32), {}, "(2.5, 64, 32)"),
        ((16, -64, 32), {}, "(16, -64, 32)"),
        ((16, 64, 32), {"backward": True}, "(16, 64, 32, backward=True)"),
        # As of a function: its arguments.
        ((X, X), {}, "((8, 64), (8, 64))"),
    ],
)
def test_a_recipe_needs_its_sizes(args: tuple[Any, ...], kwargs: dict[str, Any], got: str):
    with pytest.raises(TypeError) as raised:
        explain("mxfp8", *args, **kwargs)
    assert str(raised.value) == (
        "explain: a recipe needs the sizes of a product [m, k] @ [k, n], whole, 0 or more, and "
        f"takes a dtype, got recipe='mxfp8' with {got}; give them, as in explain('mxfp8', 16, "
        "4096, 4096), or explain a function that multiplies with the recipe, and its arguments"
    )


def test_sizes_by_name_and_open_ones():
    with pytest.raises(TypeError, match="explain: recipe must be a Recipe"):
        explain(None, 8, 64, 32)
    m: Any = jax.export.symbolic_shape("m")[0]
    wide: Any = np.int64(64)
    assert explain("mxfp8", n=32, m=8, k=wide) == explain("mxfp8", 8, 64, 32)
    for size in (m, 0):
        first = explain("mxfp8", size, 64, 32).rows[0].work
        assert first.startswith(f"cast float32 [{size}, 64]")


def test_casts_products_and_what_stays():
    def function(x: jax.Array, w: jax.Array) -> Any:
        y = mx_jax.matmul(x, w, recipe="mxfp4")
        return y @ w, mx_jax.matmul(x, w, recipe=recipes.high_precision())

    with mx_jax.testing.target("tpu"):
        result = explain(function, ROWS, SQUARE)
    assert kinds(result) == [("cast", 1), ("cast", 1), ("product", 1)] + 2 * [("high precision", 1)]
    cast, _, product, plain, kept = result.rows
    assert product.flops == plain.flops == 2 * 16 * 64 * 64
    assert result.quantized_share == pytest.approx(1 / 3)
    (why,) = plain.reasons
    assert why.startswith("no recipe reaches it: test_explain.py:")
    assert why.endswith("(test_casts_products_and_what_stays.<locals>.function)")
    assert kept.reasons == ("its recipe keeps both operands in high precision",)
    assert any(reason.startswith("not cpu_ffi: runs on platform=cpu") for reason in cast.reasons)
    assert result.machine.startswith("on platform=tpu")


@needs_library
def test_a_cast_along_both_axes_is_one():
    with mx_jax.testing.target("cpu"):
        (row,) = explain(lambda x: quantize_both(x, "mxfp8_e4m3"), ROWS).rows
    assert row.backend == "cpu_ffi" and " along axis -1; with it cast " in row.work


def test_equal_calls_are_counted():
    """Calls that share a trace, and every step of a scan."""

    @jax.jit
    def layer(x: jax.Array, w: jax.Array) -> jax.Array:
        return mx_jax.matmul(x, w, recipe="mxfp8")

    def deep(x: jax.Array, w: jax.Array) -> jax.Array:
        x = layer(layer(x, w), w)
        return jax.lax.scan(lambda x, _: (layer(x, w) + x @ w, None), x, None, length=3)[0]

    result = explain(deep, ROWS, SQUARE)
    assert kinds(result) == [("cast", 5), ("cast", 5), ("product", 5), ("high precision", 3)]
    assert result.quantized_share == pytest.approx(5 / 8)
    assert kinds(explain(lambda x, w: x @ w @ w, ROWS, SQUARE)) == [("high precision", 2)]
    lanes = explain(
        jax.vmap(layer, (0, None)), jax.ShapeDtypeStruct((3, 16, 64), "float32"), SQUARE
    )
    assert kinds(lanes) == [("cast", 3), ("cast", 1), ("product", 3)]


def test_what_is_computed_again_is_counted_again():
    layer = jax.checkpoint(lambda x, w: jnp.sin(mx_jax.matmul(x, w, recipe="mxfp8")))
    again = explain(layer, ROWS, SQUARE, backward=True)
    products = [row.times for row in again.rows if row.kind == "product"]
    assert sum(products) == 4


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        x = nn.Dropout(0.1, deterministic=not train)(mx.Dense(64, recipe="mxfp8", name="up")(x))
        return nn.Dense(8, name="head")(x)


def test_a_linen_module_and_its_layers():
    result = explain(Net(), ROWS)
    places = {row.kind: row.places[0].path for row in result.rows}
    assert "up" in places["product"] and "up" in places["cast"]
    assert places["high precision"].endswith("head")
    assert "no recipe reaches it: test_explain.py:" in result.high[0].reasons[0]
    # Flags stay Python values, and a model has its streams of random numbers.
    gradients = explain(Net(), ROWS, train=True, backward=True)
    # Of the head's weights and of its input, which the layer below needs.
    assert sum(row.times for row in gradients.high) == 3


def test_an_nnx_model_with_a_layer_that_no_rule_converts():
    layers = (nnx.Linear(64, 64, rngs=nnx.Rngs(0)), nnx.Linear(64, 8, rngs=nnx.Rngs(1)))
    model = convert.nnx(nnx.Sequential(*layers), convert.Rule("layers/0", "mxfp8"))
    result = explain(model, ROWS, backward=True)
    assert [row.times for row in result.rows if row.kind == "product"] == [1, 1, 1]
    assert {row.reasons for row in result.high} == {("no rule converts its layer",)}
    assert {place.path for row in result.high for place in row.places} == {"layers/1"}
    assert sum(row.times for row in result.high) == 3


def test_reasons_of_what_stays_high():
    def function(x: jax.Array, image: jax.Array) -> Any:
        convolved = jax.lax.conv(image, jnp.ones((4, 3, 3, 3)), (1, 1), "SAME")
        nothing = mx_jax.einsum("bk,bk->bk", x, x, recipe="mxfp8")
        integers = jnp.ones((4, 4), jnp.int32) @ jnp.ones((4, 4), jnp.int32)
        return convolved, nothing, integers

    result = explain(function, ROWS, jax.ShapeDtypeStruct((1, 3, 8, 8), "float32"))
    convolution = next(row for row in result.high if row.work.startswith("conv"))
    assert convolution.flops == 2 * (4 * 8 * 8) * (3 * 3 * 3)
    assert not any("int32" in row.work for row in result.rows)
    key = jax.random.key(0)
    recipe = recipes.nvfp4_pretraining()
    transposed = explain(
        lambda x, w: mx_jax.matmul(x, w, recipe=recipe, key=key), ROWS, SQUARE, backward=True
    )
    assert not transposed.high
    transforms = [row for row in transposed.rows if row.kind == "transform"]
    assert [(row.work, row.times) for row in transforms] == [
        (f"Hadamard transform of float32 {list(ROWS.shape)}", 2)
    ]


def test_printed():
    """And who does not explain has the same program, from the same caches."""
    layer = jax.jit(lambda x: mx_jax.matmul(x, x.T, recipe="mxfp8"))
    before = layer.lower(jnp.ones((16, 64))).as_text(debug_info=True)
    text, result = str(explain(layer, ROWS)), explain(Net(), ROWS)
    assert "1 x product mxfp8_e4m3 [16, 64] x mxfp8_e4m3 [64, 16]" in text
    assert layer.lower(jnp.ones((16, 64))).as_text(debug_info=True) == before
    assert str(result).endswith(result.summary) and "% of the flops are quantized" in result.summary
