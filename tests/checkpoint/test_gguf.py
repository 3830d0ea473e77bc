"""GGUF files: what is in them to the bit, and files that lie."""

import importlib.util
import struct
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from mx_jax import checkpoint
from mx_jax.checkpoint.gguf import GGUF_TYPES
from mx_jax.formats import MXFP4, NVFP4
from tests.checkpoint.gguf_bytes import (
    ARRAY,
    BOOL,
    F32,
    I32,
    STRING,
    U8,
    U32,
    Tensor,
    array,
    gguf,
    text,
)
from tests.checkpoint.stored import values

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
VALUES = np.concatenate([E2M1, -E2M1])


def read(tmp_path: Path, content: bytes) -> checkpoint.Weights:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    return checkpoint.read(path)


def test_metadata(tmp_path: Path):
    pairs = {
        "general.architecture": (STRING, text("llama")),
        "count": (U32, struct.pack("<I", 7)),
        "base": (F32, struct.pack("<f", 0.5)),
        "on": (BOOL, b"\x02"),
        "tokens": array(STRING, [text("a"), text("é"), text(b"\xff")]),
        "types": array(I32, [struct.pack("<i", value) for value in (1, -2)]),
        "flags": array(BOOL, [b"\x01", b"\x00"]),
    }
    result = dict(read(tmp_path, gguf({}, pairs)).metadata)
    types, flags = result.pop("types"), result.pop("flags")
    assert result.pop("tokens") == ("a", "é", "\\xff")
    assert result == {"general.architecture": "llama", "count": 7, "base": 0.5, "on": True}
    assert types.dtype == np.int32 and types.tolist() == [1, -2]
    assert flags.dtype == np.bool_ and flags.tolist() == [True, False]


def nvfp4_blocks() -> bytes:
    """One row of 64: four scales, then for each of them 16 nibbles, low ones first."""
    scales = np.array([1, 2, 0.5, 448], ml_dtypes.float8_e4m3fn).tobytes()
    return scales + bytes(low | (low + 8) << 4 for low in range(8)) * 4


@pytest.mark.parametrize("name", [None, "up.scale", "up.weight.scale"])
def test_nvfp4(name: str | None, tmp_path: Path):
    beside = {} if name is None else {name: Tensor(0, (1,), struct.pack("<f", 0.25))}
    tensors = {"up.weight": Tensor(40, (64, 1), nvfp4_blocks()), **beside}
    tensors["up.input_scale"] = Tensor(0, (1,), struct.pack("<f", 3))
    weights = read(tmp_path, gguf(tensors))
    assert list(weights) == ["up.weight", "up.input_scale"]
    x: Any = weights["up.weight"]
    assert x.format == NVFP4
    factor = 1 if name is None else 0.25
    assert weights.stored["up.weight"].nbytes == 36 + 4 * len(beside)
    assert x.tensor_scale.tolist() == [[factor]]
    expected = np.outer([1, 2, 0.5, 448], VALUES).reshape(1, 64) * factor
    np.testing.assert_array_equal(values(x), expected)


def test_nvfp4_of_experts(tmp_path: Path):
    """One tensor scale an expert."""
    scales = Tensor(0, (2,), struct.pack("<2f", 0.25, 0.5))
    tensors = {"up.weight": Tensor(40, (64, 1, 2), nvfp4_blocks() * 2), "up.scale": scales}
    first, second = values(read(tmp_path, gguf(tensors))["up.weight"])
    np.testing.assert_array_equal(second, 2 * first)
    np.testing.assert_array_equal(first[0, :16], 0.25 * VALUES)


def test_a_folder(tmp_path: Path):
    content = gguf({"x": Tensor(24, (3,), b"\x01\x02\xff")})
    assert np.asarray(read(tmp_path, content)["x"]).tolist() == [1, 2, -1]
    assert list(checkpoint.read(tmp_path)) == ["x"]
    with pytest.raises(ValueError, match="GGUF says what it is; leave out layout='gpt-oss'"):
        checkpoint.read(tmp_path, layout="gpt-oss")
    (tmp_path / "elsewhere").write_bytes(content)
    assert list(checkpoint.read(tmp_path / "elsewhere")) == ["x"]
    # The only one there is meant, unless safetensors files are the model.
    safetensors.numpy.save_file({"other": np.ones(2)}, tmp_path / "model.safetensors")
    assert list(checkpoint.read(tmp_path)) == ["other"]


