"""explain: each cast and product, how often, where, who takes it and why no other backend does."""

import io
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from rich.console import Console

import mx_jax
import mx_jax.nn.linen as mx
from mx_jax import convert, recipes
from mx_jax.backends.calls import MatmulCall
from mx_jax.backends.select import MARK, current_target, only_backend, recording
from mx_jax.backends.target import Target
from mx_jax.inspect import Explanation
from mx_jax.ops.quantize import quantize_both
from tests.backends.mosaic import with_any_jax
from tests.needs import needs_library

CPU = Target(platform="cpu", num_devices=8)
H200 = Target(platform="cuda", compute_capability=(9, 0))
explain = mx_jax.inspect.explain
explain_call = mx_jax.inspect.explain_call


def titles(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith("  ")]


def test_the_target_decides():
    """A pure function: what a GPU would do is known on a machine without one."""
    recipe = recipes.float8_rowwise()
    assert explain(recipe, 8, 64, 32, target=CPU).count("-> reference") == 3
    text = explain(recipe, 8, 64, 32, target=H200)
    assert text.count("-> xla") == 3 and "not " not in text
    assert explain(recipe, 8, 64, 32) == explain(recipe, 8, 64, 32, target=current_target())


def test_what_waits_for_its_name(monkeypatch: pytest.MonkeyPatch):
    """Backends behind the reference: by default not asked, but shown."""
    with_any_jax(monkeypatch)
    b200 = Target(platform="cuda", compute_capability=(10, 0))
    with mx_jax.testing.target("cuda", (10, 0)):
        text = explain(recipes.mxfp8(), 8, 64, 32, dtype="bfloat16")
        assert text == explain(recipes.mxfp8(), 8, 64, 32, dtype="bfloat16", target=b200)
    # The third contracts eight rows, which are no whole block.
    assert text.count("-> xla_scaled (JAX's scaled dot)") == 2
    assert text.count("-> xla_bfloat16 (XLA bfloat16 dot, float32 sums)") == 1
    line = "  pallas_gpu takes it if named, by prefer_backends('pallas_gpu'): nothing was measured"
    assert text.count(line) == 3
    with mx_jax.prefer_backends("pallas_gpu"):
        named = explain(recipes.mxfp8(), 8, 64, 32, dtype="bfloat16", target=b200)
    assert named.count("-> pallas_gpu") == 3 and "takes it if named" not in named


def test_only_backend_is_seen():
    with only_backend("reference"):
        text = explain(recipes.float8_rowwise(), 8, 64, 32, target=H200)
    assert text.count("-> reference") == 3
    assert text.count("  not xla: not asked: only_backend('reference')") == 3
    with only_backend("xla"), pytest.raises(ValueError, match="no backend takes Quantize"):
        explain(recipes.mxfp4(), 8, 64, 32, target=H200)


def loss(x: jax.Array, w: jax.Array) -> jax.Array:
    return mx_jax.matmul(x, w, recipe=recipes.mxfp8()).sum()


X, W = jax.ShapeDtypeStruct((8, 64), "float32"), jax.ShapeDtypeStruct((64, 32), "float32")
PLAIN = "xla_bfloat16 (XLA bfloat16 dot, float32 sums)"
E4M3 = "mxfp8_e4m3 (rceil, nearest) in blocks of 32 along axis"


