"""Recipes in haliax's layers: needs haliax 1.4.dev453 (`pip install --pre`), and `-m slow`."""

from typing import Any

import jax
import numpy as np
import pytest

import mx_jax
from mx_jax.testing.draw import draw_few_octaves
from tests.examples.integrations.conftest import assert_learned, value_and_gradients
from tests.nn.layers import assert_trees_equal

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

X = draw_few_octaves(np.random.default_rng(0), (6, 64))
MXFP8 = mx_jax.recipes.mxfp8()


@pytest.fixture
def example(integration: Any) -> Any:
    pytest.importorskip("haliax")
    return integration("haliax_linear")


def test_the_example_learns(example: Any):
    losses, report = example.main()
    assert_learned(losses)
    every = ("output", "grad_input", "grad_weight")
    # XLA may take what no step changes out of the loop over blocks.
    blocks = {"block/down/Linear": every, "block/up/Linear": every}
    assert report.quantized.items() >= blocks.items()
    assert report.plain == ("head/Linear",)


@pytest.mark.parametrize("out_first", [True, False])
def test_a_linear_is_the_product(example: Any, out_first: bool):
    """haliax keeps the weight's output axis first, or last: blocks follow the contracted one."""
    hax = example.hax
    In, Out, Batch = hax.make_axes(In=64, Out=8, Batch=6)
    layer = example.hnn.Linear.init(
        In, Out, key=jax.random.PRNGKey(0), out_first=out_first, dot_general=MXFP8.dot_general
    )
    weight = draw_few_octaves(np.random.default_rng(1), layer.weight.array.shape)
    layer = jax.tree.map(lambda leaf: weight if leaf.ndim == 2 else leaf, layer)

    def hooked(layer, x):
        return layer(hax.named(x, (Batch, In))).array

    def by_hand(layer, x):
        w = layer.weight.array
        return mx_jax.matmul(x, w.T if out_first else w, recipe=MXFP8) + layer.bias.array

    assert_trees_equal(*(value_and_gradients(run, layer, X) for run in (hooked, by_hand)))