ONE = Tensor(0, (8,), bytes(32))
KEY = "general.alignment"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"GGML" + bytes(60), "is no GGUF file: it does not begin with GGUF"),
        (gguf({}, version=1), r"has version=1, this mx_jax reads \(2, 3\)"),
        (gguf({}, version=3 << 24), "version=50331648.*little-endian"),
        (gguf({"x": ONE})[:-1], r"x of shape=\(8,\) in F32 would end at byte 96, .* has 95"),
        (gguf({"x": ONE})[:40], "the shape of x .* would take 8 bytes, and the file has 3"),
        (gguf({}, count=2**60), "number of axes of .* would take 4 bytes, and the file has 0 more"),
        (gguf({}, count_pairs=2**60), "the type of '' .* would take 4 bytes, and the file has 0"),
        (gguf({"x": Tensor(0, (2**63, 2**63), b"")}), r"x of shape=\(9223372036854775808, 92"),
        (gguf({"x": Tensor(0, (0, 2**60))}), r"x has shape=\(1152921504606846976, 0\)"),
        (gguf({"x": Tensor(39, (33,), bytes(34))}), r"x has shape=\(33,\), and MXFP4 needs rows"),
        (gguf({"x": Tensor(0, (1,) * 9, bytes(34))}), "x has 9 axes, GGUF has up to 4"),
        (gguf({"x": Tensor(9, (32,), bytes(40))}), r"x has type=9 \(Q8_1\).*it reads F32, "),
        (gguf({"x": Tensor(99, (256,), bytes(144))}), r"x has type=99 \(unknown\)"),
        (gguf({"x": Tensor(0, (4,), bytes(32), offset=8)}), "x lies at offset=8, no multiple"),
        (gguf({"x": Tensor(0, (8,), bytes(32), offset=2**63)}), "would end at byte 92233720"),
        (gguf({"x": ONE, "y": Tensor(0, (8,), bytes(32), offset=0)}), "x and y overlap at byte"),
        (gguf({"x": ONE, "y": ONE}).replace(b"y", b"x"), "x is there twice"),
        (
            gguf({}, {"a": (U8, b"\x01"), "b": (U8, b"\x01")}).replace(b"b", b"a"),
            "the key 'a' is there twice",
        ),
        (gguf({"x": ONE}).replace(b"x", b"\xff"), "name of tensor 0 of 1 is no UTF-8"),
        (gguf({}, {"a": (13, b"")}), "value of 'a' has type=13, which GGUF does not have"),
        (gguf({}, {"a": (STRING, struct.pack("<Q", 2**60))}), "the value of 'a'.*would take 11529"),
        (
            gguf({}, {"a": array(ARRAY, [struct.pack("<IQ", U8, 0)])}),
            "the value of 'a' is an array of type=9, which is not read",
        ),
        (gguf({}, {"a": (ARRAY, struct.pack("<IQ", STRING, 2**60))}), "length of the value of 'a'"),
        (gguf({}, {KEY: (U32, struct.pack("<I", 48))}), "must be a power of two, got 48"),
        (gguf({}, {KEY: (U32, bytes(4))}), "must be a power of two, got 0"),
        (gguf({}, {KEY: (STRING, text("32"))}), "must be a power of two, got '32'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_files_that_lie(content: bytes, complaint: str, tmp_path: Path):
    with pytest.raises(ValueError, match=f"(?s)checkpoint: .*model.gguf.*{complaint}"):
        read(tmp_path, content)


@pytest.mark.parametrize("alignment", [1, 8, 64, 256])
def test_another_alignment(alignment: int, tmp_path: Path):
    """Where the first tensor begins, and each after it."""
    pairs = {KEY: (U32, struct.pack("<I", alignment))}
    tensors = {
        name: Tensor(0, (1,), struct.pack("<f", i + 1), offset=i * max(alignment, 4))
        for i, name in enumerate("xyz")
    }
    result = read(tmp_path, gguf(tensors, pairs, alignment=alignment))
    assert [np.asarray(result[name]).tolist() for name in "xyz"] == [[1.0], [2.0], [3.0]]


@pytest.mark.parametrize(
    ("tensors", "complaint"),
    [
        ({"x": Tensor(39, (32,), b"\xff" + bytes(16))}, "x: 1 of 1 scales are NaN"),
        ({"x": Tensor(40, (64,), b"\x01\x7f\x80\x7e" + bytes(32))}, "x: 2 of 4 scales are NaN"),
        (
            {"x": Tensor(40, (64,), bytes(36)), "x.scale": Tensor(0, (1,), struct.pack("<f", 9))},
            "x: GGUF stores what a tensor is multiplied by, and 9.0 makes .* the other way around",
        ),
        (
            {"x": Tensor(40, (64,), bytes(36)), "x.scale": Tensor(0, (2,), bytes(8))},
            r"x: the tensor scale must be one positive number, got \[0. 0.\]",
        ),
        (
            {"x": Tensor(40, (64,), bytes(36)), "x.scale": Tensor(8, (32,), bytes(34))},
            "x: its tensor scale x.scale must be plain numbers, got Q8_0",
        ),
        ({"x": Tensor(27, (1,), struct.pack("<q", 2**40))}, "x: has int64 values from 109951162"),
    ],
)
def test_what_would_ruin_a_model(tensors: dict[str, Tensor], complaint: str, tmp_path: Path):
    with pytest.raises(ValueError, match=f"checkpoint.read: .*model.gguf: {complaint}"):
        dict(read(tmp_path, gguf(tensors)))


# Types that llama.cpp's package has values of, and those that it makes as well.
LEFT = {number: row for number, row in GGUF_TYPES.items() if row.decode is None}
MADE = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4")


def test_sizes_are_those_of_the_package_gguf():
    sizes = pytest.importorskip("gguf").GGML_QUANT_SIZES
    result = {number: (row.block, row.nbytes) for number, row in GGUF_TYPES.items()}
    assert result == {int(kind): size for kind, size in sizes.items() if int(kind) in result}
    assert not {"Q4_K", "Q6_K", "IQ4_XS", "TQ2_0"} - {row.name for row in LEFT.values()}


@pytest.mark.parametrize("number", LEFT, ids=lambda number: LEFT[number].name)
def test_types_left_to_the_package(number: int, tmp_path: Path, rng: np.random.Generator):
    """Any bytes of the right number are values, those of the package; several rows and experts."""
    quants = pytest.importorskip("gguf.quants")
    row = LEFT[number]
    stored = rng.integers(0, 256, (2, 20, 3 * row.nbytes)).astype(np.uint8)
    weights = read(tmp_path, gguf({"x": Tensor(number, (3 * row.block, 20, 2), stored.tobytes())}))
    with np.errstate(all="ignore"):
        expected = quants.dequantize(stored, quants.GGMLQuantizationType(number))
    np.testing.assert_array_equal(np.asarray(weights["x"]), expected, strict=True)
    one = weights.stored["x"]
    assert one.layout == f"gguf-{row.name.lower()}" and one.dequantized
    assert one.shape == (2, 20, 3 * row.block) and one.nbytes == stored.nbytes


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Refused before anything is read, with what to install."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    complaint = r"model.gguf: x has type=Q6_K, one of 1 tensors .*pip install 'mx_jax\[gguf\]'"
    with pytest.raises(ValueError, match=complaint):
        read(tmp_path, gguf({"x": Tensor(14, (256,), bytes(210))}))


def test_against_the_package_gguf(tmp_path: Path, rng: np.random.Generator):
    """What it writes is read as it reads it."""
    peer = pytest.importorskip("gguf")
    quants = pytest.importorskip("gguf.quants")
    path, written = tmp_path / "model.gguf", {}
    writer = peer.GGUFWriter(path, "llama")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b c", "ü"])
    writer.add_array("numbers", [1, 2, 3])
    writer.add_rope_freq_base(1e5)
    for kind in (*MADE, "NVFP4"):
        type = peer.GGMLQuantizationType[kind]
        if kind == "NVFP4":  # random bytes under sane scales
            stored = rng.integers(0, 256, (6, 4, 36)).astype(np.uint8)
            stored[..., :4] %= 0x7F
            stored = stored.reshape(6, -1)
        else:
            stored = quants.quantize(rng.standard_normal((6, 256)).astype(np.float32), type)
        writer.add_tensor(kind, stored, raw_dtype=type)
        written[kind] = quants.dequantize(stored.view(np.uint8), type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    weights = checkpoint.read(path)
    assert list(weights) == [*MADE, "NVFP4"]
    mxfp4: Any = weights["MXFP4"]
    assert (mxfp4.format, mxfp4.blocks, mxfp4.dtype) == (MXFP4, ((-1, 32),), jnp.float32)
    stored = weights.stored["MXFP4"]
    assert (stored.shape, stored.nbytes, stored.layout) == ((6, 256), 6 * 8 * 17, "gguf-mxfp4")
    assert not stored.dequantized and weights.stored["Q8_0"].dequantized
    assert "1 gguf-mxfp4; 1 gguf-nvfp4; 1 gguf-q4_0, read as float32; 1 gguf-q4_1, read as" in repr(
        weights
    )
    for kind, expected in written.items():
        result: Any = weights[kind]
        result = result.dequantize() if kind in ("MXFP4", "NVFP4") else result
        np.testing.assert_array_equal(np.asarray(result, np.float32), expected, strict=True)
    theirs = {key: field.contents() for key, field in peer.GGUFReader(path).fields.items()}
    for key, value in weights.metadata.items():
        assert (value if isinstance(value, str) else np.asarray(value).tolist()) == theirs[key]
