"""torchao's layers for quantization-aware training, on CPU, beside `recipes.qat`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

M, K, N = 48, 96, 64


def run_torchao(dtype: str, values: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Output, grad_input and grad_weight [n, k] of its layer with its default rule."""
    torch = pytest.importorskip("torch")
    mx: Any = pytest.importorskip("torchao.prototype.qat.mx")
    config = mx.MXFakeQuantizeConfig(dtype=getattr(torch, dtype))
    layer = mx.MXFakeQuantizedLinear(K, N, activation_config=config, weight_config=config)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(values["w"]))
    x = torch.tensor(values["x"]).requires_grad_()
    output = layer(x)
    output.backward(torch.tensor(values["g"]))
    return [each.detach().numpy() for each in (output, x.grad, layer.weight.grad)]


@pytest.mark.parametrize(
    ("dtype", "format"), [("float4_e2m1fn_x2", "mxfp4"), ("float8_e4m3fn", "mxfp8_e4m3")]
)
def test_qat_is_torchaos(dtype: str, format: str):
    """Either side is within (length + 2) eps sum |a b| of the exact product of the same values."""
    rng = np.random.default_rng(0)
    shapes = {"x": (M, K), "w": (N, K), "g": (M, N)}
    values = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    theirs = run_torchao(dtype, values)
    x, w, g = (jnp.asarray(value) for value in values.values())
    recipe = mx_jax.recipes.qat(format)
    output, pullback = jax.vjp(lambda x, w: mx_jax.matmul(x, w, recipe=recipe), x, w.T)
    grad_input, grad_weight = pullback(g)
    operands = ((x, w.T, K), (g, w, N), (g.T, x, M))
    ours = (output, grad_input, grad_weight.T)
    for actual, expected, (left, right, length) in zip(ours, theirs, operands, strict=True):
        bound = 2 * (length + 4) * 2.0**-24 * 2 * (np.abs(left) @ np.abs(right))
        assert np.all(np.abs(np.asarray(actual) - expected) <= bound)
