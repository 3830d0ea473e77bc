"""Quantized kernels, packed or not, in layers of mx_jax.nn and in converted models of Flax.

What is compiled is tested, not only the values: an unpacked or requantized kernel gives nearly the
same numbers, slowly.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.errors as flax_errors
import flax.linen as flax_nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

import mx_jax
from mx_jax import convert, recipes
from mx_jax.backends.cpu_ffi import products
from mx_jax.mxarray import MXArray
from mx_jax.nn import linen, nnx
from mx_jax.packed import PackedMXArray
from mx_jax.reference.hadamard import Hadamard
from mx_jax.testing.compare import assert_bitwise_equal
from tests.needs import needs_library
from tests.nn.layers import CASES, Case, Linen, Nnx, Runs
from tests.quick import quick

# Kernels are stored in a format that the recipe does not have: to quantize one again shows.
STORED = "mxfp8_e4m3"
RECIPE = recipes.weight_only("mxfp4")
RULE = convert.Rule(".*", RECIPE)
pytestmark = pytest.mark.usefixtures("insist", "kernels_alone")


def params_of(case: Case) -> dict[str, Any]:
    kernel = case.stored(draw(*case.kernel), STORED)
    return {"kernel": kernel, "bias": draw(*case.bias, seed=1)}


def pack(case: Case, kernel: MXArray) -> PackedMXArray:
    packed = mx_jax.pack_weights(
        kernel, contracting=case.contracting, num_batch=case.num_batch, recipe=RECIPE
    )
    assert isinstance(packed, PackedMXArray)
    return packed


cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def draw(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


# From a case to a function of parameters and input.
WAYS: dict[str, Callable[[Case], Runs]] = {
    "linen": lambda case: Linen().run(Linen().build(case, RECIPE)),
    "nnx": lambda case: Nnx().run(Nnx().build(case, RECIPE)),
    "convert.linen": lambda case: Linen().run(convert.linen(Linen().build(case), RULE)),
    "convert.nnx": lambda case: Nnx().run(convert.nnx(Nnx().build(case), RULE)),
}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def num_calls(run: Runs, *args: Any, target: str = products.PACKED_MATMUL) -> int:
    return jax.jit(run).lower(*args).as_text().count(f"@{target}(")


@pytest.mark.slow(but="dense|einsum")
@needs_library
@ways
@cases
def test_the_product_reads_what_is_stored(case: Case, way: Any):
    """One call of the packed product; of an MXArray, one of the product, on its own codes."""
    params, x, run = params_of(case), draw(*case.x, seed=2), way(case)
    assert num_calls(run, params, x, target=products.MATMUL) == 1
    expected = case.multiply(x, params, RECIPE)
    assert_bitwise_equal(jax.jit(run)(params, x), expected, what="MXArray")
    packed = params | {"kernel": pack(case, params["kernel"])}
    assert num_calls(run, packed, x) == 1
    assert num_calls(run, packed, x, target=products.MATMUL) == 0
    assert_bitwise_equal(jax.jit(run)(packed, x), expected, what="packed")


# Stacks of layers ---------------------------------------------------------------------------------

NUM_LAYERS = 3


class Stack(flax_nn.Module):
    """Layers in nn.scan."""

    remat: bool

    @flax_nn.compact
    def __call__(self, x):
        block = flax_nn.remat(Block) if self.remat else Block
        scan = flax_nn.scan(
            block, variable_axes={"params": 0}, split_rngs={"params": True}, length=NUM_LAYERS
        )
        return scan(name="stack")(x, None)[0]


class Block(flax_nn.Module):
    @flax_nn.compact
    def __call__(self, x, _):
        return flax_nn.relu(linen.Dense(64, recipe=RECIPE, name="layer")(x)), None


def linen_stack(remat: bool, params: Any) -> tuple[Any, Runs]:
    return {"stack": {"layer": params}}, Linen().run(Stack(remat))


def nnx_stack(converts: bool, params: Any) -> tuple[Any, Runs]:
    """nnx.vmap makes the layers, nnx.scan runs them."""
    make = flax_nnx.Linear if converts else functools.partial(nnx.Linear, recipe=RECIPE)
    model = flax_nnx.vmap(lambda rngs: make(64, 64, rngs=rngs))(flax_nnx.Rngs(0).split(NUM_LAYERS))
    if converts:
        model = convert.nnx(model, RULE)
    for name, value in params.items():
        getattr(model, name).set_value(value)
    graph, state = flax_nnx.split(model)

    @flax_nnx.scan(in_axes=(0, flax_nnx.Carry), out_axes=flax_nnx.Carry)
    def run(layer, x):
        return flax_nnx.relu(layer(x))

    return state, lambda state, x: run(flax_nnx.merge(graph, state), x)


@needs_library
@pytest.mark.parametrize(
    ("stack", "option"),
    [(linen_stack, False), (linen_stack, True), (nnx_stack, False), (nnx_stack, True)],
    ids=["linen", "remat", "nnx", "convert.nnx"],
)
def test_a_scanned_stack(stack: Any, option: bool):
    """Packed as one array, of which scan slices every leaf: each slice is a packed matrix."""
    kernels = mx_jax.quantize(draw(NUM_LAYERS, 64, 64), STORED, axis=1)
    bias, x = draw(NUM_LAYERS, 64, seed=1), draw(2, 64, seed=2)
    packed = mx_jax.pack_weights(kernels, num_batch=1)
    stored, run = stack(option, {"kernel": packed, "bias": bias})
    assert num_calls(run, stored, x) == 1
    expected = x
    for layer in range(NUM_LAYERS):
        product = mx_jax.matmul(expected, kernels[layer], recipe=RECIPE)
        expected = jax.nn.relu(product + bias[layer])
    assert_bitwise_equal(jax.jit(run)(stored, x), expected, what="packed")


# Kernels that a layer cannot use ------------------------------------------------------------------


ESCAPE = str.maketrans({"(": r"\(", ")": r"\)"})
LAYERS = {
    "linen": "in layer '' (Dense)",
    "nnx": "in layer Linear",
    "convert.linen": "in layer '' (Dense), converted by rule 0",
    "convert.nnx": "in layer '' (Linear), converted by rule 0",
}


@needs_library
@pytest.mark.parametrize("packed", [False, True], ids=["MXArray", "packed"])
@pytest.mark.parametrize("way", WAYS)
def test_blocks_along_another_axis(way: str, packed: bool):
    """The error has the axes and the remedy; its notes, the layer."""
    case = CASES["dense"]
    kernel: Any = mx_jax.quantize(draw(*case.kernel), STORED, axis=1)
    if packed:
        kernel = mx_jax.pack_weights(kernel)
    stored = params_of(case) | {"kernel": kernel}
    complaint = r"contracted along axis=0, but this .*blocks along axis=1; quantize it with axis=0"
    with pytest.raises(ValueError, match=complaint) as caught:
        jax.eval_shape(WAYS[way](case), stored, draw(*case.x))
    assert LAYERS[way] in caught.value.__notes__


@needs_library
def test_a_recipe_that_transforms():
    case, transform = CASES["dense"], Hadamard(size=32, signs=(1,) * 32)
    output = dataclasses.replace(recipes.mxfp4().output, transform=transform)
    recipe = recipes.mxfp4().with_(output=output)
    run = Linen().run(Linen().build(case, recipe))
    complaint = "the recipe transforms its operands.*pass dequantize.., or a recipe without trans"
    with pytest.raises(ValueError, match=complaint):
        jax.eval_shape(run, params_of(case), draw(*case.x))


@needs_library
@pytest.mark.parametrize("way", ["linen", "convert.linen"])
@cases
def test_linen_wants_the_declared_shape(case: Case, way: str):
    params = params_of(case)
    other = mx_jax.quantize(draw(*case.kernel, 32), STORED)
    for kernel in (other, mx_jax.pack_weights(other)):
        stored = params | {"kernel": kernel}
        shapes = f"shape {case.kernel}, but .* has shape {other.shape}".translate(ESCAPE)
        with pytest.raises(flax_errors.ScopeParamShapeError, match=shapes):
            jax.eval_shape(WAYS[way](case), stored, draw(*case.x))


@needs_library
@ways
def test_a_layout_for_other_products(way: Any):
    """Right, but slow: the warning has both layouts and the remedy."""
    once = mx_jax.quantize(draw(64, 2, 24), STORED, axis=0)
    packed = mx_jax.pack_weights(once)
    case = dataclasses.replace(
        CASES["batch"],
        linen=("Einsum", (64, 2, 24), "tbk,kbn->tbn"),
        nnx=("Einsum", "tbk,kbn->tbn", (64, 2, 24)),
        options={"linen": {"use_bias": False}},
    )
    run = way(case)
    complaint = (
        r"laid out for contracting=\(0,\), num_batch=0, .*product has contracting=\(0,\), "
        r"batch=\(1,\); pack the MXArray with pack_weights\(..., contracting=\(0,\), num_batch=1\)"
    )
    x = draw(3, 2, 64)
    with pytest.warns(UserWarning, match=complaint):
        product = jax.jit(run)({"kernel": packed}, x)
    assert_bitwise_equal(product, mx_jax.einsum("tbk,kbn->tbn", x, once, recipe=RECIPE))


# Other modules ------------------------------------------------------------------------------------


@needs_library
def test_unconverted_nnx_warns():
    """Flax's own promote_dtype asks for an array: right, slow, and said."""
    case = CASES["dense"]
    params, x = params_of(case), draw(*case.x)
    packed = params | {"kernel": pack(case, params["kernel"])}
    with pytest.warns(UserWarning, match="is unpacked and dequantized, which is slow: only mx_jax"):
        actual = jax.jit(Nnx().run(Nnx().build(case)))(packed, x)
    expected = x @ params["kernel"].dequantize() + params["bias"]
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


