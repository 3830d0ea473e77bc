"""`python -m mx_jax convert` between layouts: nothing lost, or refused with a count."""

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import mx_jax
from mx_jax import checkpoint
from mx_jax.commands import main
from mx_jax.commands.rules import fused
from tests.checkpoint.stored import assert_same_tensors, draw, put_model, values
from tests.cli.conftest import Cli

UP = "layers.0.up.weight"


def mxfp4(rng: np.random.Generator, low: int, high: int) -> mx_jax.MXArray:
    """Random codes under exponents of that range, both ends there."""
    codes = rng.integers(0, 16, (4, 64)).astype(np.uint8)
    codes[:, ::32] = 7
    scales = rng.integers(low, high + 1, (4, 2)).astype(np.uint8)
    scales[0] = low, high
    made = draw(mx_jax.formats.MXFP4, (4, 64), rng)
    made = dataclasses.replace(made, codes=jnp.asarray(codes), scales=jnp.asarray(scales))
    return dataclasses.replace(made, dtype=jnp.dtype("float32"))


def test_what_does_not_fit_is_counted_and_refused(
    tmp_path: Path, cli: Cli, rng: np.random.Generator
):
    source, out = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    x = mxfp4(rng, 100, 120)
    checkpoint.save(source, {UP: x})
    words = ("convert", source, out, "--to", "modelopt-nvfp4")
    said = cli.error(*words)
    # One block of 32 at least is two octaves too small; each is two blocks there.
    unfit = 2 * int((np.asarray(x.scales) < 103).sum())
    assert f"1 of 1 tensors cannot be stored as modelopt-nvfp4 without loss, such as {UP}" in said
    assert f"{unfit} of 16 blocks do not fit" in said and not out.exists()
    # A dry run lists them, and refuses what the run refuses.
    text, refused = cli(*words, "--dry-run", status=2)
    assert text.splitlines()[1].split() == [
        UP,
        "mxfp4",
        "nvfp4",
        "does",
        "not",
        "fit",
        "16",
        f"{unfit}",
    ]
    assert refused == said and not out.exists()
    assert cli.error(*words, "--inexact") == said and not out.exists()


def test_a_tensor_scale_without_a_reciprocal(tmp_path: Path, cli: Cli, rng: np.random.Generator):
    """compressed-tensors stores what is divided by: not every factor comes back from it."""
    source, out = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    x = mx_jax.quantize(rng.standard_normal((4, 64)).astype(np.float32), "nvfp4")
    candidates = (
        np.nextafter(np.float32(0.0017), np.float32(1)) + np.arange(64, dtype=np.float32) / 2**33
    )
    back = np.float32(1) / (np.float32(1) / candidates)
    factor = candidates[back != candidates][0]
    checkpoint.save(source, {UP: dataclasses.replace(x, tensor_scale=jnp.full((1, 1), factor))})
    words = ("convert", source, out, "--to", "compressed-tensors")
    said = cli.error(*words)
    assert "the reciprocal of its tensor scale" in said and "is no float32 number" in said
    _, said = cli(*words, "--inexact")
    assert "1 tensor scale rounded" in said
    result: Any = checkpoint.read(out)[UP]
    np.testing.assert_array_equal(result.codes, x.codes)
    np.testing.assert_allclose(result.tensor_scale, factor, rtol=2.0**-22)


def test_gpt_oss_as_its_unquantized_model(
    tmp_path: Path, cli: Cli, rules: Any, rng: np.random.Generator
):
    """`[experts, in, out]` under the hub's names, which a square matrix does not show."""
    name, codes = "mlp.experts.down_proj", rng.integers(0, 256, (2, 32, 1, 16)).astype(np.uint8)
    scales = rng.integers(120, 128, (2, 32, 1)).astype(np.uint8)
    theirs = {f"{name}_blocks": codes, f"{name}_scales": scales}
    theirs[f"{name}_bias"] = np.ones((2, 32), np.float32)
    released, again, exact = tmp_path / "released", tmp_path / "again", tmp_path / "exact"
    ours = tmp_path / "ours"
    put_model(released, theirs, {"model_type": "gpt_oss"})
    nibbles = np.stack([codes & 15, codes >> 4], -1).reshape(2, 32, 32)
    e2m1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    rows = np.concatenate([e2m1, -e2m1])[nibbles] * 2.0 ** (scales.astype(int) - 127)
    cli("dequantize", released, exact, "--dtype", "float32")
    result = safetensors.numpy.load_file(exact / "model.safetensors")
    np.testing.assert_array_equal(result[name], rows.swapaxes(1, 2))
    # The way back, from values and by way of our own file: the same bytes.
    inputs = {"pattern": ".*_proj", "format": "mxfp4", "scale_rule": "even"}
    decided = rules("", inputs | {"axis": -2})
    cli("quantize", exact, again, "--rules", decided, "--to", "gpt-oss")
    assert_same_tensors(released, again)
    cli("convert", released, ours, "--to", "mx_jax")
    cli("convert", ours, again, "--to", "gpt-oss", "--force")
    assert all(
        np.array_equal(array, theirs[key])
        for key, array in safetensors.numpy.load_file(again / "model.safetensors").items()
    )
    # Along the outputs it would be another model.
    decided = rules("", inputs | {"axis": -1})
    words = ("quantize", exact, again, "--rules", decided, "--to", "gpt-oss", "--force")
    assert f"with blocks=((-2, 32),), got {name}: " in cli.error(*words)


