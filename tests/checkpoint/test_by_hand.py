"""Files of others by hand, from what is published of them: values worked out from the bits.

How each lies was read in the code of those who write and read it: transformers' fine-grained fp8
(DeepSeek, packed FP4 in I8), ModelOpt's MXFP4QTensor and NVFP4QTensor, Quark's Pack_fp4.
"""

import dataclasses
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mx_jax import checkpoint
from mx_jax.commands import main
from tests.checkpoint.stored import values

# What lies in a file: the format's name of a dtype, the shape, the bytes.
Tensor = tuple[str, tuple[int, ...], bytes]


def tensor(dtype: str, shape: tuple[int, ...], stored: Any) -> Tensor:
    """One whose bytes are given as they are, or as numbers of bytes."""
    return dtype, shape, bytes(stored)


def floats(shape: tuple[int, ...], values: list[float]) -> Tensor:
    """float32, little-endian."""
    return "F32", shape, struct.pack(f"<{len(values)}f", *values)


def put(folder: Path, tensors: Mapping[str, Tensor], config: Any = None) -> Path:
    """A folder of a model: one file, and config.json if it says anything."""
    header, data = {}, b""
    for name, (dtype, shape, stored) in tensors.items():
        ends = [len(data), len(data) + len(stored)]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": ends}
        data += stored
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def tensors_of(file: Path) -> dict[str, Tensor]:
    """The tensors of a file."""
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    header.pop("__metadata__", None)
    return {
        name: (said["dtype"], tuple(said["shape"]), data[slice(*said["data_offsets"])])
        for name, said in header.items()
    }


# E2M1 by its four bits: sign, two of the exponent, one of the mantissa.
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def nibbles(stored: bytes, shape: tuple[int, ...]) -> np.ndarray:
    """Values of FP4 codes, the even one of two in the low half of its byte."""
    halves = [E2M1[half] for byte in stored for half in (byte & 15, byte >> 4)]
    return np.array(halves, np.float32).reshape(shape)


# Some codes of E4M3, 2^(e - 7) (1 + m / 8), subnormals m 2^-9: bits and value.
E4M3 = {0x00: 0.0, 0x01: 2.0**-9, 0x07: 7 * 2.0**-9, 0x08: 2.0**-6, 0x30: 0.5, 0x38: 1.0}
E4M3 |= {0x39: 1.125, 0x3C: 1.5, 0x40: 2.0, 0x7E: 448.0, 0xB8: -1.0, 0xC4: -3.0, 0xFE: -448.0}


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


def blocks(size: int, scales: list[float]) -> np.ndarray:
    """Values of `FP4`, one number a block."""
    spread = np.array(scales, np.float32).reshape(2, -1).repeat(size, 1)
    return nibbles(FP4, (2, 64)) * spread


def e8m0(*exponents: int, dtype: str = "F8_E8M0") -> Tensor:
    """Two by two scales."""
    return tensor(dtype, (2, 2), exponents)


def deepseek(layout: str, name: str, scales: str, stored: Tensor) -> Fixture:
    """Codes under two by two scales, float32 or 2^(byte - 127), each of a tile."""
    said = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    codes = tensor("F8_E4M3", (ROWS, COLUMNS), CODES.tobytes())
    result = {f"{name}.weight": codes, f"{name}.{scales}": stored}
    factors = [2.0 ** (byte - 127) for byte in stored[2]]
    if stored[0] == "F32":
        factors = struct.unpack("<4f", stored[2])
    spread = np.array(factors, np.float32).reshape(2, 2).repeat(128, 0).repeat(128, 1)
    return Fixture(layout, f"{name}.weight", result, said, VALUES * spread[:ROWS, :COLUMNS])


def fp4(
    layout: str,
    name: str,
    scales: Mapping[str, Tensor],
    said: Mapping[str, Any],
    values: np.ndarray,
    dtype: str = "U8",
) -> Fixture:
    result = {f"{name}.weight": tensor(dtype, (2, 32), FP4)}
    result |= {f"{name}.{suffix}": stored for suffix, stored in scales.items()}
    return Fixture(layout, f"{name}.weight", result, said, values)


