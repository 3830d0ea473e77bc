"""Flax's own hooks: the examples learn in quantized products, which their report names."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

import mx_jax
from mx_jax import recipes
from mx_jax.testing.draw import draw_few_octaves
from tests.examples.integrations.conftest import assert_learned
from tests.nn.layers import weighted_sum

ALL = ("output", "grad_input", "grad_weight")
# Nobody asks for the gradient of the data.
FIRST = ("output", "grad_weight")
X = draw_few_octaves(np.random.default_rng(0), (2, 5, 64))


@pytest.mark.slow
def test_linen_example(integration: Any, capsys: pytest.CaptureFixture[str]):
    losses, report = integration("linen_hooks").main()
    assert_learned(losses)
    inner = ("EinsumOp_0", "EinsumOp_1", "key", "out", "query", "value")
    layers = [*(f"Model/attention/{name}" for name in inner), "Model/mlp"]
    assert report.quantized == dict.fromkeys(layers, ALL)
    assert report.plain == ("Model/head",)
    assert "Model/mlp                   output, grad_input, grad_weight" in capsys.readouterr().out


@pytest.mark.slow
def test_nnx_example(integration: Any):
    losses, report = integration("nnx_hooks").main()
    assert_learned(losses)
    assert report.quantized == dict.fromkeys(("attention", "down", "up"), ALL)
    # Flax's nnx attention has no hook for its two products.
    assert report.plain == ("head",) or set(report.plain) == {"attention", "head"}


@pytest.mark.slow
def test_bridge_example(integration: Any):
    results = integration("flax_bridge").main()
    for losses, _ in results.values():
        assert_learned(losses)
    assert results["linen in nnx"][1].quantized == {"hidden": FIRST}
    assert results["nnx in linen"][1].quantized == {"LinenModel/hidden": FIRST}


def test_the_report_tells_high_precision_from_quantized(integration: Any):
    """The same products without a cast are none of those that it names."""
    report = integration("shared").report

    def program(recipe: Any) -> Any:
        def loss(x, w):
            with jax.named_scope("layer"):
                return weighted_sum(mx_jax.matmul(x, w, recipe=recipe))

        gradient = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
        return report(gradient.lower(X, np.ones((64, 8), np.float32)).compile().as_text())

    assert program(recipes.high_precision()).quantized == {}
    assert program(recipes.high_precision()).plain == ("layer",)
    half = dataclasses.replace(
        recipes.mxfp8(), name="half", grad_weight=recipes.high_precision().grad_weight
    )
    assert program(half).quantized == {"layer": ("output", "grad_input")}
    assert program(recipes.mxfp8()).quantized == {"layer": ALL}
