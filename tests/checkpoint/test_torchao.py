"""Files of torchao: MXTensor, NVFP4Tensor and Float8Tensor, both ways."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mx_jax import checkpoint, formats
from mx_jax.formats import F32, WHOLE, BlockFormat
from tests.checkpoint.stored import assert_same, draw, put, values

E4M3, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu
ROWS = BlockFormat(name="float8_1xwhole_e4m3", element=formats.E4M3, scale=F32, block=(1, WHOLE))
TENSOR = BlockFormat(
    name="float8_wholexwhole_e5m2", element=formats.E5M2, scale=F32, block=(WHOLE, WHOLE)
)
HELD = (
    formats.MXFP4,
    formats.MXFP6_E2M3,
    formats.MXFP6_E3M2,
    formats.MXFP8_E4M3,
    formats.MXFP8_E5M2,
    formats.NVFP4,
    formats.FLOAT8_BLOCKWISE_2D_E4M3,
    formats.FLOAT8_BLOCKWISE_E4M3,
    ROWS,
    TENSOR,
)


@pytest.mark.parametrize("format", HELD, ids=str)
def test_there_and_back(format: BlockFormat, tmp_path: Path, rng: np.random.Generator):
    x, path = draw(format, (130, 192), rng), tmp_path / "a.safetensors"
    if format == formats.NVFP4:  # experts under scales of their own
        x = draw(format, (3, 4, 32), rng)
        x = dataclasses.replace(x, tensor_scale=jnp.array([0.25, 0.5, 1.0]).reshape(3, 1, 1))
    checkpoint.write(path, {"up.weight": x, "up.bias": jnp.ones(3)}, layout="torchao")
    back = checkpoint.read(path)
    assert list(back) == ["up.weight", "up.bias"]
    assert back.quantized["up.weight"].startswith("torchao-")
    assert back.stored["up.weight"].shape == x.shape
    assert_same(back["up.weight"], x)
    np.testing.assert_array_equal(np.asarray(back["up.bias"]), np.ones(3))


def test_what_is_not_written(tmp_path: Path, rng: np.random.Generator):
    for x in (draw(formats.MXFP4, (64, 8), rng, axis=-2), draw(formats.MXINT8, (8, 64), rng)):
        with pytest.raises(ValueError, match=r"torchao holds .* got up\.weight: format=mx"):
            checkpoint.write(tmp_path / "a", {"up.weight": x}, layout="torchao")


def mx(**changed: Any) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Two experts of 4 rows; the tiles of tensor cores pad their 8 rows to 128."""
    scales = np.zeros((128, 4), np.uint8)
    scales[:8, :2] = np.arange(16).reshape(8, 2) + 120
    # Inside a tile, row r of column c lies at [r % 32, r // 32, c].
    tiles = scales.reshape(4, 32, 4).transpose(1, 0, 2)
    tensors = {
        "up._weight_qdata": np.full((2, 4, 32), 0x21, np.uint8),
        "up._weight_scale": tiles.reshape(2, 32, 8).view(E8M0),
    }
    data = {
        "elem_dtype": {"_type": "torch.dtype", "_data": "float4_e2m1fn_x2"},
        "block_size": 32,
        "orig_dtype": {"_type": "torch.dtype", "_data": "bfloat16"},
        "is_swizzled_scales": True,
    }
    facts = {"_type": "MXTensor", "_data": data | changed, "_tensor_data_names": ["qdata", "scale"]}
    return tensors, facts


def put_weight(path: Path, tensors: dict[str, np.ndarray], facts: Any) -> Path:
    return put(path, tensors, {"tensor_names": '["up.weight"]', "up.weight": json.dumps(facts)})


def test_scales_in_tiles(tmp_path: Path):
    x: Any = checkpoint.read(put_weight(tmp_path / "a", *mx()))["up.weight"]
    assert x.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(x.scales).reshape(8, 2).ravel(), 120 + np.arange(16))


@pytest.mark.parametrize(
    ("facts", "complaint"),
    [
        (mx(block_size=16)[1], "mxfp4 with block_size=16"),
        (mx(elem_dtype="int4")[1], "'int4'"),
        (mx(orig_dtype="int8")[1], "dtype='int8', known"),
        (
            mx(is_swizzled_scales=False)[1],
            r"scales are float8_e8m0fnu\[2, 32, 8\], swizzled=False",
        ),
        (mx(elem_dtype=None)[1], "not subscriptable"),
        (mx()[1] | {"_type": "Int4Tensor"}, "its class is Int4Tensor; read are MXTensor"),
        (mx()[1] | {"_tensor_data_names": ["qdata"]}, r"it has tensors \['qdata'\]"),
        (mx()[1] | {"_tensor_data_names": 3}, "not iterable"),
        (3, "not subscriptable"),
        ({"_type": "MXTensor"}, "'_data'"),
    ],
)
def test_damaged_attributes(facts: Any, complaint: str, tmp_path: Path):
    path = put_weight(tmp_path / "a.safetensors", mx()[0], facts)
    with pytest.raises(ValueError, match=rf"a\.safetensors: up\.weight: .*{complaint}"):
        checkpoint.read(path)


