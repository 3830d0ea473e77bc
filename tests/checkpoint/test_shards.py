"""Several files with an index: whole or not there, and little memory."""

import json
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from mx_jax import checkpoint
from mx_jax.formats import MXFP4
from tests.checkpoint.stored import draw

LAYOUT = "mxfp4-pack-quantized"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def weights(rng: np.random.Generator) -> dict[str, Any]:
    """Four weights of 8 * 32 + 8 * 2 bytes, and a small one."""
    mx = {f"{i}.weight": draw(MXFP4, (8, 64), rng) for i in range(4)}
    return mx | {"norm": jnp.arange(3.0)}


def codes(weights: Mapping[str, Any], name: str) -> np.ndarray:
    return np.asarray(weights[name].codes)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("layout", [LAYOUT, "torchao"])
def test_there_and_back(layout: str, weights: dict[str, Any], tmp_path: Path):
    checkpoint.write(tmp_path, weights, layout=layout, max_shard_size=600)
    assert names(tmp_path) == [*(f"model-0000{i}-of-00002.safetensors" for i in (1, 2)), INDEX]
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == 4 * 272 + 12
    back = checkpoint.read(tmp_path)
    assert set(back) == set(weights)
    for name in back.quantized:
        np.testing.assert_array_equal(codes(back, name), codes(weights, name))
    # A tensor that is larger than a file has one of its own.
    checkpoint.write(tmp_path / "b", weights, layout=layout, max_shard_size=1)
    assert len(names(tmp_path / "b")) == 10 if layout == LAYOUT else 9
    checkpoint.write(tmp_path / "c", {}, layout=layout, max_shard_size=1)
    assert len(checkpoint.read(tmp_path / "c")) == 0


class Failing(Mapping[str, Any]):
    """Weights that are fetched to be described, and then fail at one."""

    def __init__(self, weights: Mapping[str, Any], fails: str | None):
        self.weights, self.fails, self.fetched = weights, fails, list[str]()
        self.made: list[weakref.ref[Any]] = []

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)

    def __getitem__(self, name: str) -> Any:
        if name == self.fails and name in self.fetched:
            raise OSError("disk full")
        self.fetched.append(name)
        # The one before may still be at hand, those before it not.
        assert sum(made() is not None for made in self.made) <= 1
        copy = jax.tree.map(lambda part: part, self.weights[name])
        self.made.append(weakref.ref(copy))
        return copy


def test_stopped_and_written_again(weights: dict[str, Any], tmp_path: Path):
    """A folder without an index is not read."""
    with pytest.raises(OSError, match="disk full"):
        checkpoint.write(tmp_path, Failing(weights, "2.weight"), layout=LAYOUT, max_shard_size=300)
    assert names(tmp_path) == [f"model-0000{i}-of-00004.safetensors" for i in (1, 2)]
    with pytest.raises(ValueError, match="2 of 4 files are there and no model"):
        checkpoint.read(tmp_path)
    checkpoint.write(tmp_path, weights, layout=LAYOUT, max_shard_size=300)
    result = checkpoint.read(tmp_path, layout=LAYOUT)
    for name in result.quantized:
        np.testing.assert_array_equal(codes(result, name), codes(weights, name))


OLD, NEW = ({"a": np.full(4, i), "b": np.full(4, i), "c": np.full(4, i)} for i in (1.0, 2.0))


def test_a_name_in_two_files_and_files_that_the_index_lost(tmp_path: Path):
    """Which of the two is meant nobody knows; neither did a file go without a trace."""
    for file in ("x", "y"):
        np.save(tmp_path / file, 1)  # what is no tensor is passed over
        safetensors.numpy.save_file({"a": OLD["a"]}, tmp_path / f"{file}.safetensors")
    with pytest.raises(ValueError, match=r"a is in two files, x.safetensors and y.safetensors"):
        checkpoint.read(tmp_path)
    folder = tmp_path / "m"
    checkpoint.save(folder, OLD, max_shard_size=16)
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"]["b"]
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"2 of 3 files are named by model\.safetensors\."):
        checkpoint.load(folder)


def test_what_is_not_written(weights: dict[str, Any], tmp_path: Path):
    doubled = weights | {"0.weight_packed": jnp.ones(3)}

    def refused(source: dict[str, Any], complaint: str, **changed: Any) -> None:
        with pytest.raises(ValueError, match=complaint):
            checkpoint.write(tmp_path / "a", source, layout=LAYOUT, **changed)

    for size in (0, float("nan"), "5GB"):
        refused(weights, f"max_shard_size={size!r} must be positive", max_shard_size=size)
    refused(doubled, "two tensors would be named '0.weight_packed'")
    assert not names(tmp_path)


def test_one_weight_in_memory(weights: dict[str, Any], tmp_path: Path):
    """Each is fetched to be described and to be written, its tensors together."""
    del weights["norm"]  # arrays are not copied
    counted = Failing(weights, None)
    checkpoint.write(tmp_path / "a", counted, layout=LAYOUT)
    assert counted.fetched == [*weights, *weights]


def test_trees(weights: dict[str, Any], tmp_path: Path):
    """Each describes its own tensors, codes and scales in one file; together they are the tree."""
    tree = {"layers": {i: {"kernel": weights[f"{i}.weight"]} for i in range(4)}}
    tree |= {"norm": weights["norm"]}
    # A weight is 256 bytes of codes and 16 of scales, which would not fit beside the next one's.
    checkpoint.save(tmp_path, tree, max_shard_size=540)
    assert names(tmp_path) == [*(f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)), INDEX]
    alone = checkpoint.load(tmp_path / "model-00002-of-00004.safetensors")
    assert [*alone["layers"]] == [1] and "norm" not in alone
    back = checkpoint.load(tmp_path)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), back, tree))
    result = checkpoint.read(tmp_path)
    assert result.metadata["paths"]["layers/2/kernel"] == ("layers", 2, "kernel")
    assert {*result.quantized.values()} == {"mx_jax"} and len(result) == 5
    # A file of somebody else's among them is not passed over.
    weight = {"a": jnp.ones(2)}
    checkpoint.write(tmp_path / names(tmp_path)[0], weight, layout=LAYOUT)
    (tmp_path / INDEX).unlink()
    with pytest.raises(
        ValueError, match=r"model-00001-of-00004\.safetensors is a safetensors file"
    ):
        checkpoint.read(tmp_path)
