"""Files of others by hand, from what is published of them: values worked out from the bits.

How each lies was read in the code of those who write and read it: transformers' fine-grained fp8
(DeepSeek, packed FP4 in I8), ModelOpt's MXFP4QTensor and NVFP4QTensor, Quark's Pack_fp4.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax import checkpoint
from tests.checkpoint.bytes_by_hand import E4M3, Tensor, floats, nibbles, put, taken_apart, tensor

# 130 x 200 is two by two tiles of 128 x 128, three of them partial.
ROWS, COLUMNS = 130, 200
CODES = np.resize(np.array([*E4M3], np.uint8), (ROWS, COLUMNS))
VALUES = np.resize(np.array([*E4M3.values()], np.float32), (ROWS, COLUMNS))
# FP4 of two rows of two blocks: every code, and bytes that are negative as I8.
FP4 = bytes(range(0x00, 0x100, 0x11)) + bytes(range(0xF0, 0xE0, -1)) + bytes([0x21, 0x8F] * 16)


@dataclasses.dataclass(frozen=True)
class Fixture:
    """A file of one weight.

    Attributes:
      layout: that it has to be taken for.
      weight: its name.
      tensors: the file's.
      said: `quantization_config`.
      values: of the weight.
    """

    layout: str
    weight: str
    tensors: dict[str, Tensor]
    said: Mapping[str, Any]
    values: np.ndarray


def values_of(folder: Path, name: str) -> np.ndarray:
    """A weight that is read from a folder, decoded."""
    found = checkpoint.read(folder)[name]
    assert isinstance(found, mx_jax.MXArray)
    return np.asarray(found.dequantize(jnp.float32))


def tiles(scales: list[list[float]]) -> np.ndarray:
    """Two by two numbers over their tiles."""
    spread = np.array(scales, np.float32).repeat(128, 0).repeat(128, 1)
    return VALUES * spread[:ROWS, :COLUMNS]


def blocks(size: int, scales: list[float]) -> np.ndarray:
    """Values of `FP4`, one number a block."""
    spread = np.array(scales, np.float32).reshape(2, -1).repeat(size, 1)
    return nibbles(FP4, (2, 64)) * spread


def deepseek(layout: str, name: str, scales: str, stored: Tensor, factors: Any) -> Fixture:
    said = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    codes = tensor("F8_E4M3", (ROWS, COLUMNS), CODES.tobytes())
    found = {f"{name}.weight": codes, f"{name}.{scales}": stored}
    return Fixture(layout, f"{name}.weight", found, said, tiles(factors))


def fp4(
    layout: str,
    name: str,
    scales: Mapping[str, Tensor],
    said: Mapping[str, Any],
    values: np.ndarray,
    dtype: str = "U8",
) -> Fixture:
    found = {f"{name}.weight": tensor(dtype, (2, 32), FP4)}
    found |= {f"{name}.{suffix}": stored for suffix, stored in scales.items()}
    return Fixture(layout, f"{name}.weight", found, said, values)


# As `quantization_config` of an export by Quark 0.13 says it.
QUARK = {
    "quant_method": "quark",
    "global_quant_config": {"weight": {"dtype": "fp4", "group_size": 32, "scale_format": "e8m0"}},
    "exclude": ["lm_head"],
}
MODELOPT = {"quant_method": "modelopt", "producer": {"name": "modelopt"}, "ignore": []}
# 2^0, 2^-3, 2^1 and 2^-126, the least that bfloat16 has as a normal number.
E8M0 = tensor("U8", (2, 2), [127, 124, 128, 1])
OCTAVES = [1, 0.125, 2, 2.0**-126]
PROJECTION = "model.layers.0.mlp.up_proj"

FIXTURES = [
    deepseek(
        "deepseek-v3",
        PROJECTION,
        "weight_scale_inv",
        floats((2, 2), [1, 0.3, 1.5, 7e-4]),
        [[1, 0.3], [1.5, 7e-4]],
    ),
    deepseek(
        "deepseek-v3.1",
        PROJECTION,
        "weight_scale_inv",
        tensor("F8_E8M0", (2, 2), [127, 120, 128, 110]),
        [[1, 2.0**-7], [2, 2.0**-17]],
    ),
    deepseek(
        "deepseek-v4-base",
        "layers.0.attn.wq_a",
        "scale",
        floats((2, 2), [0.1, 2, 1, 3e-5]),
        [[0.1, 2], [1, 3e-5]],
    ),
    deepseek(
        "deepseek-v4",
        "layers.0.attn.wq_a",
        "scale",
        tensor("F8_E8M0", (2, 2), [126, 127, 100, 129]),
        [[0.5, 1], [2.0**-27, 4]],
    ),
    fp4(
        "deepseek-v4-experts",
        "layers.0.ffn.experts.7.w2",
        {"scale": tensor("F8_E8M0", (2, 2), [127, 124, 128, 1])},
        {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
        blocks(32, OCTAVES),
        dtype="I8",
    ),
    fp4(
        "modelopt-mxfp4",
        PROJECTION,
        {"weight_scale": E8M0},
        # As ModelOpt 0.47 spells it; others are in capitals.
        MODELOPT | {"quant_algo": "mxfp4"},
        blocks(32, OCTAVES),
    ),
    fp4(
        "modelopt-nvfp4",
        PROJECTION,
        {
            # 1, 448, 2^-9, 1.125; 0.5, 0, 2, 1.5
            "weight_scale": tensor(
                "F8_E4M3", (2, 4), [0x38, 0x7E, 0x01, 0x39, 0x30, 0x00, 0x40, 0x3C]
            ),
            "weight_scale_2": floats((), [0.25]),
        },
        MODELOPT | {"quant_algo": "NVFP4"},
        blocks(16, [0.25, 112, 2.0**-11, 0.28125, 0.125, 0, 0.5, 0.375]),
    ),
    fp4("modelopt-mxfp4", PROJECTION, {"weight_scale": E8M0}, QUARK, blocks(32, OCTAVES)),
    fp4(
        "quark-mxfp4",
        PROJECTION,
        {"weight_quantizer.scale": E8M0},
        QUARK,
        blocks(32, OCTAVES),
    ),
]
IDS = [f"{each.layout}-{each.said['quant_method']}" for each in FIXTURES]


@pytest.mark.parametrize("fixture", FIXTURES, ids=IDS)
@pytest.mark.parametrize("stated", [True, False], ids=["stated", "bare"])
def test_read(fixture: Fixture, stated: bool, tmp_path: Path):
    """With its config.json, and by names, dtypes and shapes alone."""
    config = {"quantization_config": fixture.said, "torch_dtype": "float32"} if stated else None
    weights = checkpoint.read(put(tmp_path, fixture.tensors, config))
    assert weights.quantized == {fixture.weight: fixture.layout}
    found = values_of(tmp_path, fixture.weight)
    # Zeros of either sign too.
    np.testing.assert_array_equal(found.view(np.uint32), fixture.values.view(np.uint32))


@pytest.mark.parametrize("fixture", FIXTURES, ids=IDS)
def test_written(fixture: Fixture, tmp_path: Path):
    """The writer makes the same bytes, under the same names and dtypes, in the same shapes."""
    weights = checkpoint.read(put(tmp_path / "theirs", fixture.tensors))
    checkpoint.write(tmp_path / "ours.safetensors", weights, layout=fixture.layout)
    assert taken_apart(tmp_path / "ours.safetensors") == dict(fixture.tensors)


def test_the_first_bytes():
    """The fixture itself: low nibble first, sign on top."""
    first = [0, 0, 0.5, 0.5, 1, 1, 1.5, 1.5, 2, 2, 3, 3, 4, 4, 6, 6]
    assert nibbles(FP4, (2, 64))[0, :16].tolist() == first
    assert nibbles(FP4, (2, 64))[1, :4].tolist() == [0.5, 1, -6, -0.0]


def test_a_model_of_two_layouts(tmp_path: Path):
    """DeepSeek-V4: experts in FP4, the rest in float8 blocks, norms as they are, in one folder."""
    trunk, experts = FIXTURES[3], FIXTURES[4]
    norm = {"layers.0.attn_norm.weight": tensor("BF16", (2,), [0x80, 0x3F, 0x00, 0xC0])}
    config = {"quantization_config": dict(experts.said), "expert_dtype": "fp4"}
    weights = checkpoint.read(put(tmp_path, {**trunk.tensors, **experts.tensors, **norm}, config))
    assert weights.quantized == {each.weight: each.layout for each in (trunk, experts)}
    for each in (trunk, experts):
        found = values_of(tmp_path, each.weight)
        np.testing.assert_array_equal(found, each.values)
    assert np.asarray(weights["layers.0.attn_norm.weight"], np.float32).tolist() == [1, -2]


def test_quark_leaves_float8(tmp_path: Path):
    """Layers that it excludes stay float8 in blocks, whose scales it calls weight_scale."""
    v3, packed = FIXTURES[0], FIXTURES[7]
    codes, scales = v3.tensors.values()
    tensors = {"a.weight": codes, "a.weight_scale": scales, **packed.tensors}
    weights = checkpoint.read(put(tmp_path, tensors, {"quantization_config": QUARK}))
    assert weights.quantized == {"a.weight": "quark-float8", packed.weight: packed.layout}
    found = values_of(tmp_path, "a.weight")
    np.testing.assert_array_equal(found, v3.values)