class Custom(flax_nn.Module):
    """A user's layer: its product is the library's, its parameter Flax's."""

    in_setup: bool

    def setup(self):
        if self.in_setup:
            self.kernel = self.param("kernel", flax_nn.initializers.ones, (64, 24))

    @flax_nn.compact
    def __call__(self, x):
        kernel = (
            self.kernel
            if self.in_setup
            else self.param("kernel", flax_nn.initializers.ones, (64, 24))
        )
        return mx_jax.matmul(x, kernel, recipe=RECIPE)


class CustomStored(linen.StoredParams, Custom):
    """The same, which says that it takes what is stored."""


class Mixed(flax_nn.Module):
    """One's own layer and Flax's."""

    in_setup: bool

    @flax_nn.compact
    def __call__(self, x):
        return flax_nn.Dense(8)(Custom(self.in_setup, name="custom")(x))


@needs_library
@pytest.mark.parametrize("in_setup", [False, True])
def test_a_module_of_the_user(in_setup: bool):
    """It inherits from StoredParams, or is a part of a converted model."""
    case, x = CASES["dense"], draw(3, 64)
    kernel = case.stored(draw(64, 24), STORED)
    run, stored = Linen().run(CustomStored(in_setup)), {"kernel": pack(case, kernel)}
    assert num_calls(run, stored, x) == 1
    assert_bitwise_equal(jax.jit(run)(stored, x), mx_jax.matmul(x, kernel, recipe=RECIPE))
    mixed = convert.linen(Mixed(in_setup), RULE)
    params = {
        **quick(mixed.init)(jax.random.key(0), x)["params"],
        "custom": {"kernel": pack(case, kernel)},
    }
    assert num_calls(Linen().run(mixed), params, x) == 1


