"""FP-Quant: weights for rotated inputs, read only for those who know."""

import json
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import mx_jax
from mx_jax import checkpoint
from mx_jax.checkpoint.safetensors_file import Entry
from mx_jax.checkpoint.safetensors_file import write as write_file

HADAMARD = np.array([[1, 1], [1, -1]], np.float32) / np.float32(2**0.5)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def put(folder: Path, size: int, kind: str, matrix: np.ndarray, padded: bool = False) -> None:
    """Codes 2 and 1 in 3 rows of 64, block scales one, under a scale of 4 that divides."""
    one = 127 if kind == "mxfp4" else np.array(1, ml_dtypes.float8_e4m3fn).view(np.uint8)
    shape = (128, 4) if padded else (3, 64 // size)
    scales = np.full(shape, 255, np.uint8)
    scales[:3, : 64 // size] = one
    bfloat16 = ml_dtypes.bfloat16
    tensors = {
        "up.qweight": np.full((3, 32), 0x12, np.uint8),
        "up.scales": scales,
        "up.weight_global_scale": np.full(1, 4, bfloat16),
        "up.act_global_scale": np.full(1, 4, bfloat16),
        "up.forward_hadamard_matrix": matrix.astype(bfloat16),
    }
    entries = {name: Entry.of(x) for name, x in tensors.items()}
    write_file(folder / "model.safetensors", entries, {}, lambda *_: None)
    stated = {"quant_method": "fp_quant", "forward_dtype": kind}
    (folder / "config.json").write_text(json.dumps({"quantization_config": stated}))


@pytest.mark.parametrize(("kind", "size"), [("mxfp4", 32), ("nvfp4", 16)])
@pytest.mark.parametrize("padded", [False, True])
def test_read_by_those_who_know(kind: str, size: int, padded: bool, tmp_path: Path):
    put(tmp_path, size, kind, HADAMARD, padded)
    complaint = "1 weights take inputs that were rotated, such as up.weight by up.forward_hadamard"
    with pytest.raises(ValueError, match=f"{complaint}_matrix.*say rotated=True"):
        checkpoint.read(tmp_path)
    weights = checkpoint.read(tmp_path, rotated=True)
    assert weights.quantized == {"up.weight": f"fp-quant-{kind}"}
    assert weights.stored["up.weight"].rotation == "up.forward_hadamard_matrix"
    assert "1 fp-quant-" in repr(weights) and "for rotated inputs" in repr(weights)
    x = weights["up.weight"]
    assert isinstance(x, mx_jax.MXArray)
    values = np.asarray(x.dequantize(jnp.float32))
    np.testing.assert_array_equal(values, np.tile([1 / 4, 0.5 / 4], (3, 32)))
    # The matrix is there to rotate with.
    assert weights["up.forward_hadamard_matrix"].shape == (2, 2)


def test_a_rotation_by_nothing(tmp_path: Path):
    """Its initialization \"identity\" asks nothing of the inputs."""
    put(tmp_path, 32, "mxfp4", np.eye(2))
    assert checkpoint.read(tmp_path).stored["up.weight"].rotation is None


def test_read_only(tmp_path: Path):
    with pytest.raises(ValueError, match="fp-quant-mxfp4 holds weights that were rotated"):
        checkpoint.write(tmp_path / "a", {}, layout="fp-quant-mxfp4")