# As `quantization_config` of an export by Quark 0.13 says it.
QUARK = {
    "quant_method": "quark",
    "global_quant_config": {"weight": {"dtype": "fp4", "group_size": 32, "scale_format": "e8m0"}},
    "exclude": ["lm_head"],
}
MODELOPT = {"quant_method": "modelopt", "producer": {"name": "modelopt"}, "ignore": []}
# 2^0, 2^-3, 2^1 and 2^-126, the least that bfloat16 has as a normal number.
E8M0 = e8m0(127, 124, 128, 1, dtype="U8")
OCTAVES = [1, 0.125, 2, 2.0**-126]
# 1, 448, 2^-9, 1.125; 0.5, 0, 2, 1.5
E4M3_SCALES = tensor("F8_E4M3", (2, 4), [0x38, 0x7E, 0x01, 0x39, 0x30, 0x00, 0x40, 0x3C])
QUARTERS = blocks(16, [0.25, 112, 2.0**-11, 0.28125, 0.125, 0, 0.5, 0.375])
PROJECTION, QUERIES = "model.layers.0.mlp.up_proj", "layers.0.attn.wq_a"

FIXTURES = [
    deepseek("deepseek-v3", PROJECTION, "weight_scale_inv", floats((2, 2), [1, 0.3, 1.5, 7e-4])),
    deepseek("deepseek-v3.1", PROJECTION, "weight_scale_inv", e8m0(127, 120, 128, 110)),
    deepseek("deepseek-v4-base", QUERIES, "scale", floats((2, 2), [0.1, 2, 1, 3e-5])),
    deepseek("deepseek-v4", QUERIES, "scale", e8m0(126, 127, 100, 129)),
    fp4(
        "deepseek-v4-experts",
        "layers.0.ffn.experts.7.w2",
        {"scale": e8m0(127, 124, 128, 1)},
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
        {"weight_scale": E4M3_SCALES, "weight_scale_2": floats((), [0.25])},
        MODELOPT | {"quant_algo": "NVFP4"},
        QUARTERS,
    ),
    fp4("modelopt-mxfp4", PROJECTION, {"weight_scale": E8M0}, QUARK, blocks(32, OCTAVES)),
    Fixture(
        "gpt-oss",
        "mlp.experts.down_proj",
        {
            "mlp.experts.down_proj_blocks": tensor("U8", (2, 2, 16), FP4),
            "mlp.experts.down_proj_scales": E8M0,
        },
        {"quant_method": "mxfp4"},
        blocks(32, OCTAVES),
    ),
    Fixture(
        "nvfp4-pack-quantized",
        f"{PROJECTION}.weight",
        {
            f"{PROJECTION}.weight_packed": tensor("U8", (2, 32), FP4),
            f"{PROJECTION}.weight_scale": E4M3_SCALES,
            # What is divided by.
            f"{PROJECTION}.weight_global_scale": floats((1,), [4]),
        },
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
        QUARTERS,
    ),
    Fixture(
        "float-quantized",
        f"{PROJECTION}.weight",
        {
            f"{PROJECTION}.weight": tensor("F8_E4M3", (ROWS, COLUMNS), CODES.tobytes()),
            f"{PROJECTION}.weight_scale": floats((ROWS, 1), [*range(1, ROWS + 1)]),
        },
        {"quant_method": "compressed-tensors", "format": "float-quantized"},
        VALUES * np.arange(1, ROWS + 1, dtype=np.float32)[:, None],
    ),
    fp4("quark-mxfp4", PROJECTION, {"weight_quantizer.scale": E8M0}, QUARK, blocks(32, OCTAVES)),
]
IDS = [f"{each.layout}-{each.said['quant_method']}" for each in FIXTURES]


@pytest.mark.parametrize("fixture", FIXTURES, ids=IDS)
@pytest.mark.parametrize("stated", [True, False], ids=["stated", "bare"])
def test_read(fixture: Fixture, stated: bool, tmp_path: Path):
    """With its config.json, and by names, dtypes and shapes alone."""
    config = {"quantization_config": fixture.said, "torch_dtype": "float32"} if stated else None
    weights = checkpoint.read(put(tmp_path, fixture.tensors, config))
    assert weights.quantized == {fixture.weight: fixture.layout}
    result = values(weights[fixture.weight])
    # Zeros of either sign too.
    np.testing.assert_array_equal(result.view(np.uint32), fixture.values.view(np.uint32))


@pytest.mark.parametrize("fixture", FIXTURES, ids=IDS)
def test_written(fixture: Fixture, tmp_path: Path):
    """The writer makes the same bytes, under the same names and dtypes, in the same shapes."""
    weights = checkpoint.read(put(tmp_path / "theirs", fixture.tensors))
    checkpoint.write(tmp_path / "ours.safetensors", weights, layout=fixture.layout)
    assert tensors_of(tmp_path / "ours.safetensors") == dict(fixture.tensors)


