"""save and load: what is in the file, what is refused, and files that lie."""

import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import mx_jax
from mx_jax import checkpoint
from mx_jax.checkpoint.weights import on_device
from mx_jax.formats import MXFP4, MXFP6_E3M2, NVFP4
from tests.checkpoint.stored import assert_same, draw

DTYPES = ("float32", "bfloat16", "float16", "int32", "uint8", "bool", "float8_e4m3fn")


@pytest.fixture
def tree(rng: np.random.Generator) -> dict[Any, Any]:
    return {
        "encoder": {
            0: {"kernel": draw(MXFP4, (64, 9), rng, axis=-2), "bias": jnp.arange(9.0)},
            1: {"kernel": draw(NVFP4, (2, 16, 32), rng)},
        },
        "odd/name": {"x": draw(MXFP6_E3M2, (3, 7), rng)},
        **{name: jnp.ones((2, 3), name) for name in DTYPES},
        "empty": np.zeros((0, 4), np.float32),
        "number": np.array(3, np.float32),
    }


def test_there_and_back(tree: dict[Any, Any], tmp_path: Path):
    path = tmp_path / "model.safetensors"
    checkpoint.save(path, tree)
    back = checkpoint.load(path)
    is_leaf = lambda x: isinstance(x, mx_jax.MXArray)  # noqa: E731
    assert jax.tree.structure(back, is_leaf=is_leaf) == jax.tree.structure(tree, is_leaf=is_leaf)
    result, expected = (jax.tree.leaves(t, is_leaf=is_leaf) for t in (back, tree))
    for one, other in zip(result, expected, strict=True):
        if isinstance(other, mx_jax.MXArray):
            assert_same(one, other)
        else:
            assert isinstance(one, jax.Array) and one.dtype == other.dtype
            np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    assert os.listdir(tmp_path) == ["model.safetensors"]


@pytest.mark.parametrize("size", [None, 1, 10**6])
def test_dicts_without_arrays_stay(size: int | None, tmp_path: Path):
    path = tmp_path / ("one.safetensors" if size is None else "several")
    for tree in (
        {"a": {}, "b": {"c": {}, "d": {1: {}}}, "d": {"x": np.ones(3), "y": np.ones(2)}},
        {"a": {"b": {}}},
        {},
    ):
        checkpoint.save(path, tree, max_shard_size=size)
        assert jax.tree.structure(checkpoint.load(path)) == jax.tree.structure(tree)


def test_a_name_like_that_of_a_part(tmp_path: Path, rng: np.random.Generator):
    """Which tensors are an MXArray's its format says; only names that are the same clash."""
    path = tmp_path / "model.safetensors"
    for format, parts in (
        (MXFP4, ("codes", "scales")),
        (NVFP4, ("codes", "scales", "tensor_scale")),
    ):
        x, beside = draw(format, (4, 64), rng), np.ones(3, np.float32)
        for part in parts:
            for tree in ({"x": x, f"x/{part}": beside}, {f"x/{part}": beside, "x": x}):
                with pytest.raises(ValueError, match=f"would be named 'x/{part}'; rename one"):
                    checkpoint.save(path, tree)
        others = {"x/tensor_scale", "x/mx_jax", "codes"} - {f"x/{part}" for part in parts}
        checkpoint.save(path, {"x": x} | dict.fromkeys(others, beside))
        for back in (checkpoint.load(path), dict(checkpoint.read(path))):
            assert back.keys() == {"x", *others}
            assert_same(back["x"], x)
            assert all(back[name].tolist() == [1, 1, 1] for name in others)


@pytest.mark.parametrize(
    ("tree", "error", "complaint"),
    [
        ({"a": [jnp.ones(2)]}, TypeError, "got list at a; of a flax.nnx model save nnx.to_pure"),
        ({"a": {"b": None}}, TypeError, "got NoneType at a/b"),
        ({(1, 2): jnp.ones(2)}, TypeError, r"keys must be str or int, got \(1, 2\) in the top"),
        (jnp.ones(2), TypeError, "got ArrayImpl at the top"),
        ({"k": jax.random.key(0)}, TypeError, "k is a PRNG key; save jax.random.key_data"),
        ({"a/b": jnp.ones(2), "a": {"b": jnp.ones(2)}}, ValueError, "would be named 'a/b'"),
        ({"a": {1: jnp.ones(2), "1": jnp.ones(2)}}, ValueError, "would be named 'a/1'"),
        ({"x": jnp.ones(2, jnp.int4)}, ValueError, "x has dtype=int4, which safetensors cannot"),
    ],
)
def test_refused(tree: Any, error: type[Exception], complaint: str, tmp_path: Path):
    with pytest.raises(error, match=complaint):
        checkpoint.save(tmp_path / "model.safetensors", tree)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_integers_that_do_not_fit(dtype: str, tmp_path: Path):
    """jax would wrap them around; what fits is taken."""
    path = tmp_path / "model.safetensors"
    checkpoint.save(path, {"small": np.array([0, 3], dtype)})
    assert checkpoint.load(path)["small"].tolist() == [0, 3]
    checkpoint.save(path, {"step": {"ids": np.array([3, 1 << 40], dtype)}})
    for read in (checkpoint.load, lambda path: checkpoint.read(path)["step/ids"]):
        with pytest.raises(
            ValueError, match=f"step/ids: has {dtype} values from 3 up to 1099511627776.*enable_x64"
        ):
            read(path)
    with jax.enable_x64(True):
        assert checkpoint.load(path)["step"]["ids"].tolist() == [3, 1 << 40]


