"""Rules by type: needs google-tunix 0.1.7, gemma 4.0.1 for its own test, and `-m slow`."""

import importlib.util
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import mx_jax
from mx_jax import convert, recipes
from mx_jax.testing.compare import assert_bitwise_equal
from mx_jax.testing.draw import draw_few_octaves
from tests.examples.integrations.conftest import assert_learned

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def test_the_example_learns(integration: Any):
    if importlib.util.find_spec("tunix") is None:
        pytest.skip("tunix is not installed")
    losses, report, decisions = integration("tunix_rules").main()
    assert_learned(losses, start=3.0)
    every = ("output", "grad_input", "grad_weight")
    # The names are tunix's own scopes.
    assert report.quantized == dict.fromkeys(("attention", "feed_forward"), every)
    assert decisions.num_converted == 9


def test_gemmas_einsum_is_the_product():
    """Its layers' file alone: the package's front door imports trainers."""
    found = importlib.util.find_spec("gemma")
    if found is None or found.origin is None:
        pytest.skip("gemma is not installed")
    path = Path(found.origin).parent / "gm" / "nn" / "_layers.py"
    spec = importlib.util.spec_from_file_location("gemma_layers", path)
    assert spec is not None and spec.loader is not None
    source: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(source)
    x = draw_few_octaves(np.random.default_rng(0), (2, 5, 64))
    w = draw_few_octaves(np.random.default_rng(1), (2, 64, 8))
    rule = convert.Rule(".*", recipes.mxfp8(), types=source.Einsum)
    layer = convert.linen(source.Einsum(shape=w.shape), rule)
    subscripts = "BTD,NDH->BTNH"
    actual = jax.jit(lambda w, x: layer.apply({"params": {"w": w}}, subscripts, x))(w, x)
    expected = jax.jit(lambda w, x: mx_jax.einsum(subscripts, x, w, recipe="mxfp8"))(w, x)
    assert_bitwise_equal(actual, expected)