def test_a_model_of_two_layouts(tmp_path: Path):
    """DeepSeek-V4: experts in FP4, the rest in float8 blocks, norms as they are, in one folder."""
    trunk, experts = FIXTURES[3], FIXTURES[4]
    norm = {"layers.0.attn_norm.weight": tensor("BF16", (2,), [0x80, 0x3F, 0x00, 0xC0])}
    config = {"quantization_config": dict(experts.said), "expert_dtype": "fp4"}
    weights = checkpoint.read(put(tmp_path, {**trunk.tensors, **experts.tensors, **norm}, config))
    assert weights.quantized == {each.weight: each.layout for each in (trunk, experts)}
    for each in (trunk, experts):
        np.testing.assert_array_equal(values(weights[each.weight]), each.values)
    assert np.asarray(weights["layers.0.attn_norm.weight"], np.float32).tolist() == [1, -2]


def test_quark_leaves_float8(tmp_path: Path):
    """Layers that it excludes stay float8 in blocks, whose scales it calls weight_scale."""
    v3, packed = FIXTURES[0], FIXTURES[7]
    codes, scales = v3.tensors.values()
    tensors = {"a.weight": codes, "a.weight_scale": scales, **packed.tensors}
    weights = checkpoint.read(put(tmp_path, tensors, {"quantization_config": QUARK}))
    assert weights.quantized == {"a.weight": "quark-float8", packed.weight: packed.layout}
    np.testing.assert_array_equal(values(weights["a.weight"]), v3.values)


# What would ruin a model unseen: an error that says what is wrong ----------------------------

NAN = {
    "F32": struct.pack("<f", float("nan")),
    "U8": b"\xff",
    "F8_E8M0": b"\xff",
    "F8_E4M3": b"\x7f",
}
NEGATIVE = {"F32": struct.pack("<f", -1), "F8_E4M3": b"\xb8"}
everywhere = pytest.mark.parametrize("fixture", FIXTURES, ids=IDS)


def refused(folder: Path, tensors: dict[str, Tensor], fixture: Fixture | None = None) -> str:
    """The error of reading the tensors, which begins with the folder; stated if a fixture is."""
    config = None if fixture is None else {"quantization_config": fixture.said}
    put(folder, tensors, config)
    with pytest.raises(ValueError, match=f"^checkpoint.read: {folder}") as raised:
        dict(checkpoint.read(folder))
    return str(raised.value)


@everywhere
def test_codes_without_their_scales(fixture: Fixture, tmp_path: Path):
    """Where config.json says that weights are quantized; each tensor that is missing is named."""
    (codes, facts), *others = fixture.tensors.items()
    said = refused(tmp_path, {codes: facts}, fixture)
    assert f"{codes} {facts[0]}{list(facts[1])} holds codes that no scales belong to" in said
    assert "needs" in said and "which is not there" in said
    for missing, _ in others if len(others) > 1 else []:
        rest = {name: stored for name, stored in fixture.tensors.items() if name != missing}
        assert f"needs {missing}, which is not there" in refused(tmp_path, rest, fixture)
        assert f"needs {missing}, which" in refused(tmp_path / "bare", rest)


@everywhere
def test_scales_without_codes(fixture: Fixture, tmp_path: Path):
    codes, *scales = fixture.tensors
    if scales[0].endswith(".scale") and fixture.tensors[scales[0]][0] == "F32":
        pytest.skip("norms are called so too")
    rest = {name: fixture.tensors[name] for name in scales}
    for stated in (fixture, None):
        said = refused(tmp_path / ("bare" if stated is None else "stated"), rest, stated)
        assert f"{len(scales)} scales belong to no weight of " in said
        assert ("of any layout that mx_jax reads" in said) == (stated is None)
        assert f"{scales[0]} {rest[scales[0]][0]}" in said
        assert stated is None or f"{fixture.layout} needs {codes}" in said or "deepseek" in said


