"""explain: which backend takes which product, and why the others do not."""

import jax.numpy as jnp
import pytest

import mx_jax
from mx_jax import recipes
from mx_jax.backends.base import Target
from mx_jax.backends.pallas_gpu import rejections
from mx_jax.backends.select import only_backend

CPU = Target(platform="cpu", num_devices=8)
H200 = Target(platform="cuda", compute_capability=(9, 0))
explain = mx_jax.inspect.explain


def test_shapes_and_specs_of_the_three_products():
    """Every backend that comes before the reference says why it does not take the call."""
    text = explain(recipes.mxfp8_hybrid(), 8, 64, 32, target=CPU)
    products = [line for line in text.splitlines() if not line.startswith("  ")]
    e4m3, e5m2 = "mxfp8_e4m3 (rceil, nearest)", "mxfp8_e5m2 (rceil, nearest)"
    assert products == [
        f"output [8, 64] x [32, 64]: {e4m3} x {e4m3} -> reference",
        f"grad_lhs [8, 32] x [64, 32]: {e5m2} x {e4m3} -> reference",
        f"grad_rhs [32, 8] x [64, 8]: {e5m2} x {e4m3} -> reference",
    ]
    reasons = [line for line in text.splitlines() if line.startswith("  ")]
    assert "  not xla: XLA has no native float8 dot on platform=cpu" in reasons


def test_the_target_decides():
    """A pure function: what a GPU would do is known on a machine without one."""
    recipe = recipes.float8_rowwise()
    assert explain(recipe, 8, 64, 32, target=CPU).count("-> reference") == 3
    text = explain(recipe, 8, 64, 32, target=H200)
    assert text.count("-> xla") == 3 and "not " not in text


def test_high_precision_products_are_jax():
    text = explain(recipes.weight_only("mxfp4"), 8, 64, 32, target=CPU)
    assert text.splitlines()[0].startswith("output [8, 64] x [32, 64]: high precision x mxfp4")
    assert text.count("-> jax.lax.dot_general") == 2
    assert explain(recipes.high_precision(), 8, 64, 32).count("-> jax.lax.dot_general") == 3


def test_the_default_target_is_this_machine():
    recipe = recipes.mxfp4()
    current = mx_jax.backends.select.current_target()
    assert explain(recipe, 8, 64, 32) == explain(recipe, 8, 64, 32, target=current)


def test_the_dtype_is_that_of_the_product():
    recipe = recipes.mxfp4()
    for dtype in (jnp.float32, jnp.bfloat16, "float16"):
        assert explain(recipe, 8, 64, 32, dtype=dtype, target=CPU).count("-> reference") == 3


def test_what_waits_for_its_name(monkeypatch: pytest.MonkeyPatch):
    """Backends behind the reference: by default not asked, but shown."""
    monkeypatch.setattr(rejections, "MIN_JAX", {"sm100": (0, 0)})
    b200 = Target(platform="cuda", compute_capability=(10, 0))
    with mx_jax.testing.target("cuda", (10, 0)):
        text = explain(recipes.mxfp8(), 8, 64, 32, dtype="bfloat16")
        assert text == explain(recipes.mxfp8(), 8, 64, 32, dtype="bfloat16", target=b200)
    assert text.count("-> reference") == 3
    for name in ("pallas_gpu", "cudnn"):
        line = f"  {name} takes it if named, by prefer_backends('{name}'): not proved on hardware"
        assert text.count(line) == 3
    with mx_jax.prefer_backends("pallas_gpu"):
        named = explain(recipes.mxfp8(), 8, 64, 32, dtype="bfloat16", target=b200)
    assert named.count("-> pallas_gpu") == named.count("cudnn takes it if named") == 3
    assert "pallas_gpu takes it" not in named


def test_only_backend_is_seen():
    with only_backend("reference"):
        text = explain(recipes.float8_rowwise(), 8, 64, 32, target=H200)
    assert text.count("-> reference") == 3
    assert text.count("  not xla: not asked: only_backend('reference')") == 3
    with only_backend("xla"), pytest.raises(ValueError, match="no backend takes MatmulCall"):
        explain(recipes.mxfp4(), 8, 64, 32, target=H200)
