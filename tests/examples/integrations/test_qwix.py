"""Recipes under Qwix's rules: needs Qwix 0.1.8, `pip install qwix`, and `-m slow`."""

from typing import Any

import flax.linen as nn
import numpy as np
import pytest

from mx_jax.testing.compare import assert_bitwise_equal
from mx_jax.testing.draw import draw_few_octaves
from tests.examples.integrations.conftest import assert_learned
from tests.quick import quick

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

ALL, FIRST = ("output", "grad_input", "grad_weight"), ("output", "grad_weight")
X = draw_few_octaves(np.random.default_rng(0), (6, 64))
W = draw_few_octaves(np.random.default_rng(1), (64, 8))


@pytest.fixture
def example(integration: Any) -> Any:
    pytest.importorskip("qwix")
    return integration("qwix_provider")


def test_the_example_learns(example: Any):
    for name, (losses, report) in example.main().items():
        assert_learned(losses)
        begin = "LinenModel/" if name == "linen" else ""
        assert report.quantized == {
            f"{begin}experts": ALL,
            f"{begin}heads": ALL,
            f"{begin}mlp": FIRST,
        }


class Product(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return x @ self.param("w", nn.initializers.zeros, W.shape)


def test_other_rules_stay_qwixs(example: Any):
    qwix = pytest.importorskip("qwix")
    rules = [qwix.QtRule(weight_qtype="int8", act_qtype="int8")]
    ours, theirs = (
        quick(qwix.quantize_model(Product(), provider(rules)).apply)({"params": {"w": W}}, X)
        for provider in (example.MxProvider, qwix.QtProvider)
    )
    assert_bitwise_equal(ours, theirs)
    assert np.any(np.asarray(ours) != np.asarray(X @ W))
