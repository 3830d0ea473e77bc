"""Quantized kernels, packed or not, in layers of mx_jax.nn and in converted models of Flax.

What is compiled is tested, not only the values: an unpacked or requantized kernel gives nearly the
same numbers, slowly.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

import mx_jax
from mx_jax import convert, recipes
from mx_jax.backends.cpu_ffi import library, packed_product, product
from mx_jax.backends.select import only_backend
from mx_jax.mxarray import MXArray
from mx_jax.nn import linen, nnx
from mx_jax.packed import PackedMXArray
from mx_jax.testing.compare import assert_bitwise_equal

# Kernels are stored in a format that the recipe does not have: to quantize one again shows.
STORED = "mxfp8_e4m3"
RECIPE = recipes.weight_only("mxfp4")
RULE = convert.Rule(".*", RECIPE)

built = pytest.mark.skipif(
    isinstance(library.load(), str), reason=f"no CPU library: {library.load()}"
)


@pytest.fixture(autouse=True)
def insist():
    """Tests run with several simulated devices, where the library is not asked by itself."""
    with only_backend("cpu_ffi"):
        yield


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A layer under its names in linen and nnx, and the product that it should be."""

    linen: Callable[[Any], Any]
    nnx: Callable[[Any], Any]
    product: str
    x: tuple[int, ...]
    kernel: tuple[int, ...]
    bias: tuple[int, ...]
    contracting: tuple[int, ...]
    num_batch: int = 0

    def params(self) -> dict[str, Any]:
        return {"kernel": self.quantize(draw(*self.kernel)), "bias": draw(*self.bias, seed=1)}

    def quantize(self, kernel: jax.Array) -> MXArray:
        return mx_jax.quantize(kernel, STORED, axis=self.contracting[-1])

    def pack(self, kernel: MXArray) -> PackedMXArray:
        packed = mx_jax.pack_weights(
            kernel, contracting=self.contracting, num_batch=self.num_batch, recipe=RECIPE
        )
        assert isinstance(packed, PackedMXArray)
        return packed


