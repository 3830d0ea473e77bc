"""Codes that part from the value that they were made of: a gradient passes or is an error, and is
never zero; without a derivative nothing changes."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import mx_jax
from mx_jax.mxarray import MXArray
from tests.quick import quick
from tests.sharding.collectives import mesh_of

X = jax.random.normal(jax.random.key(0), (10, 64))
EXPERTS = jax.random.normal(jax.random.key(1), (3, 64, 32))
SIZES = jnp.array([4, 0, 5])
ERROR = (
    r"quantize: codes have no derivative, got one by x of shape=\({}64, 32\), dtype=float32; they "
)


def encode(w: jax.Array) -> MXArray:
    return mx_jax.quantize(w, "mxfp4", axis=-2)


def ragged(w: MXArray | jax.Array) -> jax.Array:
    return jnp.sum(mx_jax.ragged_dot(X, w, SIZES, recipe="mxfp4") ** 2)


def multiply(w: MXArray | jax.Array) -> jax.Array:
    return jnp.sum(mx_jax.matmul(X, w, recipe="mxfp4") ** 2)


def by_rows(multiply: Callable[..., jax.Array], w: Any) -> Any:
    return lax.scan(lambda total, w: (total + multiply(w), None), 0.0, w)[0]


Loss = Callable[[jax.Array], Any]
# A loss, and the same one with codes that do not part.
PASSES: dict[str, tuple[Loss, Loss]] = {
    "vmap": (lambda w: ragged(jax.vmap(encode)(w)), lambda w: ragged(encode(w))),
    "vmap of vmap": (
        lambda w: (
            jax.vmap(jax.vmap(lambda row: mx_jax.quantize(row, "mxfp4")))(w)
            .dequantize()[1, 2]
            .sum()
        ),
        lambda w: mx_jax.quantize(w, "mxfp4").dequantize()[1, 2].sum(),
    ),
    "into vmap": (
        lambda w: jax.vmap(multiply)(encode(w)).sum(),
        lambda w: sum(map(multiply, encode(w))),
    ),
    # As in docs/recipes.md: layers that are computed again, each expert under its scales.
    "vmap inside checkpoint inside scan": (
        lambda w: by_rows(
            jax.checkpoint(lambda w: ragged(jax.vmap(encode)(w))), jnp.stack([w, 2 * w])
        ),
        lambda w: ragged(encode(w)) + ragged(encode(2 * w)),
    ),
    "closed over": (
        lambda w: (lambda q: by_rows(lambda x: x * multiply(q), jnp.ones(2)))(encode(w[0])),
        lambda w: 2 * multiply(encode(w[0])),
    ),
    "inside scan": (
        lambda w: by_rows(lambda w: multiply(encode(w)), w),
        lambda w: sum(multiply(encode(row)) for row in w),
    ),
    "inside checkpoint": (
        lambda w: jax.checkpoint(lambda w: multiply(encode(w)))(w[0]),
        lambda w: multiply(encode(w[0])),
    ),
    "beside their size": (
        lambda w: (lambda q: multiply(q) * q.nbytes)(encode(w[0])),
        lambda w: multiply(encode(w[0])) * (64 * 32 + 2 * 32),
    ),
    "stopped values": (
        lambda w: jnp.sum(lax.stop_gradient(encode(w).dequantize()) * w),
        lambda w: jnp.sum(encode(lax.stop_gradient(w)).dequantize() * w),
    ),
    "stopped sources": (
        lambda w: multiply(jax.jit(encode)(lax.stop_gradient(w[0]))) * w.sum(),
        lambda w: multiply(encode(lax.stop_gradient(w[0]))) * w.sum(),
    ),
}
# Codes that enter a transformation: the value goes along where the derivative is taken around it.
ENTERS: dict[str, tuple[Loss, Loss]] = {
    "scan": (lambda w: by_rows(multiply, encode(w)), lambda w: sum(map(multiply, encode(w)))),
    "jit": (lambda w: jax.jit(multiply)(encode(w[0])), lambda w: multiply(encode(w[0]))),
    "checkpoint": (
        lambda w: jax.checkpoint(multiply)(encode(w[0])),
        lambda w: multiply(encode(w[0])),
    ),
    "cond": (
        lambda w: lax.cond(w[0, 0, 0] > 9, lambda q: 2 * multiply(q), multiply, encode(w[0])),
        lambda w: multiply(encode(w[0])),
    ),
    "tree.map": (
        lambda w: multiply(jax.tree.map(lambda leaf: leaf, encode(w[0]))),
        lambda w: multiply(encode(w[0])),
    ),
}
LEAVES: dict[str, Loss] = {
    "scan": lambda w: ragged(lax.scan(lambda _, row: (None, encode(row)), None, w)[1]),
    "jit": lambda w: multiply(jax.jit(encode)(w[0])),
    "cond": lambda w: multiply(lax.cond(w[0, 0, 0] > 9, lambda w: encode(2 * w), encode, w[0])),
    "checkpoint": lambda w: multiply(jax.checkpoint(encode)(w[0])),
    "jit in vmap": lambda w: ragged(jax.vmap(jax.jit(encode))(w)),
    "dequantized": lambda w: jax.jit(encode)(w[0]).dequantize().sum(),
    "packed": lambda w: multiply(mx_jax.pack_weights(encode(w[0]))),
}
WAYS: dict[str, Callable[[Loss], Loss]] = {
    "grad": jax.grad,
    "jit of grad": lambda f: quick(jax.grad(f)),
    "grad of jit": lambda f: jax.grad(jax.jit(f)),
    "grad of checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
}


@pytest.mark.parametrize("case", PASSES)
def test_the_gradient_passes(case: str):
    loss, same = PASSES[case]
    wanted = quick(jax.grad(same))(EXPERTS)
    assert jnp.abs(wanted).max() > 0
    for way in ("jit of grad", "grad of jit"):
        gradient = WAYS[way](loss)(EXPERTS)
        np.testing.assert_allclose(gradient, wanted, rtol=1e-4, atol=1e-4, err_msg=way)
    for way in ("grad", "grad of checkpoint"):
        assert jax.eval_shape(WAYS[way](loss), EXPERTS).shape == EXPERTS.shape


@pytest.mark.parametrize("case", ENTERS)
def test_the_value_goes_along_under_a_derivative(case: str):
    loss, same = ENTERS[case]
    wanted = quick(jax.grad(same))(EXPERTS)
    assert jnp.abs(wanted).max() > 0
    for way in ("grad", "jit of grad"):
        np.testing.assert_allclose(WAYS[way](loss)(EXPERTS), wanted, rtol=1e-4, atol=1e-4)
    for way in ("grad of jit", "grad of checkpoint"):
        with pytest.raises(ValueError, match=ERROR.format(".*")):
            jax.eval_shape(WAYS[way](loss), EXPERTS)


@pytest.mark.parametrize("case", LEAVES)
def test_a_gradient_of_codes_that_left_is_an_error(case: str):
    loss = LEAVES[case]
    assert jnp.isfinite(quick(loss)(EXPERTS))
    for way in WAYS.values():
        with pytest.raises(ValueError, match=ERROR.format(".*") + "left the jit, scan, cond"):
            jax.eval_shape(way(loss), EXPERTS)
        # Whatever else is differentiated, and where a gradient is stopped.
        assert jax.eval_shape(way(lambda x: loss(EXPERTS) * x.sum()), X).shape == X.shape
        jax.eval_shape(way(lambda w: loss(lax.stop_gradient(w)) + w.sum()), EXPERTS)


def test_forward_mode():
    tangent = jnp.ones_like(EXPERTS)
    values = lambda w: jax.vmap(encode)(w).dequantize()  # noqa: E731
    np.testing.assert_array_equal(jax.jvp(jax.jit(values), (EXPERTS,), (tangent,))[1], tangent)
    _, linear = jax.linearize(values, EXPERTS)
    np.testing.assert_array_equal(linear(tangent), tangent)
    with pytest.raises(ValueError, match=ERROR.format(".*")):
        jax.jvp(LEAVES["dequantized"], (EXPERTS,), (tangent,))


def test_trees_are_those_of_stored_codes():
    """A loop may carry codes that it quantizes anew, from codes that were stored."""
    stored = encode(EXPERTS[0])
    structures = []

    @jax.jit
    def trace(w):
        structures.append(jax.tree.structure(encode(w)))
        return lax.cond(w[0, 0] > 0, lambda w: encode(w), lambda w: stored, w)

    result = trace(EXPERTS[0])
    assert structures == [jax.tree.structure(stored)] == [jax.tree.structure(result)]
    assert result.primal is None
    assert jax.vmap(encode)(EXPERTS).primal is None, "nothing is kept alive"
    halve = lambda q, _: (encode(q.dequantize() / 2), None)  # noqa: E731
    jax.eval_shape(lambda q: lax.scan(halve, q, None, 2)[0], stored)
    # Under a derivative the value goes along, but not out of it.
    _, q = jax.grad(lambda w: (multiply(q := encode(w)), q), has_aux=True)(EXPERTS[0])
    assert q.primal is None
    np.testing.assert_array_equal(q.codes, stored.codes)


def test_codes_that_leave_shard_map():
    mesh = mesh_of(d=8)
    w = jnp.tile(EXPERTS[0], (8, 1, 1))
    encode_parts = jax.shard_map(encode, mesh=mesh, in_specs=P("d"), out_specs=P("d"))

    def loss(w):
        return jnp.sum(encode_parts(w).dequantize() ** 2)

    wanted = jax.grad(lambda w: jnp.sum(encode(w).dequantize() ** 2))(w)
    for way, derivative in WAYS.items():
        try:
            gradient = derivative(loss)(w)
        except ValueError as error:
            assert re.match(ERROR.format(".*"), str(error)), way
        else:
            np.testing.assert_array_equal(gradient, wanted, err_msg=way)
