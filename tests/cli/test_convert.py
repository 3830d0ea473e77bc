"""`python -m mx_jax convert` between layouts: nothing lost, or refused with a count."""

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax import checkpoint
from mx_jax.cli import main
from tests.checkpoint.gguf_bytes import Tensor, gguf

pytestmark = pytest.mark.one_python(reason="files in and out")
UP = "layers.0.up.weight"


def mxfp4(rng: np.random.Generator, low: int, high: int) -> mx_jax.MXArray:
    """Random codes under exponents of that range, both ends there."""
    codes = rng.integers(0, 16, (4, 64)).astype(np.uint8)
    codes[:, ::32] = 7
    scales = rng.integers(low, high + 1, (4, 2)).astype(np.uint8)
    scales[0] = low, high
    return mx_jax.MXArray(
        codes=jnp.asarray(codes),
        scales=jnp.asarray(scales),
        tensor_scale=None,
        format=mx_jax.formats.MXFP4,
        blocks=((-1, 32),),
        dtype=np.dtype(np.float32),
    )


def run(capsys: pytest.CaptureFixture[str], *words: Any, status: int = 0) -> tuple[str, str]:
    assert main([str(word) for word in words]) == status
    captured = capsys.readouterr()
    return captured.out, captured.err


def values(path: Path, layout: str | None = None) -> np.ndarray:
    return np.asarray(checkpoint.read(path, layout=layout)[UP].dequantize(jnp.float32))


def test_round_the_layouts_nothing_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rng: np.random.Generator
):
    """llama.cpp's file as ModelOpt's NVFP4, compressed-tensors' NVFP4, gpt-oss's kind again."""
    blocks = rng.integers(0, 256, (4, 2, 17)).astype(np.uint8)
    blocks[..., 0] = 120 + blocks[..., 0] % 9
    source = tmp_path / "a.gguf"
    norm = np.ones(64, np.float32).tobytes()
    source.write_bytes(
        gguf({UP: Tensor(39, (64, 4), blocks.tobytes()), "n": Tensor(0, (64,), norm)})
    )
    expected = values(source)
    for layout in (
        "modelopt-nvfp4",
        "nvfp4-pack-quantized",
        "modelopt-mxfp4",
        "deepseek-v4-experts",
    ):
        out = tmp_path / f"{layout}.safetensors"
        text, said = run(capsys, "convert", source, out, "--to", layout)
        assert checkpoint.read(out, layout=layout).quantized == {UP: layout}
        np.testing.assert_array_equal(values(out, layout), expected)
        first = text.splitlines()[1].split() if text else []
        if layout == "modelopt-nvfp4":
            assert first == [UP, "mxfp4", "nvfp4", "transcoded", "exactly", "16"]
            assert "1 copied, 1 transcoded exactly" in said
        elif layout == "nvfp4-pack-quantized":
            # Codes and scales under other names; a power of two has a reciprocal.
            assert not text and "2 copied" in said
        source = out
    # Back through the format that it came in, its scales are the same.
    last = checkpoint.read(source, layout="deepseek-v4-experts")[UP]
    first = checkpoint.read(tmp_path / "a.gguf")[UP]
    np.testing.assert_array_equal(last.scales, first.scales)


def test_what_does_not_fit_is_counted_and_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rng: np.random.Generator
):
    source, out = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    x = mxfp4(rng, 100, 120)
    checkpoint.save(source, {UP: x})
    words = ("convert", source, out, "--to", "modelopt-nvfp4")
    _, said = run(capsys, *words, status=2)
    # One block of 32 at least is two octaves too small; each is two blocks there.
    unfit = 2 * int((np.asarray(x.scales) < 103).sum())
    assert f"1 of 1 tensors cannot be stored as modelopt-nvfp4 without loss, such as {UP}" in said
    assert f"{unfit} of 16 blocks do not fit" in said and not out.exists()
    text, _ = run(capsys, *words, "--dry-run")
    assert text.splitlines()[1].split() == [UP, "mxfp4", "nvfp4", "requantized", "16", f"{unfit}"]
    assert not out.exists()
    _, said = run(capsys, *words, "--inexact")
    assert "1 requantized" in said
    found = checkpoint.read(out)[UP]
    expected = mx_jax.quantize(x.dequantize(), "nvfp4", scale_rule="amax")
    np.testing.assert_array_equal(found.codes, expected.codes)
    np.testing.assert_array_equal(found.scales, expected.scales)


def test_a_tensor_scale_without_a_reciprocal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rng: np.random.Generator
):
    """compressed-tensors stores what is divided by: not every factor comes back from it."""
    source, out = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    x = mx_jax.quantize(rng.standard_normal((4, 64)).astype(np.float32), "nvfp4")
    candidates = (
        np.nextafter(np.float32(0.0017), np.float32(1)) + np.arange(64, dtype=np.float32) / 2**33
    )
    back = np.float32(1) / (np.float32(1) / candidates)
    for exact in (True, False):
        factor = candidates[(back == candidates) == exact][0]
        scaled = dataclasses.replace(x, tensor_scale=jnp.full((1, 1), factor))
        checkpoint.save(source, {UP: scaled})
        words = ("convert", source, out, "--to", "compressed-tensors", "--force")
        if exact:
            run(capsys, *words)
            np.testing.assert_array_equal(values(out), np.asarray(scaled.dequantize()))
            continue
        _, said = run(capsys, *words, status=2)
        assert "the reciprocal of its tensor scale" in said and "is no float32 number" in said
        _, said = run(capsys, *words, "--inexact")
        assert "1 tensor scale rounded" in said
        found = checkpoint.read(out)[UP]
        np.testing.assert_array_equal(found.codes, x.codes)
        np.testing.assert_allclose(found.tensor_scale, factor, rtol=2.0**-22)


def test_other_elements(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rng: np.random.Generator
):
    source, out = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    checkpoint.save(source, {UP: mxfp4(rng, 120, 124)})
    words = ("convert", source, out, "--to", "mxfp8-quantized")
    _, said = run(capsys, *words, status=2)
    assert "takes e4m3 codes" in said
    # Every E2M1 value of such exponents is one of E4M3: anew, but nothing is lost.
    run(capsys, *words, "--inexact")
    np.testing.assert_array_equal(values(out), values(source))
