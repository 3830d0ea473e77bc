"""Tensor scales of matrices that servers lay side by side."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import mx_jax
from mx_jax import checkpoint
from mx_jax.cli import main
from mx_jax.commands.rules import fused, unlike

NAMES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")


def test_what_becomes_one():
    names = [f"model.layers.{i}.{part}.weight" for i in (0, 1) for part in NAMES]
    alone = [
        "model.layers.0.mlp.down_proj.weight",
        "w1.weight",
        "model.layers.0.mlp.gate_proj.bias",
    ]
    found = fused([*names, *alone])
    assert found == [tuple(names[0:3]), tuple(names[3:5]), tuple(names[5:8]), tuple(names[8:10])]
    assert fused(["a/q_proj/kernel", "a/k_proj/kernel"]) == [("a/q_proj/kernel", "a/k_proj/kernel")]
    scales = dict.fromkeys(names, 1.0) | {names[4]: 2.0}
    assert unlike(scales) == [tuple(names[3:5])]


@pytest.mark.parametrize("layout", ["nvfp4-pack-quantized", "modelopt-nvfp4", "mx_jax"])
@pytest.mark.parametrize("scales", [None, "mse"])
def test_one_tensor_scale(
    layout: str, scales: str | None, tmp_path: Path, rng: np.random.Generator
):
    """That of the largest matrix, and every block as a cast under it; our own file needs none."""
    values = {
        f"l.0.{name}.weight": (rng.standard_normal((32, 64)) * 2**i).astype(np.float32)
        for i, name in enumerate(NAMES)
    }
    source, out = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    safetensors.numpy.save_file(values, source)
    words = ["quantize", str(source), str(out), "--format", "nvfp4", "--to", layout]
    assert main([*words, *([] if scales is None else ["--scales", scales])]) == 0
    found: Any = checkpoint.read(out)
    held = {name: float(np.asarray(x.tensor_scale).item()) for name, x in found.items()}
    q, k, v, gate, up = (held[name] for name in values)
    if layout == "mx_jax":
        assert len({q, k, v}) == 3 and gate != up
        return
    assert q == k == v and gate == up and q < gate
    name = f"l.0.{NAMES[0]}.weight"
    if scales is None:
        largest = np.abs(values[f"l.0.{NAMES[2]}.weight"]).max() / np.float32(2688)
        np.testing.assert_allclose(q, largest, rtol=2.0**-22)
        expected = mx_jax.quantize(values[name], "nvfp4", tensor_scale=largest)
        np.testing.assert_array_equal(found[name].codes, expected.codes)
        np.testing.assert_array_equal(found[name].scales, expected.scales)
    error = np.asarray(found[name].dequantize(jnp.float32)) - values[name]
    assert np.square(error).mean() < 0.02 * np.square(values[name]).mean()