def test_every_cast_and_product_of_a_call():
    """What training does, in its order: the operands as they lie, the cotangent cast twice."""
    with mx_jax.testing.target("tpu"):
        text = explain_call(jax.grad(loss, (0, 1)), X, W)
    assert titles(text) == [
        "on platform=tpu, num_devices=1",
        f"cast float32 [8, 64] to {E4M3} -1 -> reference",
        f"cast float32 [64, 32] to {E4M3} -2 -> reference",
        "product mxfp8_e4m3 [8, 64] x mxfp8_e4m3 [64, 32] over axes [1] and [0], to float32 "
        f"-> {PLAIN}",
        f"cast float32 [8, 32] to {E4M3} -1; with it cast float32 [8, 32] to {E4M3} -2 "
        "-> two casts",
        f"cast float32 [8, 32] to {E4M3} -1 -> reference",
        f"cast float32 [8, 32] to {E4M3} -2 -> reference",
        f"cast float32 [64, 32] to {E4M3} -1 -> reference",
        "product mxfp8_e4m3 [8, 32] x mxfp8_e4m3 [64, 32] over axes [1] and [1], to float32 "
        f"-> {PLAIN}",
        f"cast float32 [8, 64] to {E4M3} -2 -> reference",
        "product mxfp8_e4m3 [8, 64] x mxfp8_e4m3 [8, 32] over axes [0] and [0], to float32 "
        f"-> {PLAIN}",
    ]
    assert "  not reference: casts once at a time" in text.splitlines()


def test_no_trace_answers_for_another():
    """What is traced already is traced again, and what was recorded is not run by later calls."""
    step = jax.jit(jax.grad(loss))
    step(jnp.ones(X.shape), jnp.ones(W.shape))
    first = explain_call(step, X, W)
    assert first.count("\nproduct") == 3 and explain_call(step, X, W) == first
    with recording() as recorder:
        step(jnp.ones(X.shape), jnp.ones(W.shape))
    assert sum(isinstance(s.call, MatmulCall) for s in recorder.selections) == 3
    seen = len(recorder.entries)
    step(jnp.ones(X.shape), jnp.ones(W.shape))
    assert len(recorder.entries) == seen, "nobody records"


@needs_library
def test_weights_that_are_packed_for_nothing():
    """Unpacking at every call is told where it is explained, and warned of where it is done."""

    def serve(x: jax.Array, w: Any) -> jax.Array:
        packed = mx_jax.pack_weights(mx_jax.quantize(w, "mxfp4", axis=0))
        with only_backend("reference"):
            return mx_jax.matmul(x, packed, recipe=recipes.weight_only("mxfp4"))

    with mx_jax.testing.target("cpu"):
        lines = titles(explain_call(serve, X, W))
        with pytest.warns(UserWarning, match="unpacked at every call"):
            jax.eval_shape(serve, X, W)
    assert "pack mxfp4 [64, 32] for axes [0] -> cpu_ffi" in lines
    (remark,) = (line for line in lines if "unpacked at every call" in line)
    assert lines.index(remark) == 4 and "belongs to backend cpu_ffi, and reference takes" in remark


def test_several_tpus():
    """XLA splits what it computes, and moves what it likes; nobody says that codes move."""
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    with mx_jax.testing.target("tpu", num_devices=8), jax.set_mesh(mesh):
        text = explain_call(jax.grad(loss, (0, 1)), X, W)
    answers = [line.partition(" -> ")[2] for line in titles(text)[1:]]
    assert answers and "codes and scales" not in text
    assert all("split between devices by XLA: TPUs have no custom" in answer for answer in answers)


def test_experts():
    """Casts of a ragged product are selected, and its products."""

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        return mx_jax.ragged_dot(x, w, jnp.array([3, 5]), recipe=recipes.mxfp8()).sum()

    experts = jax.ShapeDtypeStruct((2, 64, 32), "float32")
    with mx_jax.testing.target("tpu"):
        lines = titles(explain_call(jax.grad(loss, (0, 1)), X, experts))
    first, *rest = (line for line in lines if line.startswith("ragged"))
    operands = "mxfp8_e4m3 [8, 64] x mxfp8_e4m3 [2, 64, 32], 2 groups"
    assert first == f"ragged product {operands}, to float32 -> {PLAIN}" and len(rest) == 2
    assert sum(line.startswith("cast") for line in lines) == 6


def test_what_stays_as_it_is_is_not_told():
    assert explain_call(jnp.matmul, X, W) == ""
    with pytest.raises(ValueError, match="contracting sizes must agree"):
        explain_call(mx_jax.matmul, X, X, recipe="mxfp8")


