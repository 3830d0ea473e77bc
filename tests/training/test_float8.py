"""float8 recipes: torchao's semantics, and its invalid combinations."""

import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax.formats import E4M3, E5M2, INT8
from mx_jax.recipes import DISABLED, Cast, Float8Config

ELEMENTS = {"e4m3": (E4M3, 448.0), "e5m2": (E5M2, 57344.0)}


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
    chosen = [spec.fast_accumulation for spec in (recipe.fwd, recipe.dlhs, recipe.drhs)]
    assert chosen == [True, False, False]
    config = Float8Config(fast_accumulation_output=False, fast_accumulation_grad_weight=True)
    recipe = config.recipe("mine")
    chosen = [spec.fast_accumulation for spec in (recipe.fwd, recipe.dlhs, recipe.drhs)]
    assert chosen == [False, False, True]


E4M3_CAST, E5M2_CAST = Cast(element=E4M3), Cast(element=E5M2)
INVALID = [
    ({"input": DISABLED}, "operands of output .* got input=high precision and weight=float8 tens"),
    ({"grad_output": DISABLED}, "operands of grad_input .* got grad_output=high precision"),
    ({"weight_for_grad_input": DISABLED}, "of grad_input .* weight_for_grad_input=high precision"),
    (
        {"grad_output_for_grad_weight": DISABLED},
        "operands of grad_weight .* grad_output_for_grad_weight=high precision",
    ),
    ({"input_for_grad_weight": E5M2_CAST}, "input must be cast to one .* got e4m3 and e5m2"),
    ({"grad_output_for_grad_weight": E4M3_CAST}, "grad_output must be .* got e5m2 and e4m3"),
    (
        {
            "grad_output": E4M3_CAST,
            "input_for_grad_weight": DISABLED,
            "grad_output_for_grad_weight": DISABLED,
        },
        r"got e4m3 and e5m2; give both casts the same element \(a disabled cast, too",
    ),
]


@pytest.mark.parametrize(("casts", "message"), INVALID)
def test_invalid_configs_name_both_sides(casts, message):
    with pytest.raises(ValueError, match=message):
        Float8Config(**{f"cast_config_{name}": cast for name, cast in casts.items()})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scaling": "static"}, "scaling must be 'dynamic' or 'disabled', got 'static'"),
        ({"granularity": "blockwise"}, "granularity must be .* got 'blockwise'"),
        ({"scaling": "disabled", "granularity": "axiswise"}, "a disabled cast has no granularity"),
        ({"element": INT8}, "8-bit floating-point format, got element=int8"),
    ],
)
def test_invalid_casts_say_why(options, message):
    with pytest.raises(ValueError, match=message):
        Cast(**options)
