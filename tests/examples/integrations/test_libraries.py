"""Recipes in layers and trainers of other libraries, in the versions that docs/migrate.md names."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import mx_jax
from mx_jax import convert
from mx_jax.testing.compare import assert_bitwise_equal
from mx_jax.testing.draw import draw_few_octaves
from tests.nn.layers import assert_trees_equal, weighted_sum
from tests.quick import quick

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

X = draw_few_octaves(np.random.default_rng(0), (8, 64))
W = draw_few_octaves(np.random.default_rng(1), (64, 32))
MXFP8 = mx_jax.recipes.mxfp8()


def value_and_gradients(run: Callable[[Any, Any], Any], w: Any, x: Any) -> Any:
    """Gradients by w and x of `weighted_sum`, and what it is the sum of."""

    def loss(w: Any, x: Any) -> Any:
        y = run(w, x)
        return weighted_sum(y), y

    return quick(jax.grad(loss, argnums=(0, 1), has_aux=True))(w, x)


@pytest.mark.parametrize("out_first", [True, False])
def test_a_linear_of_haliax(integration: Any, out_first: bool):
    """haliax keeps the weight's output axis first, or last: blocks follow the contracted one."""
    pytest.importorskip("haliax")
    example = integration("haliax_linear")
    hax = example.hax
    In, Out, Batch = hax.make_axes(In=64, Out=32, Batch=8)
    layer = example.hnn.Linear.init(
        In, Out, key=jax.random.PRNGKey(0), out_first=out_first, dot_general=MXFP8.dot_general
    )
    weight = W.T if out_first else W
    layer = jax.tree.map(lambda leaf: weight if leaf.ndim == 2 else leaf, layer)

    def hooked(layer, x):
        return layer(hax.named(x, (Batch, In))).array

    def by_hand(layer, x):
        w = layer.weight.array
        return mx_jax.matmul(x, w.T if out_first else w, recipe=MXFP8) + layer.bias.array

    assert_trees_equal(*(value_and_gradients(run, layer, X) for run in (hooked, by_hand)))


class Product(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return x @ self.param("w", nn.initializers.zeros, W.shape)


def test_other_rules_stay_qwixs(integration: Any):
    qwix = pytest.importorskip("qwix")
    rules = [qwix.QtRule(weight_qtype="int8", act_qtype="int8")]
    ours, theirs = (
        quick(qwix.quantize_model(Product(), provider(rules)).apply)({"params": {"w": W}}, X)
        for provider in (integration("qwix_provider").MxProvider, qwix.QtProvider)
    )
    assert_bitwise_equal(ours, theirs)
    assert np.any(np.asarray(ours) != np.asarray(X @ W))


def test_an_einsum_of_gemma():
    """Its layers' file alone: the package's front door imports trainers."""
    package = importlib.util.find_spec("gemma")
    if package is None or package.origin is None:
        pytest.skip("gemma is not installed")
    path = Path(package.origin).parent / "gm" / "nn" / "_layers.py"
    spec = importlib.util.spec_from_file_location("gemma_layers", path)
    assert spec is not None and spec.loader is not None
    source: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(source)
    x, w, subscripts = X.reshape(2, 4, 64), W.reshape(64, 2, 16).swapaxes(0, 1), "BTD,NDH->BTNH"
    rule = convert.Rule(".*", MXFP8, types=source.Einsum)
    layer = convert.linen(source.Einsum(shape=w.shape), rule)
    actual = jax.jit(lambda w, x: layer.apply({"params": {"w": w}}, subscripts, x))(w, x)
    expected = jax.jit(lambda w, x: mx_jax.einsum(subscripts, x, w, recipe="mxfp8"))(w, x)
    assert_bitwise_equal(actual, expected)


@pytest.fixture
def maxtext(integration: Any) -> Any:
    pytest.importorskip("maxtext", exc_type=ImportError)
    return integration("maxtext_quantization")


def dense(maxtext: Any, recipe: Any) -> Any:
    """One of MaxText's layers, plain if the recipe is None."""
    quant = recipe and maxtext.MxQuantization(recipe)
    options = {"quant": quant, "kernel_axes": ("embed", "mlp"), "rngs": nnx.Rngs(params=0)}
    graph, _, rest = nnx.split(maxtext.linears.DenseGeneral(64, 32, **options), nnx.Param, ...)
    return lambda w, x: nnx.merge(graph, nnx.State({"kernel": nnx.Param(w)}), rest, copy=True)(x)


def test_a_dense_layer_of_maxtext(maxtext: Any):
    """Its sharding is kept: everything lies where it lies without the hook."""
    expected = value_and_gradients(lambda w, x: mx_jax.matmul(x, w, recipe=MXFP8), W, X)
    assert_trees_equal(value_and_gradients(dense(maxtext, MXFP8), W, X), expected)
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 4), ("fsdp", "tensor"), axis_types=auto)
    kernel = jax.device_put(W, NamedSharding(mesh, P("fsdp", "tensor")))
    with jax.set_mesh(mesh):
        quantized, plain = (
            jax.tree.leaves(value_and_gradients(dense(maxtext, recipe), kernel, X))
            for recipe in (MXFP8, None)
        )
    for actual, other, wanted in zip(quantized, plain, jax.tree.leaves(expected), strict=True):
        assert actual.sharding.is_equivalent_to(other.sharding, 2)
        np.testing.assert_allclose(actual, wanted, rtol=1e-6, atol=1e-4)
    assert quantized[-1].sharding.spec[-1] == "tensor"


def test_ragged_products_of_maxtext_end_and_refuse(maxtext: Any):
    plain = lax.ragged_dot
    experts = jnp.asarray(draw_few_octaves(np.random.default_rng(2), (2, 64, 32)))
    operands = jnp.asarray(X), experts, jnp.array([3, 5])
    with maxtext.ragged_products(mx_jax.recipes.high_precision()):
        assert lax.ragged_dot is not plain
        assert_bitwise_equal(lax.ragged_dot(*operands), plain(*operands))
        with pytest.raises(ValueError, match="has no group_offset"):
            lax.ragged_dot(*operands, group_offset=jnp.zeros(1, int))
        with pytest.raises(ValueError, match="transpose_rhs and partial_sum"):
            maxtext.megablox.gmm(*operands, transpose_rhs=True)
    assert lax.ragged_dot is plain


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp4_stochastic"])
def test_the_trainer_of_maxtext(maxtext: Any, integration: Any, recipe: str):
    """MaxText's own loop: its scan over blocks holds quantized products."""
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
