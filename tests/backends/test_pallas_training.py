"""Training with the GPU kernels: the output and both gradients are products of theirs."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax.backends import select
from mx_jax.backends.calls import Call, MatmulCall
from mx_jax.backends.pallas_gpu import PALLAS_GPU, backend_for
from mx_jax.backends.select import BACKENDS
from mx_jax.backends.target import Offer
from tests.backends.mosaic import interpreter, lowered, needs_mosaic

# Powers of two and small integers: their sums are exact in any order.
X = np.random.default_rng(0).integers(-2, 3, (3, 64)).astype(np.float32)
MODEL = nn.Dense(40, dot_general=mx_jax.recipes.mxfp8().dot_general, dtype=jnp.bfloat16)


@pytest.fixture
def on_h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A machine with an H200, as far as selection sees."""
    with mx_jax.testing.target("cuda", (9, 0)):
        yield monkeypatch
    # What was traced with answers of its own must not serve another test.
    jax.clear_caches()


def watch(monkeypatch: pytest.MonkeyPatch, interpret: Any = None) -> list[Call]:
    """The calls that the kernels' backend runs from now on, in this way."""
    calls: list[Call] = []

    def watched(offer: Offer) -> Offer:
        def run(*arguments):
            calls.append(arguments[-1])
            return offer.run(*arguments)

        return dataclasses.replace(offer, run=run)

    kernels = backend_for(interpret=interpret)
    kernels = dataclasses.replace(kernels, table=tuple(map(watched, kernels.table)))
    backends = tuple(kernels if own == PALLAS_GPU else own for own in BACKENDS)
    monkeypatch.setattr(select, "BACKENDS", backends)
    return calls


def count(calls: list[Call], kind: type) -> int:
    """How many different calls of one kind: jit may trace one twice, or find it traced."""
    return len({call for call in calls if isinstance(call, kind)})


def gradients(params, x):
    """Of a loss whose cotangent is 1 and -1."""
    signs = jnp.where(jnp.arange(40) % 3 == 0, -1.0, 1.0)
    return jax.grad(lambda p, x: jnp.sum(MODEL.apply(p, x) * signs), argnums=(0, 1))(params, x)


def parameters():
    kernel = np.random.default_rng(1).integers(-3, 4, (64, 40)).astype(np.float32) / 4
    return {"params": {"kernel": jnp.asarray(kernel), "bias": jnp.zeros(40)}}


@needs_mosaic
def test_gradients_are_the_references(on_h200: pytest.MonkeyPatch):
    x = jnp.asarray(X, jnp.bfloat16)
    with mx_jax.only_backend("reference"):
        expected = MODEL.apply(parameters(), x), gradients(parameters(), x)
    asked = watch(on_h200, interpreter())
    with mx_jax.prefer_backends("pallas_gpu"):
        actual = MODEL.apply(parameters(), x), gradients(parameters(), x)
    # One product, and two for gradients.
    assert count(asked, MatmulCall) == 3
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


WEIGHT_ONLY = mx_jax.recipes.weight_only("mxfp4")


@needs_mosaic
@pytest.mark.parametrize(
    ("capability", "recipe", "kernel"),
    [
        ((8, 0), WEIGHT_ONLY, "mx_jax_mma_mxfp4"),
        ((9, 0), WEIGHT_ONLY, "mx_jax_wgmma_mxfp4"),
        ((10, 0), WEIGHT_ONLY, "mx_jax_mma_mxfp4"),
        ((10, 0), mx_jax.recipes.mxfp8(), "mx_jax_tcgen05_float8_e4m3fn"),
    ],
)
def test_lowers_where_integers_have_64_bits(
    capability: tuple[int, int], recipe: mx_jax.recipes.Recipe, kernel: str
):
    """Several tiles along every axis, and several steps."""
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((200, 1024), (1024, 260)))

    def run(x: jax.Array, w: jax.Array) -> Any:
        return mx_jax.matmul(x, w, recipe=recipe)

    with jax.enable_x64(True):
        text = lowered(run, x, w, capability=capability)
    assert kernel in text
