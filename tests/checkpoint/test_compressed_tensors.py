"""compressed-tensors' own code against the layouts that it reads and writes."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax import checkpoint


@pytest.mark.peers
@pytest.mark.parametrize("name", ["mxfp4", "mxfp6", "mxfp8", "nvfp4"])
def test_compressed_tensors(name: str, tmp_path: Path, rng: np.random.Generator):
    """What its compressors write is read here, and they read what is written here: bit for bit."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("compressed_tensors")
    import safetensors.torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import quant_scheme

    layout = f"{name}-quantized" if name == "mxfp8" else f"{name}-pack-quantized"
    scheme = quant_scheme.preset_name_to_scheme(f"{name.upper()}A16", ["Linear"])
    compressor = BaseCompressor.get_value_from_registry(layout)
    weight = torch.tensor(rng.standard_normal((8, 64)).astype(np.float32))
    size, largest = {"mxfp4": (32, 6), "mxfp6": (32, 7.5), "mxfp8": (32, 448), "nvfp4": (16, 6)}[
        name
    ]
    amax = weight.reshape(8, -1, size).abs().amax(-1)
    if name == "nvfp4":
        peak = 2688 / weight.abs().max()
        given = {
            "weight": weight,
            "weight_scale": (amax / largest * peak).to(torch.float8_e4m3fn).float(),
            "weight_global_scale": peak.reshape(1),
        }
    else:
        given = {
            "weight": weight,
            "weight_scale": 2 ** torch.floor(torch.log2(amax / largest) + 0.5),
        }
    packed = compressor.compress(given, scheme)
    path = tmp_path / "theirs.safetensors"
    safetensors.torch.save_file({f"up.{k}": v.contiguous() for k, v in packed.items()}, path)
    found = checkpoint.read(path)["up.weight"]
    assert isinstance(found, mx_jax.MXArray)
    theirs = compressor.decompress(packed, scheme)["weight"].float().numpy()
    ours = np.asarray(found.dequantize(jnp.float32))
    if name == "nvfp4":
        # It divides by the stored number; a factor is its rounded reciprocal.
        np.testing.assert_allclose(ours, theirs, rtol=2.0**-7)
    else:
        np.testing.assert_array_equal(ours, theirs)

    checkpoint.write(tmp_path / "ours.safetensors", {"up.weight": found}, layout=layout)
    again = safetensors.torch.load_file(tmp_path / "ours.safetensors")
    assert again.keys() == {f"up.{k}" for k in packed}
    for key, value in packed.items():
        mine = again[f"up.{key}"]
        assert mine.dtype == value.dtype and mine.shape == value.shape, key
        if key == "weight_global_scale":
            assert abs(float(mine / value) - 1) < 2.0**-22
        else:
            assert torch.equal(mine.view(torch.uint8), value.view(torch.uint8)), key