CASES = {
    "dense": Case(
        linen=lambda nn: nn.Dense(24),
        nnx=lambda nn: nn.Linear(64, 24, rngs=flax_nnx.Rngs(0)),
        product="tk,kn->tn",
        x=(3, 64),
        kernel=(64, 24),
        bias=(24,),
        contracting=(0,),
    ),
    "general": Case(
        linen=lambda nn: nn.DenseGeneral((4, 6), axis=(-2, -1)),
        nnx=lambda nn: nn.LinearGeneral((2, 64), (4, 6), axis=(-2, -1), rngs=flax_nnx.Rngs(0)),
        product="thk,hkmn->tmn",
        x=(3, 2, 64),
        kernel=(2, 64, 4, 6),
        bias=(4, 6),
        contracting=(0, 1),
    ),
    "general_batch": Case(
        linen=lambda nn: nn.DenseGeneral(24, batch_dims=(0,)),
        nnx=lambda nn: nn.LinearGeneral(64, 24, batch_axis={0: 2}, rngs=flax_nnx.Rngs(0)),
        product="btk,bkn->btn",
        x=(2, 3, 64),
        kernel=(2, 64, 24),
        bias=(2, 24),
        contracting=(1,),
        num_batch=1,
    ),
    "einsum": Case(
        linen=lambda nn: nn.Einsum((64, 4, 6), "...tk,kmn->...tmn"),
        nnx=lambda nn: nn.Einsum("...tk,kmn->...tmn", (64, 4, 6), (4, 6), rngs=flax_nnx.Rngs(0)),
        product="tk,kmn->tmn",
        x=(3, 64),
        kernel=(64, 4, 6),
        bias=(4, 6),
        contracting=(0,),
    ),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
Runs = Callable[[Any, jax.Array], jax.Array]


def draw(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@dataclasses.dataclass(frozen=True)
class WithRecipe:
    """The layers of one of our modules, as calls without a recipe make them."""

    module: Any

    def __getattr__(self, name: str) -> Any:
        layer = getattr(self.module, name)
        return lambda *args, **options: layer(*args, recipe=RECIPE, **options)


def run_linen(model: Any, params: Any) -> tuple[Any, Runs]:
    return {"params": params}, model.apply


def run_nnx(model: Any, params: Any) -> tuple[Any, Runs]:
    for name, value in params.items():
        getattr(model, name).set_value(value)
    graph, state = flax_nnx.split(model)
    return state, lambda state, x: flax_nnx.merge(graph, state)(x)


# From a case and its parameters to what jit is given and a function of that.
WAYS: dict[str, Callable[[Case, Any], tuple[Any, Runs]]] = {
    "linen": lambda case, params: run_linen(case.linen(WithRecipe(linen)), params),
    "nnx": lambda case, params: run_nnx(case.nnx(WithRecipe(nnx)), params),
    "convert.linen": lambda case, params: run_linen(
        convert.linen(case.linen(flax_nn), RULE), params
    ),
    "convert.nnx": lambda case, params: run_nnx(convert.nnx(case.nnx(flax_nnx), RULE), params),
}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def num_calls(run: Runs, *args: Any, target: str = packed_product.TARGET) -> int:
    return jax.jit(run).lower(*args).as_text().count(f"@{target}(")


@built
@ways
@cases
def test_the_product_reads_what_is_stored(case: Case, way: Any):
    """One call of the packed product; of an MXArray, one of the product, on its own codes."""
    params, x = case.params(), draw(*case.x, seed=2)
    stored, run = way(case, params)
    assert num_calls(run, stored, x, target=product.TARGET) == 1
    bias = params["bias"][:, None] if case.num_batch else params["bias"]
    expected = mx_jax.einsum(case.product, x, params["kernel"], recipe=RECIPE) + bias
    assert_bitwise_equal(jax.jit(run)(stored, x), expected, what="MXArray")
    packed, run = way(case, params | {"kernel": case.pack(params["kernel"])})
    assert num_calls(run, packed, x) == 1
    assert num_calls(run, packed, x, target=product.TARGET) == 0
    assert_bitwise_equal(jax.jit(run)(packed, x), expected, what="packed")


# Stacks of layers ---------------------------------------------------------------------------------

NUM_LAYERS = 3


class Stack(flax_nn.Module):
    """Layers in nn.scan, ours or Flax's."""

    ours: bool
    remat: bool = False

    @flax_nn.compact
    def __call__(self, x):
        block = flax_nn.remat(Block) if self.remat else Block
        scan = flax_nn.scan(
            block, variable_axes={"params": 0}, split_rngs={"params": True}, length=NUM_LAYERS
        )
        return scan(self.ours, name="stack")(x, None)[0]


class Block(flax_nn.Module):
    ours: bool

    @flax_nn.compact
    def __call__(self, x, _):
        dense = linen.Dense(64, recipe=RECIPE) if self.ours else flax_nn.Dense(64)
        return flax_nn.relu(dense(x)), None


def linen_stack(model: Any, kernel: Any, bias: jax.Array) -> tuple[Any, Runs]:
    layer = type(flax_nn.Dense(1)).__name__ + "_0"
    return run_linen(model, {"stack": {layer: {"kernel": kernel, "bias": bias}}})


def nnx_stack(make: Callable[..., Any], kernel: Any, bias: jax.Array) -> tuple[Any, Runs]:
    """nnx.vmap makes the layers, nnx.scan runs them."""
    model = flax_nnx.vmap(make)(flax_nnx.Rngs(0).split(NUM_LAYERS))
    if not isinstance(model, nnx.Linear):
        model = convert.nnx(model, RULE)
    model.kernel.set_value(kernel)
    model.bias.set_value(bias)
    graph, state = flax_nnx.split(model)

    @flax_nnx.scan(in_axes=(0, flax_nnx.Carry), out_axes=flax_nnx.Carry)
    def run(layer, x):
        return flax_nnx.relu(layer(x))

    return state, lambda state, x: run(flax_nnx.merge(graph, state), x)


STACKS: dict[str, Callable[[Any, jax.Array], tuple[Any, Runs]]] = {
    "linen": lambda *params: linen_stack(Stack(True), *params),
    "remat": lambda *params: linen_stack(Stack(True, remat=True), *params),
    "convert.linen": lambda *params: linen_stack(convert.linen(Stack(False), RULE), *params),
    "nnx": lambda *params: nnx_stack(
        lambda rngs: nnx.Linear(64, 64, recipe=RECIPE, rngs=rngs), *params
    ),
    "convert.nnx": lambda *params: nnx_stack(
        lambda rngs: flax_nnx.Linear(64, 64, rngs=rngs), *params
    ),
}


@built
@pytest.mark.parametrize("stack", STACKS.values(), ids=STACKS)
@pytest.mark.parametrize("format", [STORED, "nvfp4"])
def test_a_scanned_stack(format: str, stack: Any):
    """Packed as one array, of which scan slices every leaf: each slice is a packed matrix."""
    kernels = mx_jax.quantize(draw(NUM_LAYERS, 64, 64), format, axis=1)
    bias, x = draw(NUM_LAYERS, 64, seed=1), draw(2, 64, seed=2)
    stored, run = stack(mx_jax.pack_weights(kernels, num_batch=1), bias)
    assert num_calls(run, stored, x) == 1
    expected = x
    for layer in range(NUM_LAYERS):
        product = mx_jax.matmul(expected, kernels[layer], recipe=RECIPE)
        expected = jax.nn.relu(product + bias[layer])
    assert_bitwise_equal(jax.jit(run)(stored, x), expected, what="packed")


@built
def test_experts_in_one_product():
    """nn.vmap over packed experts is one call of the handler."""
    case = CASES["dense"]
    experts = flax_nn.vmap(
        linen.Dense, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=0
    )(24, recipe=RECIPE)
    kernels = mx_jax.quantize(draw(3, *case.kernel), "nvfp4", axis=1)
    params = {"kernel": mx_jax.pack_weights(kernels, num_batch=1), "bias": draw(3, 24, seed=1)}
    x = draw(3, 2, 64, seed=2)
    stored, run = run_linen(experts, params)
    assert num_calls(run, stored, x) == 1
    expected = mx_jax.matmul(x, kernels, recipe=RECIPE) + params["bias"][:, None]
    assert_bitwise_equal(jax.jit(run)(stored, x), expected, what="packed")


@built
@pytest.mark.parametrize("stack", [STACKS["linen"], STACKS["convert.nnx"]], ids=["linen", "nnx"])
def test_gradients_go_through_a_packed_stack(stack: Any):
    """As LoRA needs them: with respect to activations and biases, of the bits of an MXArray."""
    kernels = jax.vmap(lambda w: mx_jax.quantize(w, "nvfp4", axis=0))(draw(NUM_LAYERS, 64, 64))
    packed = jax.vmap(mx_jax.pack_weights)(kernels)
    bias, x = draw(NUM_LAYERS, 64, seed=1), draw(2, 64, seed=2)

    def gradients(kernel: Any) -> Any:
        def loss(bias, x):
            stored, run = stack(kernel, bias)
            return (run(stored, x) ** 2).sum()

        return jax.jit(jax.grad(loss, argnums=(0, 1)))(bias, x)

    for actual, expected in zip(gradients(packed), gradients(kernels), strict=True):
        assert jnp.abs(expected).max() > 0
        assert_bitwise_equal(actual, expected, what="gradient")
