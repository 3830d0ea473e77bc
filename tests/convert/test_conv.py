"""Convolutions as products of patches: the same numbers, and recipes where a rule names them."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mx_jax
from mx_jax import convert, recipes
from mx_jax.backends.cpu_ffi import products
from mx_jax.backends.select import only_backend
from mx_jax.convert import Rule
from mx_jax.jaxpr.read import walk
from tests.needs import needs_library
from tests.quick import quick

from .helpers import MXFP8

# Exact for small integers.
BY_PRODUCTS = Rule(".*", recipes.weight_only("mxfp8"), types=convert.Conv)
CASES = {
    "1x1": dict(kernel_size=(1, 1)),
    "3x3 same": dict(kernel_size=(3, 3)),
    "3x3 valid, strides": dict(kernel_size=(3, 3), strides=(2, 1), padding="VALID"),
    "patches": dict(kernel_size=(2, 3), strides=(2, 3), padding="VALID"),
    "patches, padded": dict(kernel_size=(4, 4), strides=(4, 4), padding="SAME"),
    "dilated": dict(kernel_size=(2, 3), kernel_dilation=(3, 2)),
    "circular": dict(kernel_size=(3, 3), padding="CIRCULAR"),
    "pairs": dict(kernel_size=(3, 2), padding=((1, 0), (2, 3))),
    "cut": dict(kernel_size=(3, 2), padding=((-1, 0), (2, -3))),
    # Not (-2, 1): XLA's own convolution on CPUs is wrong where it cuts first and pads last.
    "cut patches": dict(kernel_size=(2, 2), strides=(2, 2), padding=((-1, -1), (-2, -1))),
    "cut below the kernel": dict(kernel_size=(3, 2), padding=((-4, -1), (0, 0))),
}


@pytest.mark.slow(but="1x1|valid, strides|cut$|cut below|patches, padded|dilated$|circular")
@pytest.mark.parametrize("name", CASES)
def test_equals_the_convolution(name: str):
    rng = np.random.default_rng(1)

    def integers(shape: tuple[int, ...]) -> np.ndarray:
        """Small ones: sums are exact in any order."""
        return rng.integers(-4, 5, shape).astype(np.float32)

    conv, x = nn.Conv(5, **CASES[name]), integers((2, 6, 9, 3))
    ours = convert.linen(conv, BY_PRODUCTS)
    shapes = jax.eval_shape(conv.init, jax.random.key(0), x)
    variables = jax.tree.map(lambda leaf: integers(leaf.shape), shapes)

    def products(module: nn.Module) -> Any:
        def run(variables: Any, x: jax.Array) -> Any:
            y, pullback = jax.vjp(module.apply, variables, x)
            return y, pullback(2 * y)

        return quick(run)(variables, x)

    jax.tree.map(np.testing.assert_array_equal, products(ours), products(conv))


def test_patches_that_do_not_overlap_are_not_copied():
    x, kernel = jnp.ones((1, 8, 8, 4)), jnp.ones((4, 4, 4, 5))
    run = convert.linen(nn.Conv(5, (4, 4), (4, 4)), BY_PRODUCTS).apply
    program = jax.make_jaxpr(run)({"params": {"kernel": kernel, "bias": jnp.ones(5)}}, x)
    primitives = {site.eqn.primitive.name for site in walk(program)}
    assert "mx_matmul" in primitives and "concatenate" not in primitives


X = np.random.default_rng(2).standard_normal((2, 4, 4, 64), np.float32)
each = pytest.mark.parametrize("kind", [nn.Conv, nnx.Conv], ids=["linen", "nnx"])


def flaxs(kind: type, **options: Any) -> Any:
    """A layer of 64 features to 6."""
    options = {"kernel_size": (2, 2), "use_bias": False} | options
    if kind is nn.Conv:
        return nn.Conv(6, **options)
    return nnx.Conv(64, 6, **options, rngs=nnx.Rngs(0))


def judged(model: Any, **options: Any) -> convert.Decision:
    (decision,) = convert.report(model, Rule(".*", MXFP8, **options), X).decisions
    return decision


def of_kernel(model: Any, rule: Rule | None = None) -> Any:
    """A layer, converted or not, as a function of its kernel and of what it convolves."""
    if isinstance(model, nn.Module):
        converted = model if rule is None else convert.linen(model, rule)
        return lambda kernel, x: converted.apply({"params": {"kernel": kernel}}, x)
    graph, state = nnx.split(model if rule is None else convert.nnx(model, rule))

    def run(kernel: Any, x: jax.Array) -> jax.Array:
        converted = nnx.merge(graph, state)
        converted.kernel = nnx.Param(kernel)
        return converted(x)

    return run


@each
def test_only_rules_that_name_it_convert_it(kind: type):
    with pytest.warns(convert.UnusedRuleWarning):
        decision = judged(flaxs(kind))
    assert decision.reason == "rule 0: only a rule with types=Conv converts it"
    decision = judged(flaxs(kind), types=kind)
    assert (decision.recipe, decision.layer.shape) == (MXFP8, (4, 64, 6))


@each
def test_blocks_lie_along_the_input_features(kind: type):
    kernel = np.random.default_rng(3).standard_normal((2, 2, 64, 6), np.float32)
    run = of_kernel(flaxs(kind, strides=2), Rule(".*", MXFP8, types=kind))
    patches = X.reshape(2, 2, 2, 2, 2, 64).transpose(0, 1, 3, 2, 4, 5)
    expected = mx_jax.einsum("bhwijc,ijcf->bhwf", patches, kernel, recipe=MXFP8)
    np.testing.assert_array_equal(run(kernel, X), expected)


@each
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (dict(feature_group_count=2), "feature_group_count=2: each group contracts other features"),
        (dict(input_dilation=(1, 2), padding=((1, 1), (1, 1))), "input_dilation="),
    ],
    ids=["groups", "transposed"],
)
def test_what_is_no_product(options: dict[str, Any], reason: str, kind: type):
    layer, rule = flaxs(kind, **options), Rule(".*", MXFP8, types=kind)
    with pytest.warns(convert.UnusedRuleWarning):
        assert judged(layer, types=kind).reason.startswith(reason)
    kernel = jnp.ones((2, 2, 64 // options.get("feature_group_count", 1), 6))
    plain = str(jax.make_jaxpr(of_kernel(layer))(kernel, X))
    with pytest.warns(convert.UnusedRuleWarning):
        assert str(jax.make_jaxpr(of_kernel(layer, rule))(kernel, X)) == plain


@pytest.mark.slow(but="packed")
@needs_library
@pytest.mark.parametrize("packed", [False, True], ids=["MXArray", "packed"])
@each
def test_a_stored_kernel_is_used_as_it_is(kind: type, packed: bool):
    """In a format that the recipe does not have: quantized again, it would be another."""
    values = jnp.asarray(np.random.default_rng(0).standard_normal((2, 2, 64, 6)), jnp.float32)
    kernel = mx_jax.quantize(values, "mxfp8_e4m3", axis=2)
    expected = of_kernel(flaxs(kind))(kernel.dequantize(), X)
    run = of_kernel(flaxs(kind), Rule(".*", recipes.weight_only("mxfp4"), types=kind))
    with only_backend("cpu_ffi"):
        stored = mx_jax.pack_weights(kernel, contracting=(0, 1, 2)) if packed else kernel
        text = jax.jit(run).lower(stored, X).as_text()
        target = products.PACKED_MATMUL if packed else products.MATMUL
        assert text.count(f"@{target}(") == 1
        np.testing.assert_allclose(jax.jit(run)(stored, X), expected, rtol=1e-5, atol=1e-4)