def test_files_of_mx_jax_are_read_as_no_other_layout(tmp_path: Path):
    path = tmp_path / "model.safetensors"
    checkpoint.save(path, {"x": jnp.ones(3)})
    assert [*checkpoint.read(path, layout="mx_jax")] == ["x"]
    with pytest.raises(ValueError, match=r"mx_jax wrote it.*leave out layout='zzz'"):
        checkpoint.read(path, layout="zzz")


def test_files_of_others(tmp_path: Path):
    path = tmp_path / "theirs.safetensors"
    safetensors.numpy.save_file({"x": np.ones(3, np.float32)}, path)
    with pytest.raises(ValueError, match="a safetensors file that mx_jax did not write"):
        checkpoint.load(path)
    path.write_bytes(b"PK\x03\x04" * 10)
    with pytest.raises(ValueError, match="is no whole safetensors file"):
        checkpoint.load(path)


def test_tensors_that_the_metadata_does_not_describe(tmp_path: Path):
    path = tmp_path / "model.safetensors"
    checkpoint.save(path, {"n": np.ones(3, np.float32)})
    path.write_bytes(path.read_bytes().replace(rb"[\"n\"]", rb"[\"m\"]"))
    with pytest.raises(ValueError, match="metadata is damaged: they do not describe 'n', which "):
        checkpoint.load(path)


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    path = tmp_path_factory.mktemp("sample") / "model.safetensors"
    rng = np.random.default_rng(0)
    checkpoint.save(path, {"a": {0: draw(NVFP4, (3, 33), rng)}, "b": np.ones((2, 2), np.int16)})
    return path.with_name("mutant.safetensors"), path.read_bytes()


def check_mutant(path: Path, content: bytes) -> bool:
    """Whether a file is read; the only other way out is a ValueError that names it."""
    path.write_bytes(content)
    try:
        tree = checkpoint.load(path)
    except ValueError as error:
        assert str(path) in str(error), error
        return False
    assert isinstance(tree, dict)
    return True


def test_headers_that_lie(sample: tuple[Path, bytes]):
    path, content = sample
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]

    def put(**facts: Any) -> bool:
        text = json.dumps(header | facts).encode()
        return check_mutant(path, len(text).to_bytes(8, "little") + text + data)

    assert put()
    assert not check_mutant(path, content[:-1]) and not check_mutant(path, content + b"\0")
    codes = header["a/0/codes"]
    assert not put(**{"a/0/codes": codes | {"shape": [2**40, 2**40]}})
    assert not put(**{"a/0/codes": codes | {"data_offsets": [0, 2**60]}})
    assert not put(**{"a/0/codes": codes | {"dtype": "I8"}})
    assert not check_mutant(path, (2**63).to_bytes(8, "little") + content[8:])
    for part in ("codes", "scales", "tensor_scale"):
        facts = {f"a/0/{part}": None, "elsewhere": header[f"a/0/{part}"]}
        kept = {name: value for name, value in (header | facts).items() if value}
        text = json.dumps(kept).encode()
        assert not check_mutant(path, len(text).to_bytes(8, "little") + text + data), part
    listed = json.loads(header["__metadata__"]["mx_jax"])
    for change in (
        {"version": 9},
        {"tensors": 3},
        {"tensors": [{"path": []}]},
        {"tensors": [{"path": [["a"]]}]},
        {"tensors": [{"path": ["..", "..", "etc"]}]},
        {"tensors": listed["tensors"] * 2},
        {"tensors": [*listed["tensors"], {"path": ["b", "c"]}]},
        {"tensors": listed["tensors"][:1]},
        {"empty": 3},
        {"empty": [[]]},
        {"empty": [[["a"]]]},
        {"empty": [["a", 0]]},
        {"empty": [["b", "c"]]},
        {"empty": [["c"], ["c"]]},
        {"tensors": []},
    ):
        assert not put(__metadata__={"mx_jax": json.dumps(listed | change)}), change
    for text in ("[" * 50_000, "{", "3"):
        assert not put(__metadata__={"mx_jax": text})


def test_a_file_may_change_afterwards(tmp_path: Path):
    """What was read is a copy: neither the file nor the caller's array is looked at again."""
    path = tmp_path / "a.safetensors"
    safetensors.numpy.save_file({"x": np.arange(64, dtype=np.float32)}, path)
    result = checkpoint.read(path)["x"]
    with path.open("r+b") as file:
        file.seek(-256, 2)
        file.write(bytes(256))
    np.testing.assert_array_equal(result, np.arange(64, dtype=np.float32))
    source = np.ones(64, np.float32)
    held = on_device(source)
    source[:] = 2
    assert bool((held == 1).all())


def test_it_is_copied_once(monkeypatch: pytest.MonkeyPatch):
    """XLA takes the memory over; what is not aligned as its own would be copied again."""
    if jax.default_backend() != "cpu":
        pytest.skip("a device with memory of its own")
    handed: list[np.ndarray] = []
    put = jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda x: handed.append(x) or put(x))
    for _ in range(8):
        result = on_device(np.ones((65, 63), np.float32)[1:])
        assert result.unsafe_buffer_pointer() == handed[-1].ctypes.data