def test_other_damage(tmp_path: Path):
    tensors, facts = mx()
    wide = tensors | {"up._weight_qdata": np.zeros((2, 4, 32), np.float32)}
    with pytest.raises(ValueError, match=r"up\.weight: .*its qdata is float32\[2, 4, 32\]"):
        checkpoint.read(put_weight(tmp_path / "a", wide, facts))
    one = {"up._weight_per_tensor_scale": np.ones((), np.float32)}
    known = facts | {"_tensor_data_names": [*facts["_tensor_data_names"], "per_tensor_scale"]}
    with pytest.raises(ValueError, match=r"up\.weight: .*tensor"):
        checkpoint.read(put_weight(tmp_path / "a", tensors | one, known))["up.weight"]
    del tensors["up._weight_scale"]
    with pytest.raises(ValueError, match=r"\['up\._weight_scale'\] are missing"):
        checkpoint.read(put_weight(tmp_path / "a", tensors, facts))
    norm = {"norm": np.ones(3, np.float32)}
    for names in ("[", '["gone"]', "3", "[[]]"):
        put(tmp_path / "a", norm, {"tensor_names": names})
        with pytest.raises(ValueError, match="a has damaged metadata of torchao"):
            checkpoint.read(tmp_path / "a")


@pytest.mark.slow
def test_against_torchao(tmp_path: Path, rng: np.random.Generator):
    """What it saves is read here, and it reads what is written here: every value, bit for bit."""
    torch = pytest.importorskip("torch")
    support = pytest.importorskip("torchao.prototype.safetensors.safetensors_support")
    import safetensors.torch
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor
    from torchao.quantization import Float8Tensor, PerBlock, PerRow, PerTensor

    plain = torch.tensor(rng.standard_normal((256, 128)).astype(np.float32))
    experts = plain.reshape(2, 128, 128)
    theirs = {"norm.weight": torch.ones(3)}
    elements = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float4_e2m1fn_x2)
    for number, element in enumerate((*elements, "fp6_e2m3", "fp6_e3m2")):
        for tiles in (False, True):
            made = MXTensor.to_mx(plain, element, 32, is_swizzled_scales=tiles)
            theirs[f"mx{number}{tiles}.weight"] = made
    peak = torch.tensor(0.002)
    for tiles in (False, True):
        nvfp4 = dict(is_swizzled_scales=tiles)
        theirs[f"nv{tiles}.weight"] = NVFP4Tensor.to_nvfp4(plain, per_tensor_scale=peak, **nvfp4)
        theirs[f"nv_one{tiles}.weight"] = NVFP4Tensor.to_nvfp4(plain, **nvfp4)
        each = NVFP4Tensor.to_nvfp4(experts, per_tensor_scale=peak.expand(2, 1, 1), **nvfp4)
        theirs[f"nv_experts{tiles}.weight"] = each
    for number, by in enumerate((PerRow(), PerTensor(), PerBlock([128, 128]))):
        theirs[f"f8{number}.weight"] = Float8Tensor.from_hp(plain, granularity=by)
    tensors, metadata = support.flatten_tensor_state_dict(theirs)
    safetensors.torch.save_file(tensors, tmp_path / "theirs", metadata)

    weights = checkpoint.read(tmp_path / "theirs")
    assert set(weights) == set(theirs) and len(weights.quantized) == len(theirs) - 1
    for name in weights.quantized:
        expected = theirs[name].dequantize(torch.float32).numpy()
        np.testing.assert_array_equal(values(weights[name]), expected, name)

    checkpoint.write(tmp_path / "ours", weights, layout="torchao")
    with safetensors.safe_open(str(tmp_path / "ours"), "pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        again, left = support.unflatten_tensor_state_dict(stored, file.metadata())
    assert not left and set(again) == set(theirs)
    for name, expected in theirs.items():
        if name in weights.quantized:
            assert type(again[name]) is type(expected)
            assert torch.equal(again[name].dequantize(), expected.dequantize()), name
            assert torch.equal(
                again[name].qdata.view(torch.uint8), expected.qdata.view(torch.uint8)
            )
