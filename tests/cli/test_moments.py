"""`quantize --scales gptq`: each tensor by the second moment of its inputs, from a file."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mx_jax import calibrate, checkpoint
from tests.cli.conftest import Cli

GPTQ = ("--format", "mxfp4", "--scales", "gptq")


@pytest.fixture
def tensors(rng: np.random.Generator) -> dict[str, np.ndarray]:
    names = ("up.weight", "down.weight")
    return {name: rng.standard_normal((16, 64)).astype(np.float32) for name in names}


@pytest.fixture
def model(tmp_path: Path, tensors: dict[str, np.ndarray]) -> Path:
    checkpoint.save(tmp_path / "model.safetensors", tensors)
    return tmp_path / "model.safetensors"


@pytest.fixture
def moments(tmp_path: Path, rng: np.random.Generator) -> Path:
    """Of one of the two tensors, whose inputs hang together."""
    x = rng.standard_normal((256, 64)) @ rng.standard_normal((64, 64))
    checkpoint.save(tmp_path / "moments.safetensors", {"up.weight": (x.T @ x).astype(np.float32)})
    return tmp_path / "moments.safetensors"


def test_tensors_with_a_moment_and_without(
    model: Path, moments: Path, out: Path, tensors: dict[str, Any], cli: Cli
):
    _, said = cli("quantize", model, out, "--format", "mxfp4", "--moments", moments)
    assert f"1 of 2 tensors by GPTQ, by {moments}" in said
    assert "1 have no moment there, such as down.weight: scales by mse" in said
    result: Any = checkpoint.read(out)
    moment = checkpoint.read(moments)["up.weight"]
    want = calibrate.gptq(tensors["up.weight"], "mxfp4", moment, axis=1)
    searched = {name: calibrate.search_scales(w, "mxfp4", axis=1) for name, w in tensors.items()}
    np.testing.assert_array_equal(result["up.weight"].codes, want.codes)
    np.testing.assert_array_equal(result["down.weight"].codes, searched["down.weight"].codes)
    assert (want.codes != searched["up.weight"].codes).any()


def test_moments_that_do_not_fit(model: Path, moments: Path, out: Path, cli: Cli):
    """Refused before anything is written, with --dry-run too."""
    for words in ([model, out], [model, out, "--dry-run"]):
        assert "gptq needs --moments FILE" in cli.error("quantize", *words, *GPTQ)
        cast = ("--format", "mxfp4", "--scale-rule", "even")
        said = cli.error("quantize", *words, *cast, "--moments", moments)
        assert "--moments is for gptq, and nothing is quantized by it" in said
    checkpoint.save(moments, {"up.weight": np.eye(32, dtype=np.float32)})
    for words in ([model, out], [model, out, "--dry-run"]):
        said = cli.error("quantize", *words, *GPTQ, "--moments", moments)
        assert "needs shape=(64, 64) of up.weight, which has 64 inputs, got" in said
    said = cli.error("quantize", model, out, *GPTQ, "--moments", moments, "--scale-rule", "even")
    assert "--scales gptq chooses the scales; leave out --scale-rule" in said
    assert not out.exists()