@everywhere
def test_scales_of_another_shape(fixture: Fixture, tmp_path: Path):
    """Of the other orientation, in tiles of tensor cores, flat as those lie, or of other blocks."""
    _, name, *_ = fixture.tensors
    dtype, shape, stored = fixture.tensors[name]
    transposed = (shape[1], shape[0])
    size = len(stored) // (shape[0] * shape[1])
    cases = [((128, 4), "swizzled for tensor cores"), ((512,), "swizzled for tensor cores")]
    cases += [((shape[0], shape[1] + 1), "of another block size")]
    cases += [(transposed, "they lie the other way around")] * (transposed != shape)
    for number, (other, hint) in enumerate(cases):
        filled = stored[:size] * int(np.prod(other))
        said = refused(tmp_path / f"{number}", fixture.tensors | {name: (dtype, other, filled)})
        assert f"needs scales of shape={shape}, got {name} of shape={other}; " in said
        assert hint in said


@everywhere
def test_scales_that_are_none(fixture: Fixture, tmp_path: Path):
    _, name, *_ = fixture.tensors
    dtype, shape, stored = fixture.tensors[name]
    for number, table in enumerate((NAN, NEGATIVE)):
        if dtype in table:
            first = table[dtype]
            changed = {name: (dtype, shape, first + stored[len(first) :])}
            said = refused(tmp_path / f"{number}", fixture.tensors | changed, fixture)
            count = np.prod(shape)
            assert f"{fixture.weight}: 1 of {count} scales are NaN, infinite or negative" in said


def test_scales_of_another_dtype(tmp_path: Path):
    """Bytes of E4M3 in MXFP4's place; the nearest layout is named with what it would need."""
    (codes, packed), (scales, _) = FIXTURES[5].tensors.items()
    tensors = {codes: packed, scales: tensor("F8_E4M3", (2, 2), [0x38] * 4)}
    said = refused(tmp_path, tensors, FIXTURES[5])
    assert f"modelopt-mxfp4 needs {scales} of dtype U8 or F8_E8M0, got F8_E4M3" in said


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        *(("a.weight", dtype, (2, 64)) for dtype in ("F8_E4M3", "I8", "U8")),
        # Names that only codes have.
        ("a.weight_packed", "U8", (2, 32)),
        ("a_blocks", "U8", (2, 1, 32)),
    ],
)
def test_scales_by_a_name_that_is_not_known(
    name: str, dtype: str, shape: tuple[int, ...], tmp_path: Path
):
    """A bare file of codes, with something called a scale beside what may be a plain weight."""
    tensors = {name: tensor(dtype, shape, (FP4 * 2)[: int(np.prod(shape))])}
    if name == "a.weight":
        tensors["a.scale_weight"] = floats((), [0.5])
    said = refused(tmp_path, tensors)
    assert f"{name} {dtype}{list(shape)} holds codes that no scales belong to" in said
    assert "as plain numbers they would be nonsense" in said


def test_codes_of_too_few_axes(tmp_path: Path):
    """Blocks of no row would be a weight of one axis."""
    tensors = {
        "a_blocks": tensor("U8", (2, 16), FP4[:32]),
        "a_scales": tensor("U8", (2,), [127] * 2),
    }
    assert "gpt-oss needs codes of whole bytes" in refused(tmp_path, tensors)


def test_plain_float8_is_read(tmp_path: Path):
    """A bare file may hold float8 and integers with no scales at all."""
    tensors = {"a.weight": tensor("F8_E4M3", (2, 2), [0x38, 0x40, 0xB8, 0])}
    tensors |= {"b.weight": tensor("I8", (2, 2), [1, 2, 255, 0]), "scale": floats((1,), [3])}
    weights = checkpoint.read(put(tmp_path, tensors))
    assert not weights.quantized
    assert np.asarray(weights["a.weight"], np.float32).tolist() == [[1, 2], [-1, 0]]
    assert np.asarray(weights["b.weight"]).tolist() == [[1, 2], [-1, 0]]


@pytest.mark.parametrize(
    ("index", "value", "complaint"),
    [
        # ModelOpt's multiplies, compressed-tensors' divides: each in the other's place.
        (6, 4.0, "is multiplied by, and 4.0 makes weights of up to 10752: it is the other way"),
        (6, 1e4, "weights of up to 2.688e+07: it is the other way around"),
        (9, 0.125, "is divided by, and 0.125 makes weights of up to 21504: it is the other way"),
        *((index, value, "must be one positive number") for index in (6, 9) for value in (0.0, -1)),
        (6, float("inf"), "must be one positive number"),
    ],
)
def test_a_tensor_scale_that_cannot_be(index: int, value: float, complaint: str, tmp_path: Path):
    fixture = FIXTURES[index]
    name = [*fixture.tensors][2]
    shape = fixture.tensors[name][1]
    said = refused(tmp_path, fixture.tensors | {name: floats(shape, [value])}, fixture)
    assert complaint in said