@pytest.mark.parametrize(("low", "merges"), [(3, True), (20, False)])
def test_mxfp4_as_nvfp4(low: int, merges: bool, tmp_path: Path, cli: Cli, rng: np.random.Generator):
    """Every value stays; gate and up, which servers merge, have one tensor scale, 2^(kmax - 8).

    Each of its own where they fit under no one, and that is said.
    """
    source, out, layout = tmp_path / "a.safetensors", tmp_path / "b", "nvfp4-pack-quantized"
    weights = {
        f"mlp.{part}_proj.weight": mxfp4(rng, first, first + 2)
        for part, first in (("gate", 118 - low), ("up", 118), ("down", 118))
    }
    checkpoint.save(source, weights)
    _, said = cli("convert", source, out, "--to", layout)
    apart = "1 groups of tensors, such as mlp.gate_proj.weight, "
    assert "3 transcoded exactly" in said and (apart in said) != merges
    assert ("fit under no one tensor scale and keep their own" in said) != merges
    result: Any = checkpoint.read(out)
    assert set(result.quantized.values()) == {layout}
    largest = {name: int(np.asarray(x.scales).max()) for name, x in weights.items()}
    for name, x in weights.items():
        np.testing.assert_array_equal(values(result[name]), values(x))
        exponent = 120 if merges else largest[name]
        assert float(np.asarray(result[name].tensor_scale).item()) == 2.0 ** (exponent - 127 - 8)


@pytest.mark.parametrize(("factor", "merges"), [(0.5, True), (0.3, False)])
def test_copied_queries_keys_and_values_under_unlike_tensor_scales(
    factor: float, merges: bool, tmp_path: Path, cli: Cli, rng: np.random.Generator
):
    """Codes that fit as they are still get one tensor scale, or a line says that they cannot."""
    source, out = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    x = mx_jax.quantize(rng.standard_normal((4, 64)).astype(np.float32), "nvfp4")
    assert x.tensor_scale is not None
    names = [f"layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    scales = [x.tensor_scale, x.tensor_scale * factor, x.tensor_scale]
    model = {
        name: dataclasses.replace(x, tensor_scale=scale)
        for name, scale in zip(names, scales, strict=True)
    }
    checkpoint.save(source, model)
    _, said = cli("convert", source, out, "--to", "modelopt-nvfp4")
    result: Any = checkpoint.read(out, layout="modelopt-nvfp4")
    for name, operand in model.items():
        np.testing.assert_array_equal(values(result[name]), values(operand))
    kept = {float(np.asarray(result[name].tensor_scale).item()) for name in names}
    assert len(kept) == (1 if merges else 2)
    assert ("1 groups of tensors, such as layers.0.self_attn.q_proj" in said) != merges
    assert ("`quantize --to modelopt-nvfp4` of the unquantized model" in said) != merges
    assert ("1 transcoded exactly" in said) == merges


def test_a_file_that_fits_two_layouts(tmp_path: Path, cli: Cli):
    """96 bits a row are 12 bytes of 24 E2M1 codes, or of 16 in six bits, under one scale."""
    source = tmp_path / "a.safetensors"
    parts = {"a.weight_packed": np.zeros((8, 12), np.uint8)}
    parts["a.weight_scale"] = np.full((8, 1), 127, np.uint8)
    safetensors.numpy.save_file(parts, source)
    words = ("convert", source, tmp_path / "b.safetensors", "--to", "mx_jax")
    said = cli.error(*words)
    assert "fits several layouts: " in said
    assert "say which with layout=, at the command line with --from" in said


# Tensor scales of matrices that servers lay side by side.


NAMES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")


def test_what_becomes_one():
    names = [f"model.layers.{i}.{part}.weight" for i in (0, 1) for part in NAMES]
    alone = [
        "model.layers.0.mlp.down_proj.weight",
        "w1.weight",
        "model.layers.0.mlp.gate_proj.bias",
    ]
    result = fused([*names, *alone])
    assert result == [tuple(names[0:3]), tuple(names[3:5]), tuple(names[5:8]), tuple(names[8:10])]
    assert fused(["a/q_proj/kernel", "a/k_proj/kernel"]) == [("a/q_proj/kernel", "a/k_proj/kernel")]


@pytest.mark.parametrize(
    ("layout", "scales"),
    [("nvfp4-pack-quantized", None), ("modelopt-nvfp4", "mse"), ("mx_jax", None)],
)
def test_one_tensor_scale(
    layout: str, scales: str | None, tmp_path: Path, rng: np.random.Generator
):
    """That of the largest matrix, and every block as a cast under it; our own file needs none."""
    tensors = {
        f"l.0.{name}.weight": (rng.standard_normal((32, 64)) * 2**i).astype(np.float32)
        for i, name in enumerate(NAMES)
    }
    source, out = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    safetensors.numpy.save_file(tensors, source)
    words = ["quantize", str(source), str(out), "--format", "nvfp4", "--to", layout]
    assert main([*words, *([] if scales is None else ["--scales", scales])]) == 0
    result: Any = checkpoint.read(out)
    held = {name: float(np.asarray(x.tensor_scale).item()) for name, x in result.items()}
    q, k, v, gate, up = (held[name] for name in tensors)
    if layout == "mx_jax":
        assert len({q, k, v}) == 3 and gate != up
        return
    assert q == k == v and gate == up and q < gate
    name = f"l.0.{NAMES[0]}.weight"
    if scales is None:
        largest = np.abs(tensors[f"l.0.{NAMES[2]}.weight"]).max() / np.float32(2688)
        np.testing.assert_allclose(q, largest, rtol=2.0**-22)
        expected = mx_jax.quantize(tensors[name], "nvfp4", tensor_scale=largest)
        np.testing.assert_array_equal(result[name].codes, expected.codes)
        np.testing.assert_array_equal(result[name].scales, expected.scales)
    error = values(result[name]) - tensors[name]
    assert np.square(error).mean() < 0.02 * np.square(tensors[name]).mean()
