"""A Quantization for MaxText's own layers: needs MaxText 0.2.5, and `-m slow`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import mx_jax
from mx_jax.testing.compare import assert_bitwise_equal
from mx_jax.testing.draw import draw_few_octaves
from tests.examples.integrations.conftest import assert_learned, value_and_gradients
from tests.nn.layers import assert_trees_equal

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

X = draw_few_octaves(np.random.default_rng(0), (8, 64))
W = draw_few_octaves(np.random.default_rng(1), (64, 32))
EXPERTS = draw_few_octaves(np.random.default_rng(2), (2, 64, 32))
SIZES = np.array([3, 5])
MXFP8 = mx_jax.recipes.mxfp8()


@pytest.fixture
def example(integration: Any) -> Any:
    pytest.importorskip("maxtext", exc_type=ImportError)
    return integration("maxtext_quantization")


def test_the_example_learns(example: Any):
    losses, report = example.main()
    assert_learned(losses)
    every = ("output", "grad_input", "grad_weight")
    assert report.quantized == {"down": every, "experts": every, "up": ("output", "grad_weight")}
    assert report.plain == ("head",)


def dense(example: Any, recipe: Any) -> Any:
    """One of MaxText's layers, plain if the recipe is None."""
    layer = example.linears.DenseGeneral(
        64,
        32,
        quant=recipe and example.MxQuantization(recipe),
        kernel_axes=("embed", "mlp"),
        rngs=nnx.Rngs(params=0),
    )
    graph, _, rest = nnx.split(layer, nnx.Param, ...)
    return lambda w, x: nnx.merge(graph, nnx.State({"kernel": nnx.Param(w)}), rest, copy=True)(x)


def test_a_dense_layer_is_the_product(example: Any):
    actual = value_and_gradients(dense(example, MXFP8), W, X)
    expected = value_and_gradients(lambda w, x: mx_jax.matmul(x, w, recipe=MXFP8), W, X)
    assert_trees_equal(actual, expected)


def test_sharding_is_kept(example: Any):
    """Everything lies where it lies without the hook, and has the values of one device."""
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 4), ("fsdp", "tensor"), axis_types=auto)
    kernel = jax.device_put(W, NamedSharding(mesh, P("fsdp", "tensor")))
    expected = jax.tree.leaves(value_and_gradients(dense(example, MXFP8), W, X))
    with jax.set_mesh(mesh):
        quantized, plain = (
            jax.tree.leaves(value_and_gradients(dense(example, recipe), kernel, X))
            for recipe in (MXFP8, None)
        )
    for actual, other, wanted in zip(quantized, plain, expected, strict=True):
        assert actual.sharding.is_equivalent_to(other.sharding, 2), (
            actual.sharding,
            other.sharding,
        )
        np.testing.assert_allclose(actual, wanted, rtol=1e-6, atol=1e-4)
    assert quantized[-1].sharding.spec[-1] == "tensor"


def test_ragged_products_end_and_refuse(example: Any):
    plain = lax.ragged_dot
    operands = jnp.asarray(X), jnp.asarray(EXPERTS), jnp.asarray(SIZES)
    with example.ragged_products(mx_jax.recipes.high_precision()):
        assert lax.ragged_dot is not plain
        assert_bitwise_equal(lax.ragged_dot(*operands), plain(*operands))
        with pytest.raises(ValueError, match="has no group_offset"):
            lax.ragged_dot(*operands, group_offset=jnp.zeros(1, int))
        with pytest.raises(ValueError, match="transpose_rhs and partial_sum"):
            example.megablox.gmm(*operands, transpose_rhs=True)
    assert lax.ragged_dot is plain


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp4_stochastic"])
def test_the_trainer_runs(integration: Any, recipe: str):
    """MaxText's own loop: its scan over blocks holds quantized products."""
    pytest.importorskip("maxtext", exc_type=ImportError)
    example = integration("maxtext_trainer")
    changed = ("jax_default_prng_impl", "jax_remove_size_one_mesh_axis_from_type")
    before = {name: getattr(jax.config, name) for name in changed}
    try:
        losses, report = example.main(steps=4, recipe=recipe)
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
    assert len(losses) == 4 and losses[0] > 4.0 and losses[-1] < 0.8 * losses[0], losses
    # The name that MaxText's layers leave to what is in the scan.
    assert report.quantized["eval_jaxpr"] == ("output", "grad_input", "grad_weight")