@pytest.mark.parametrize(("index", "shape"), [(0, (2, 2)), (10, (ROWS,))])
def test_scales_in_bfloat16(index: int, shape: tuple[int, ...], tmp_path: Path):
    """As others write float32's; those of rows leave out their axis of one."""
    fixture, tensors = FIXTURES[index], FIXTURES[index].tensors
    _, name = tensors
    # 1, 2, 0.5 and 0.25: the upper halves of float32.
    count = int(np.prod(shape))
    halves = (struct.pack("<4H", 0x3F80, 0x4000, 0x3F00, 0x3E80) * count)[: 2 * count]
    put(tmp_path, tensors | {name: ("BF16", shape, halves)})
    spread = np.resize(np.array([1, 2, 0.5, 0.25], np.float32), shape).reshape(shape[0], -1)
    if len(shape) == 2:
        spread = spread.repeat(128, 0).repeat(128, 1)
    result = values(checkpoint.read(tmp_path)[fixture.weight])
    np.testing.assert_array_equal(result, VALUES * spread[:ROWS, :COLUMNS])


def test_scales_of_inputs(tmp_path: Path):
    """Those by which programs quantize inputs stay as they are; what has to be applied does not."""
    fixture = FIXTURES[6]
    weights = {"up.input_scale": floats((), [0.5])} | fixture.tensors
    assert float(checkpoint.read(put(tmp_path, weights))["up.input_scale"]) == 0.5
    for names in ("up.pre_quant_scale", "up.forward_hadamard_matrix"):
        said = refused(tmp_path, weights | {names: floats((64,), [1.0] * 64)})
        assert f": 1 tensors such as {names} belong to weights of AWQ, SVDQuant or FP-Qu" in said


def test_one_scale_for_a_tensor(tmp_path: Path):
    """float8 as many programs store it, of rows or blocks here."""
    codes = tensor("F8_E4M3", (ROWS, COLUMNS), CODES.tobytes())
    for number, shape in enumerate([(), (1,)]):
        for name in ("weight_scale", "weight_scale_inv"):
            tensors = {"up.weight": codes, f"up.{name}": floats(shape, [0.5])}
            said = refused(tmp_path / f"{number}", tensors)
            assert "it is one scale for the whole tensor, which mx_jax does not read" in said


# Dtypes of few bits, and others that few programs write ----------------------------------------