@needs_library
@pytest.mark.parametrize("layer", ["dense", "einsum"])
def test_a_layer_that_no_rule_converts(layer: str):
    """In a converted linen model it multiplies by what is stored, in high precision otherwise."""
    case = CASES[layer]
    model = convert.linen(Linen().build(case), convert.Rule(".*", None))
    params, x, run = params_of(case), draw(*case.x), Linen().run(model)
    stored = params | {"kernel": pack(case, params["kernel"])}
    assert num_calls(run, stored, x) == 1
    expected = case.multiply(x, params, recipes.high_precision())
    assert_bitwise_equal(jax.jit(run)(stored, x), expected)


@needs_library
def test_a_boxed_kernel():
    """Flax's partitioning metadata around packed weights."""
    case, x = CASES["dense"], draw(3, 64)
    params = params_of(case)
    init = flax_nn.with_partitioning(flax_nn.initializers.lecun_normal(), (None, "model"))
    model = linen.Dense(24, recipe=RECIPE, kernel_init=init)
    boxed = flax_nn.Partitioned(pack(case, params["kernel"]), names=(None, "model"))
    run, stored = Linen().run(model), params | {"kernel": boxed}
    assert num_calls(run, stored, x) == 1
    plain = Linen().run(linen.Dense(24, recipe=RECIPE))
    assert_bitwise_equal(jax.jit(run)(stored, x), jax.jit(plain)(params, x))
