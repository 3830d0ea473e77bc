"""What would ruin a model unseen, in each layout by hand: an error that says what is wrong."""

import struct
from pathlib import Path

import numpy as np
import pytest

from mx_jax import checkpoint
from tests.checkpoint.bytes_by_hand import Tensor, floats, put, tensor
from tests.checkpoint.test_by_hand import FIXTURES, FP4, IDS, VALUES, Fixture, values_of

pytestmark = pytest.mark.one_python(reason="bytes of files, refused before any array is made")
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
        assert f"needs {missing}, which is not there" in refused(tmp_path, rest)


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
    turned = (shape[1], shape[0])
    size = len(stored) // (shape[0] * shape[1])
    cases = [((128, 4), "swizzled for tensor cores"), ((512,), "swizzled for tensor cores")]
    cases += [((shape[0], shape[1] + 1), "of another block size")]
    cases += [(turned, "they lie the other way around")] * (turned != shape)
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
    assert f"modelopt-mxfp4 needs {scales} of dtype U8, got F8_E4M3" in said


@pytest.mark.parametrize(
    ("name", "dtype"), [("a.weight", "F8_E4M3"), ("a.weight", "I8"), ("a.weight", "U8")]
)
def test_scales_by_a_name_that_is_not_known(name: str, dtype: str, tmp_path: Path):
    """A bare file of codes with something called a scale beside them."""
    tensors = {name: tensor(dtype, (2, 64), FP4 * 2), "a.scale_weight": floats((), [0.5])}
    said = refused(tmp_path, tensors)
    assert f"{name} {dtype}[2, 64] holds codes that no scales belong to" in said
    assert "as plain numbers they would be nonsense" in said


@pytest.mark.parametrize(
    ("suffix", "shape"), [(".weight_packed", (2, 32)), ("_blocks", (2, 1, 32))]
)
def test_names_that_only_codes_have(suffix: str, shape: tuple[int, ...], tmp_path: Path):
    said = refused(tmp_path, {f"a{suffix}": tensor("U8", shape, FP4)})
    assert f"a{suffix} U8{list(shape)} holds codes that no scales belong to" in said


def test_plain_float8_is_read(tmp_path: Path):
    """A bare file may hold float8 and integers with no scales at all."""
    tensors = {"a.weight": tensor("F8_E4M3", (2, 2), [0x38, 0x40, 0xB8, 0])}
    tensors |= {"b.weight": tensor("I8", (2, 2), [1, 2, 255, 0]), "scale": floats((1,), [3])}
    weights = checkpoint.read(put(tmp_path, tensors))
    assert not weights.quantized
    assert np.asarray(weights["a.weight"], np.float32).tolist() == [[1, 2], [-1, 0]]
    assert np.asarray(weights["b.weight"]).tolist() == [[1, 2], [-1, 0]]


@pytest.mark.parametrize("value", [4.0, 1e4, 0.0, -1.0, float("inf")])
def test_a_tensor_scale_that_cannot_be(value: float, tmp_path: Path):
    """ModelOpt's multiplies: a divisor in its place would make weights of thousands."""
    fixture = FIXTURES[6]
    name = [*fixture.tensors][2]
    said = refused(tmp_path, fixture.tensors | {name: floats((), [value])}, fixture)
    inverted = f"weights of up to {value * 2688:g}: it is the other way around"
    assert (inverted if 1 < value < 1e30 else "must be one positive number") in said


def test_float32_scales_in_bfloat16(tmp_path: Path):
    """DeepSeek-V3's layout as others write it."""
    fixture = FIXTURES[0]
    _, name = fixture.tensors
    # 1, 2, 0.5 and 0.25: the upper halves of float32.
    halves = struct.pack("<4H", 0x3F80, 0x4000, 0x3F00, 0x3E80)
    put(tmp_path, fixture.tensors | {name: ("BF16", (2, 2), halves)})
    found = values_of(tmp_path, fixture.weight)
    spread = np.array([[1, 2], [0.5, 0.25]], np.float32).repeat(128, 0).repeat(128, 1)
    np.testing.assert_array_equal(found, VALUES * spread[: len(VALUES), : VALUES.shape[1]])
