"""float8 recipes: torchao's semantics."""

import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax

ELEMENTS = ("e4m3", "e5m2")


def _tensors() -> dict[str, np.ndarray]:
    """Inputs that meet every branch: ordinary, wide, below epsilon, zero rows and columns."""
    rng = np.random.default_rng(0)
    normal = rng.standard_normal((24, 40)).astype(np.float32)
    zeros = normal.copy()
    zeros[3], zeros[:, 5], zeros[7] = 0.0, 0.0, -0.0
    return {
        "normal": normal,
        "wide": np.ldexp(normal, rng.integers(-60, 60, normal.shape)).astype(np.float32),
        "below epsilon": (normal * 1e-13).astype(np.float32),
        "zeros": zeros,
        "large": (normal * 1e30).astype(np.float32),
    }


@pytest.mark.slow
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize(("kind", "axis"), [("tensorwise", -1), ("rowwise", -1), ("rowwise", 0)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scales_and_codes_equal_torchao(kind, axis, element, power_of_two, dtype):
    torch = pytest.importorskip("torch")
    granularities = pytest.importorskip("torchao.float8.config").ScalingGranularity
    utilities = pytest.importorskip("torchao.float8.float8_utils")

    target = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[element]
    granularity = {"tensorwise": granularities.TENSORWISE, "rowwise": granularities.AXISWISE}[kind]
    for name, x in _tensors().items():
        theirs = torch.tensor(x).to(getattr(torch, dtype))
        scale = utilities.tensor_to_scale(
            theirs,
            target,
            scaling_granularity=granularity,
            axiswise_dim=axis,
            round_scales_to_power_of_2=power_of_two,
        )
        codes = utilities.to_fp8_saturated(theirs.float() * scale, target).view(torch.uint8).numpy()
        ours = mx_jax.quantize(
            jnp.asarray(x).astype(dtype),
            f"float8_{kind}_{element}",
            axis=axis,
            scale_rule="float8_power_of_two" if power_of_two else "float8",
        )
        np.testing.assert_array_equal(np.asarray(ours.scales).ravel(), scale.numpy().ravel(), name)
        np.testing.assert_array_equal(np.asarray(ours.codes), codes, name)


def test_fast_accumulation_is_a_choice_of_each_product():
    recipe = mx_jax.recipes.float8_rowwise()
    chosen = [
        spec.fast_accumulation for spec in (recipe.output, recipe.grad_input, recipe.grad_weight)
    ]
    assert chosen == [True, False, False]