FEW = jax.ShapeDtypeStruct((4, 64), "float32")


@pytest.mark.parametrize(
    ("args", "kwargs", "got"),
    [
        ((), {}, "()"),
        ((16, 64, 32), {"m": 8}, "(16, 64, 32, m=8)"),
        ((2.5, 64, 32), {}, "(2.5, 64, 32)"),
        ((16, 64, 32), {"backward": True}, "(16, 64, 32, backward=True)"),
        # As of a function: its arguments.
        ((FEW, FEW), {}, "(ShapeDtypeStruct [4, 64], ShapeDtypeStruct [4, 64])"),
    ],
)
def test_a_recipe_needs_its_sizes(args: tuple[Any, ...], kwargs: dict[str, Any], got: str):
    with pytest.raises(TypeError) as raised:
        explain("mxfp8", *args, **kwargs)
    assert str(raised.value) == (
        "explain: a recipe needs the whole sizes of a product [m, k] @ [k, n], and takes a dtype, "
        f"got recipe='mxfp8' with {got}; give them, as in explain('mxfp8', 16, 4096, 4096), or "
        "explain a function that multiplies with the recipe, and its arguments"
    )


def test_what_cannot_be_explained():
    with pytest.raises(TypeError, match="explain: recipe must be a Recipe"):
        explain(None, 8, 64, 32)
    for m, k, n in ((-1, 64, 32), (16, -64, 32), (16, 64, -1)):
        message = rf"must be 0 or more, got m={m}, k={k}, n={n}; an open"
        with pytest.raises(ValueError, match=message):
            explain("mxfp8", m, k, n)


def test_sizes_by_name_and_open_ones():
    m: Any = jax.export.symbolic_shape("m")[0]
    wide: Any = np.int64(64)
    assert explain("mxfp8", n=32, m=8, k=wide) == explain("mxfp8", 8, 64, 32)
    assert titles(explain("mxfp8", m, 64, 32))[0].startswith("output [m, 64] x [32, 64]: ")
    assert titles(explain("mxfp8", 0, 64, 32))[0].startswith("output [0, 64] x [32, 64]: ")


ROWS, SQUARE = (jax.ShapeDtypeStruct((n, 64), "float32") for n in (16, 64))


def kinds(found: Explanation) -> list[tuple[str, int]]:
    return [(row.kind, row.times) for row in found.rows]


def test_casts_products_and_what_stays():
    def function(x: jax.Array, w: jax.Array) -> Any:
        y = mx_jax.matmul(x, w, recipe="mxfp4")
        return y @ w, mx_jax.matmul(x, w, recipe=recipes.high_precision())

    with mx_jax.testing.target("tpu"):
        found = explain(function, ROWS, SQUARE)
    assert kinds(found) == [("cast", 1), ("cast", 1), ("product", 1)] + 2 * [("high precision", 1)]
    cast, _, product, own, kept = found.rows
    assert product.flops == own.flops == 2 * 16 * 64 * 64
    assert found.quantized_share == pytest.approx(1 / 3)
    # Four bits and a byte for 32 of them; results are float32.
    assert product.bytes == (16 * 64 + 64 * 64) * 4.25 / 8 + 16 * 64 * 4
    assert cast.bytes == 16 * 64 * (4 + 4.25 / 8)
    assert own.bytes == (16 * 64 + 64 * 64 + 16 * 64) * 4
    assert own.why.startswith("no recipe reaches it: test_explain.py:")
    assert own.why.endswith("(test_casts_products_and_what_stays.<locals>.function)")
    assert kept.why == "its recipe keeps both operands in high precision"
    assert any(reason.startswith("not cpu_ffi: runs on platform=cpu") for reason in cast.reasons)
    assert found.machine.startswith("on platform=tpu")


@needs_library
def test_a_cast_along_both_axes_reads_its_values_once():
    with mx_jax.testing.target("cpu"):
        (row,) = explain(lambda x: quantize_both(x, "mxfp8_e4m3"), ROWS).rows
    assert row.backend == "cpu_ffi" and " along axis -1; with it cast " in row.work
    assert row.bytes == 16 * 64 * (4 + 2 * 8.25 / 8)


