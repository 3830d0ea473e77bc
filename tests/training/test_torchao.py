"""torchao's layers for float8, MXFP8 and quantization-aware training, on CPU, beside ours."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
import mx_jax.convert

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

NAMES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
M, K, N = 48, 64, 80
# Roles in the order in which torchao's layer casts: forward, grad_input, grad_weight.
ROLES = ("x", "w", "g for dx", "w for dx", "g for dw", "x for dw")


@dataclasses.dataclass(frozen=True)
class Theirs:
    """What torchao's layer made of x, w [n, k] and g: arrays, and its casts in order."""

    values: dict[str, np.ndarray]
    output: np.ndarray
    grad_input: np.ndarray
    grad_weight: np.ndarray
    casts: list[tuple[np.ndarray, np.ndarray]]


def run_torchao(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> Theirs:
    torch = pytest.importorskip("torch")
    float8_linear = pytest.importorskip("torchao.float8.float8_linear")
    config = pytest.importorskip("torchao.float8.config").Float8LinearConfig
    rng = np.random.default_rng(0)
    values = {
        "x": rng.standard_normal((M, K)).astype(np.float32),
        "w": rng.standard_normal((N, K)).astype(np.float32) / 8,
        "g": rng.standard_normal((M, N)).astype(np.float32) * 1e-3,
    }
    casts: list[tuple[np.ndarray, np.ndarray]] = []
    cast = float8_linear.hp_tensor_to_float8_dynamic

    def recorded(*args: Any, **options: Any) -> Any:
        result = cast(*args, **options)
        codes = result._data.contiguous().view(torch.uint8).numpy()
        casts.append((codes, result._scale.float().numpy()))
        return result

    monkeypatch.setattr(float8_linear, "hp_tensor_to_float8_dynamic", recorded)
    linear = torch.nn.Linear(K, N, bias=False, dtype=getattr(torch, dtype))
    with torch.no_grad():
        linear.weight.copy_(torch.tensor(values["w"]))
    chosen = dataclasses.replace(config.from_recipe_name(name), emulate=True)
    layer = float8_linear.Float8Linear.from_float(linear, config=chosen)
    x = torch.tensor(values["x"]).to(getattr(torch, dtype)).requires_grad_()
    output = layer(x)
    output.backward(torch.tensor(values["g"]).to(getattr(torch, dtype)))
    arrays = [tensor.detach().float().numpy() for tensor in (output, x.grad, layer.weight.grad)]
    return Theirs(values, *arrays, casts)


def bound_of(left: Any, right: Any, length: int, values: float) -> np.ndarray:
    """Of the difference of two sums in float32; casts make values as much larger at most."""
    left, right = (np.abs(np.asarray(side, np.float32)) for side in (left, right))
    return 2 * (length + 4) * 2.0**-24 * values * (left @ right)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_a_linear_layer_is_torchaos(name, dtype, monkeypatch):
    """Every cast has its bits; so products differ by float32's order of summation alone.

    Either side is within (length + 2) * eps * sum |a b| of the exact product of the dequantized
    operands, whose rounding adds one eps each; a bfloat16 result is rounded once more.
    """
    theirs = run_torchao(name, dtype, monkeypatch)
    recipe = mx_jax.recipes.from_name(name)
    x, w, g = (jnp.asarray(theirs.values[key]).astype(dtype) for key in "xwg")
    # Blocks lie along the contracting axis; torchao's weight is [n, k], cast as its transpose.
    ours = dict(
        zip(
            ROLES,
            (
                (x, recipe.output.lhs, 1),
                (w.T, recipe.output.rhs, 0),
                (g, recipe.grad_input.lhs, 1),
                (w.T, recipe.grad_input.rhs, 1),
                (g, recipe.grad_weight.lhs, 0),
                (x, recipe.grad_weight.rhs, 0),
            ),
            strict=True,
        )
    )
    made = [role for role in ROLES if ours[role][1] is not None]
    assert len(theirs.casts) == len(made) == (4 if name.endswith("hp") else 6)
    for role, (codes, scale) in zip(made, theirs.casts, strict=True):
        values, spec, axis = ours[role]
        actual = mx_jax.quantize(values, spec.format, axis=axis, scale_rule=spec.scale_rule)
        np.testing.assert_array_equal(np.asarray(actual.codes), codes, err_msg=role)
        np.testing.assert_array_equal(
            np.asarray(actual.scales).ravel(), scale.ravel(), err_msg=role
        )
    output, pullback = jax.vjp(lambda x, w: mx_jax.matmul(x, w, recipe=recipe), x, w.T)
    grad_input, grad_weight = pullback(g)
    for ours, expected, (left, right, length) in (
        (output, theirs.output, (x, w.T, K)),
        (grad_input, theirs.grad_input, (g, w, N)),
        (grad_weight.T, theirs.grad_weight, (g.T, x, M)),
    ):
        bound = bound_of(left, right, length, 1.2)
        if dtype == "bfloat16":
            bound = bound + 2.0**-8 * np.abs(expected)
        difference = np.abs(np.asarray(ours, np.float32) - expected)
        assert (difference <= bound).all()
        assert np.abs(expected).max() > 100 * bound.max() or dtype == "bfloat16"


@pytest.mark.parametrize("high_weight", [False, True])
@pytest.mark.parametrize("rule", ["rceil", "floor"])
def test_the_mxfp8_training_layer_has_our_bits(rule: str, high_weight: bool):
    """bfloat16: sums in float32, rounded once, so that their order does not show."""
    torch = pytest.importorskip("torch")
    layers = pytest.importorskip("torchao.prototype.moe_training.mxfp8_linear")
    config = pytest.importorskip("torchao.prototype.mx_formats.config")
    rng = np.random.default_rng(0)
    x, w, g = (rng.standard_normal(shape) for shape in ((M, K), (N, K), (M, N)))
    # Blocks of 32 rows: torchao refuses partial ones.
    x, w, g = x[:32], w[:64], g[:32, :64]
    theirs = layers.MXFP8Linear(
        *reversed(w.shape),
        bias=False,
        dtype=torch.bfloat16,
        kernel_preference=config.KernelPreference.EMULATED,
        scale_calculation_mode=config.ScaleCalculationMode(rule),
        wgrad_with_hp=high_weight,
    )
    with torch.no_grad():
        theirs.weight.copy_(torch.tensor(w))
    rows = torch.tensor(x, dtype=torch.bfloat16).requires_grad_()
    expected = theirs(rows)
    expected.backward(torch.tensor(g, dtype=torch.bfloat16))
    recipe = mx_jax.recipes.mxfp8().with_(scale_rule=rule)
    if high_weight:
        recipe = recipe.with_(grad_weight=None)
    ours, pullback = jax.vjp(
        lambda x, w: mx_jax.matmul(x, w.T, recipe=recipe),
        *(jnp.asarray(a, jnp.bfloat16) for a in (x, w)),
    )
    gradients = pullback(jnp.asarray(g, jnp.bfloat16))
    for actual, tensor in zip(
        (ours, *gradients), (expected, rows.grad, theirs.weight.grad), strict=True
    ):
        np.testing.assert_array_equal(
            np.asarray(actual, np.float32), tensor.detach().float().numpy()
        )


@pytest.mark.parametrize(
    ("dtype", "format"), [("float4_e2m1fn_x2", "mxfp4"), ("float8_e4m3fn", "mxfp8_e4m3")]
)
def test_qat_is_torchaos(dtype: str, format: str):
    """With its default rule; either side is as near the exact product of the same values."""
    torch = pytest.importorskip("torch")
    mx: Any = pytest.importorskip("torchao.prototype.qat.mx")
    rng, k, n = np.random.default_rng(0), 96, 64
    x, w, g = (rng.standard_normal(s).astype(np.float32) for s in ((M, k), (n, k), (M, n)))
    config = mx.MXFakeQuantizeConfig(dtype=getattr(torch, dtype))
    layer = mx.MXFakeQuantizedLinear(k, n, activation_config=config, weight_config=config)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(w))
    rows = torch.tensor(x).requires_grad_()
    theirs = layer(rows)
    theirs.backward(torch.tensor(g))
    recipe = mx_jax.recipes.qat(format)
    output, pullback = jax.vjp(lambda x, w: mx_jax.matmul(x, w, recipe=recipe), x, w.T)
    grad_input, grad_weight = pullback(jnp.asarray(g))
    for actual, tensor, operands in (
        (output, theirs, (x, w.T, k)),
        (grad_input, rows.grad, (g, w, n)),
        (grad_weight.T, layer.weight.grad, (g.T, x, M)),
    ):
        difference = np.abs(np.asarray(actual) - tensor.detach().numpy())
        assert np.all(difference <= bound_of(*operands, 2))


@pytest.mark.parametrize("name", ["tensorwise", "rowwise"])
def test_the_auto_filter_is_torchaos(name):
    """For every pair of sizes around its limits, and for a skipped name."""
    torch = pytest.importorskip("torch")
    utils = pytest.importorskip("torchao.float8.float8_linear_utils")
    sizes = [8 * i for i in (127, 128, 129, 130, 255, 256, 257, 258, 511, 512, 513, 514)]
    theirs = utils._auto_filter_for_recipe(name, ["head"])
    ours, recipe = mx_jax.convert.AutoFilter(("head",)), mx_jax.recipes.from_name(name)
    seen = set()
    for k, n in itertools.product(sizes, sizes):
        layer = torch.nn.Linear(k, n, bias=False, device="meta")
        for path in ("mlp.up", "lm_head"):
            expected = theirs(layer, path)
            assert ours(path, (k, n), recipe) == expected, (path, k, n)
            seen.add(expected)
    assert seen == {True, False}
