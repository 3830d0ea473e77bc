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