def test_equal_calls_are_counted():
    """Calls that share a trace, and every step of a scan."""

    @jax.jit
    def layer(x: jax.Array, w: jax.Array) -> jax.Array:
        return mx_jax.matmul(x, w, recipe="mxfp8")

    def deep(x: jax.Array, w: jax.Array) -> jax.Array:
        x = layer(layer(x, w), w)
        return jax.lax.scan(lambda x, _: (layer(x, w) + x @ w, None), x, None, length=3)[0]

    found = explain(deep, ROWS, SQUARE)
    assert kinds(found) == [("cast", 5), ("cast", 5), ("product", 5), ("high precision", 3)]
    assert found.quantized_share == pytest.approx(5 / 8)
    assert kinds(explain(lambda x, w: x @ w @ w, ROWS, SQUARE)) == [("high precision", 2)]


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
    found = explain(Net(), ROWS)
    places = {row.kind: row.places[0].path for row in found.rows}
    assert "up" in places["product"] and "up" in places["cast"]
    assert places["high precision"].endswith("head")
    assert "no recipe reaches it: test_explain.py:" in found.high[0].why
    # Flags stay Python values, and a model has its streams of random numbers.
    gradients = explain(Net(), ROWS, train=True, backward=True)
    # Of the head's weights and of its input, which the layer below needs.
    assert sum(row.times for row in gradients.high) == 3


def test_an_nnx_model_with_a_layer_that_no_rule_converts():
    layers = (nnx.Linear(64, 64, rngs=nnx.Rngs(0)), nnx.Linear(64, 8, rngs=nnx.Rngs(1)))
    model = convert.nnx(nnx.Sequential(*layers), convert.Rule("layers/0", "mxfp8"))
    found = explain(model, ROWS, backward=True)
    assert [row.times for row in found.rows if row.kind == "product"] == [1, 1, 1]
    assert {row.why for row in found.high} == {"no rule converts its layer"}
    assert {place.path for row in found.high for place in row.places} == {"layers/1"}
    assert sum(row.times for row in found.high) == 3


def test_reasons_of_what_stays_high():
    def function(x: jax.Array, image: jax.Array) -> Any:
        convolved = jax.lax.conv(image, jnp.ones((4, 3, 3, 3)), (1, 1), "SAME")
        nothing = mx_jax.einsum("bk,bk->bk", x, x, recipe="mxfp8")
        integers = jnp.ones((4, 4), jnp.int32) @ jnp.ones((4, 4), jnp.int32)
        return convolved, nothing, integers

    found = explain(function, ROWS, jax.ShapeDtypeStruct((1, 3, 8, 8), "float32"))
    convolution = next(row for row in found.high if row.work.startswith("conv"))
    assert convolution.flops == 2 * (4 * 8 * 8) * (3 * 3 * 3)
    assert not any("int32" in row.work for row in found.rows)
    key = jax.random.key(0)
    recipe = recipes.nvfp4_pretraining()
    turned = explain(
        lambda x, w: mx_jax.matmul(x, w, recipe=recipe, key=key), ROWS, SQUARE, backward=True
    )
    assert not turned.high
    transforms = [row for row in turned.rows if row.kind == "transform"]
    assert [(row.work, row.times) for row in transforms] == [
        (f"Hadamard transform of float32 {list(ROWS.shape)}", 2)
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
    found = explain(Net(), ROWS)
    text = str(found)
    assert "1 x product mxfp8_e4m3 [16, 64] x mxfp8_e4m3 [64, 64]" in text
    assert text.endswith(found.summary) and "% of the flops are quantized" in found.summary
    console = Console(width=150, record=True, file=io.StringIO())
    console.print(found)
    table = console.export_text()
    assert "Casts and products" in table
    assert table.count("quantizes nothing: XLA fuses") == 1, "a reason that rows share is told once"
    assert found.summary in table