def codes_of(bits: int, codes: list[int]) -> bytes:
    """The first in the lowest bits."""
    whole = sum(code << bits * place for place, code in enumerate(codes))
    return whole.to_bytes(bits * len(codes) // 8, "little")


# Some codes of E2M3 and E3M2: 2^(e - bias) (1 + m / 2^bits), subnormals below.
E2M3 = {0x00: 0.0, 0x01: 0.125, 0x08: 1.0, 0x1F: 7.5, 0x29: -1.125, 0x3F: -7.5}
E3M2 = {0x00: 0.0, 0x01: 0.0625, 0x0C: 1.0, 0x1F: 28.0, 0x2D: -1.25, 0x3F: -28.0}


@pytest.mark.parametrize(
    ("dtype", "format", "scale"),
    [
        ("F4", "mxfp4", E8M0[0]),
        ("F4", "mxfp4", "F8_E8M0"),
        ("F6_E2M3", "mxfp6_e2m3", "F8_E8M0"),
        ("F6_E3M2", "mxfp6_e3m2", "F8_E8M0"),
    ],
)
def test_codes_whose_dtype_says_what_they_are(dtype: str, format: str, scale: str, tmp_path: Path):
    """A shape counts elements, which lie side by side in the file's bits."""
    table = {"F4": dict(enumerate(E2M1)), "F6_E2M3": E2M3, "F6_E3M2": E3M2}[dtype]
    bits = int(dtype[1])
    codes = np.resize([*table], (2, 64))
    tensors = {
        "up.weight": tensor(dtype, (2, 64), codes_of(bits, codes.reshape(-1).tolist())),
        "up.weight_scale": tensor(scale, (2, 2), [127, 124, 128, 1]),
        "norm.weight": floats((2,), [1, 2]),
    }
    weights: Any = checkpoint.read(put(tmp_path, tensors))
    assert weights["up.weight"].format.name == format
    spread = np.array(OCTAVES, np.float32).reshape(2, 2).repeat(32, 1)
    expected = np.resize(np.array([*table.values()], np.float32), (2, 64)) * spread
    np.testing.assert_array_equal(values(weights["up.weight"]), expected)
    if dtype != "F4":
        # Read from our hand, and written as it was.
        checkpoint.write(tmp_path / "ours.safetensors", weights, layout=format.replace("_", "-"))
        assert tensors_of(tmp_path / "ours.safetensors") == tensors
    # Without their scales they are what they say.
    alone = {name: stored for name, stored in tensors.items() if "scale" not in name}
    result: Any = checkpoint.read(put(tmp_path / "alone", alone))
    np.testing.assert_array_equal(
        result.stored["up.weight"].look().astype(np.float32), np.resize([*table.values()], (2, 64))
    )


def test_nvfp4_whose_dtype_says_it(tmp_path: Path):
    fixture = FIXTURES[6]
    (codes, (_, _, packed)), *scales = fixture.tensors.items()
    typed = {codes: tensor("F4", (2, 64), packed), **dict(scales)}
    weights = checkpoint.read(put(tmp_path, typed))
    np.testing.assert_array_equal(values(weights[fixture.weight]), fixture.values)
    said = refused(tmp_path / "alone", dict([*typed.items()][:2]))
    assert f"modelopt-nvfp4 needs {scales[1][0]}, which is not there" in said


def test_a_tensor_of_a_rare_dtype_leaves_others_readable(tmp_path: Path):
    """Those that JAX lacks are an error once they are asked for, by name."""
    tensors = {
        "F4": tensor("F4", (4,), [0x21, 0x43]),
        "F6_E2M3": tensor("F6_E2M3", (4,), codes_of(6, [0x08, 0x1F, 0x3F, 0])),
        "F6_E3M2": tensor("F6_E3M2", (4,), codes_of(6, [0x0C, 0x1F, 0x3F, 0])),
        "F8_E4M3FNUZ": tensor("F8_E4M3FNUZ", (2,), [0x40, 0x48]),
        "F8_E5M2FNUZ": tensor("F8_E5M2FNUZ", (2,), [0x40, 0x44]),
        "C64": tensor("C64", (2,), np.array([1 + 2j, 3], np.complex64).tobytes()),
        "up": floats((2,), [1, 2]),
    }
    expected = {
        "F4": [0.5, 1, 1.5, 2],
        "F6_E2M3": [1, 7.5, -7.5, 0],
        "F6_E3M2": [1, 28, -28, 0],
        "F8_E4M3FNUZ": [1, 2],
        "F8_E5M2FNUZ": [1, 2],
        "C64": [1 + 2j, 3],
        "up": [1, 2],
    }
    model, out = put(tmp_path / "model", tensors), tmp_path / "out.safetensors"
    weights = checkpoint.read(model)
    assert [*weights] == [*tensors]
    for name, wanted in expected.items():
        np.testing.assert_array_equal(np.asarray(weights.stored[name].look(), complex), wanted)
        if name.startswith("F6"):
            with pytest.raises(ValueError, match=rf"{name}: has dtype=float6_\w+, which jax does"):
                weights[name]
        else:
            np.testing.assert_array_equal(np.asarray(weights[name], complex), wanted)
    # They go through commands, and back, as they are.
    assert main(["quantize", str(model), str(out), "--format", "mxfp4"]) == 0
    assert tensors_of(out) == tensors
    assert main(["inspect", str(out)]) == 0
    # A scale of no weight, beside floats alone, is a number like others.
    e8m0 = {"e": tensor("F8_E8M0", (2,), [127, 128])} | {"up": tensors["up"]}
    assert np.asarray(checkpoint.read(put(tmp_path / "e", e8m0))["e"], float).tolist() == [1, 2]
    assert "e F8_E8M0[2]" in refused(tmp_path / "f", e8m0 | {"F4": tensors["F4"]})


def test_codes_that_fill_no_bytes(tmp_path: Path):
    odd = {"a": np.ones(3).astype(ml_dtypes.float4_e2m1fn)}
    with pytest.raises(ValueError, match=r"a of dtype=float4_e2m1fn, shape=\(3,\) fills no whole"):
        checkpoint.save(tmp_path / "a.safetensors", odd)
