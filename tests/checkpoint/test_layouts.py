"""Checkpoints of others: what is read, what is written, and what would ruin a model unseen."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax import checkpoint
from mx_jax.checkpoint.layouts import LAYOUTS, Layout
from tests.checkpoint.stored import assert_same, draw, put


@pytest.mark.parametrize("rows", [130, 0])
@pytest.mark.parametrize("row", LAYOUTS, ids=lambda row: row.name)
def test_there_and_back(row: Layout, rows: int, tmp_path: Path, rng: np.random.Generator):
    """Written and read by itself: the file alone says what it is."""
    x = draw(row.format, (2, rows, 64) if row.split else (rows, 192), rng)
    path = tmp_path / "model.safetensors"
    weights = {f"layer.up{row.weight}": x, "layer.norm": jnp.ones(3)}
    checkpoint.write(path, weights, layout=row.name)
    back = checkpoint.read(path)
    assert list(back.quantized.values()) == [row.name]
    assert list(back) == list(weights) and len(back) == 2
    assert_same(back[f"layer.up{row.weight}"], x)
    np.testing.assert_array_equal(np.asarray(back["layer.norm"]), np.ones(3))
    assert row.name in repr(back)
    assert_same(checkpoint.read(path, layout=row.name)[f"layer.up{row.weight}"], x)


def test_a_folder(tmp_path: Path, rng: np.random.Generator):
    """Several files with an index; config.json says the layout and the dtype."""
    x = draw(mx_jax.formats.MXFP4, (8, 64), rng)
    checkpoint.write(tmp_path / "1.safetensors", {"a.weight": x}, layout="mxfp4-pack-quantized")
    put(tmp_path / "2.safetensors", {"b": np.ones(2)})
    names = {"a.weight_packed": "1", "a.weight_scale": "1", "b": "2"}
    index = {"weight_map": {name: f"{file}.safetensors" for name, file in names.items()}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    stated = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
    config = {"torch_dtype": "float32", "quantization_config": stated}
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights: Any = checkpoint.read(tmp_path)
    assert weights["a.weight"].dtype == jnp.float32 and list(weights) == ["a.weight", "b"]
    np.testing.assert_array_equal(weights["a.weight"].codes, x.codes)
    with pytest.raises(KeyError, match="weight_packed"):
        weights["a.weight_packed"]

    # A layout that the configuration names is the only one that is looked for.
    stated["format"] = "nvfp4-pack-quantized"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ValueError, match=r"no weight of the layouts nvfp4-pack-quantized: a\.weight"
    ):
        checkpoint.read(tmp_path)
    assert "a.weight" in checkpoint.read(tmp_path, layout="mxfp4-pack-quantized")

    for change, complaint in (
        ({"b": "../b.safetensors"}, r"names '\.\./b\.safetensors', which is no file of this"),
        ({"b": 3}, "names 3, which is no file"),
        ({"b": "1.safetensors"}, r"says that b is in 1\.safetensors, which has no such"),
    ):
        changed = {"weight_map": index["weight_map"] | change}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=complaint):
            checkpoint.read(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="is no JSON"):
        checkpoint.read(tmp_path)


def test_what_is_not_written(tmp_path: Path, rng: np.random.Generator):
    path, x = tmp_path / "a.safetensors", draw(mx_jax.formats.MXFP4, (8, 64), rng)
    columns, odd = (
        draw(mx_jax.formats.MXFP4, (64, 8), rng, axis=-2),
        draw(mx_jax.formats.MXFP4, (8, 33), rng),
    )
    for weights, layout, complaint in (
        ({"a.weight": x}, "nvfp4-pack-quantized", r"holds nvfp4 with blocks=.*got a\.weight: "),
        ({"a.weight": columns}, "mxfp4-pack-quantized", r"blocks=\(\(-2, 32\),\); quantize it so"),
        ({"a.kernel": x}, "mxfp4-pack-quantized", r"names that end in '\.weight'"),
        ({"a.weight": odd}, "mxfp4-pack-quantized", "rows of whole bytes"),
        ({"a": odd}, "gpt-oss", "rows of whole blocks"),
        ({"a.weight": x}, "gptq", "unknown layout='gptq'; known: gpt-oss, "),
    ):
        with pytest.raises(ValueError, match=complaint):
            checkpoint.write(path, weights, layout=layout)
    assert not path.exists()


def test_nothing_there(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="no safetensors file in this folder"):
        checkpoint.read(tmp_path)
    with pytest.raises(FileNotFoundError, match="no file at"):
        checkpoint.read(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    ("format", "layout"),
    [
        ("mxfp4", "mxfp4-pack-quantized"),
        ("mxfp4", "gpt-oss"),
        ("mxfp8", "torchao"),
        ("nvfp4", "nvfp4-pack-quantized"),
    ],
)
def test_blocks_that_are_no_number_are_not_written(format: str, layout: str, tmp_path: Path):
    """Our own reader, and those of others, would call the file damaged."""
    w = np.ones((64, 128), np.float32)
    w[3, 5] = np.nan
    path = tmp_path / "model.safetensors"
    weights = {"up.weight": mx_jax.quantize(w, format, axis=1)}
    with pytest.raises(ValueError, match=r"up.weight has 1 of \d+ blocks whose scales are NaN"):
        checkpoint.write(path, weights, layout=layout)
    assert not path.exists()


@pytest.mark.parametrize("layout", ["nvfp4-pack-quantized", "modelopt-nvfp4", "torchao"])
def test_tensor_scales_that_readers_take_for_the_inverse_are_not_written(
    layout: str, tmp_path: Path
):
    path, w = tmp_path / "model.safetensors", np.full((8, 64), 2688, np.float32)
    checkpoint.write(path, {"up.weight": mx_jax.quantize(w, "nvfp4")}, layout=layout)
    result: Any = checkpoint.read(path)["up.weight"]
    assert (result.dequantize() == w).all()
    with pytest.raises(
        ValueError, match=r"up.weight has tensor_scale=1.25, for values beyond 2688"
    ):
        checkpoint.write(path, {"up.weight": mx_jax.quantize(1.25 * w, "nvfp4")}, layout=layout)


@pytest.mark.parametrize("amax", [7e-36, 1e-37, 1e-38])
def test_a_tensor_scale_without_a_reciprocal_is_not_written(amax: float, tmp_path: Path):
    """Where the factor is what is stored it stays."""
    path, weights = tmp_path / "model.safetensors", np.full((8, 64), amax, np.float32)
    tiny = {"up.weight": mx_jax.quantize(weights, "nvfp4")}
    with pytest.raises(ValueError, match=r"up.weight has tensor_scale=.*, whose reciprocal, "):
        checkpoint.write(path, tiny, layout="nvfp4-pack-quantized")
    assert not path.exists()
    checkpoint.write(path, tiny, layout="modelopt-nvfp4")
    result: Any = checkpoint.read(path)["up.weight"]
    np.testing.assert_array_equal(result.tensor_scale, tiny["up.weight"].tensor_scale)


@pytest.mark.parametrize(
    ("names", "method"),
    [
        ({"up.qweight": np.int32, "up.qzeros": np.int32, "up.scales": np.float16}, "GPTQ or AWQ"),
        ({"up.weight": np.uint8, "up.weight.absmax": np.uint8}, "bitsandbytes"),
        ({"up.weight": np.int8, "up.SCB": np.float32}, "bitsandbytes"),
    ],
)
def test_methods_that_are_not_read(names: dict[str, Any], method: str, tmp_path: Path):
    """Known by their names in a bare file."""
    path = put(tmp_path / "a.safetensors", {n: np.ones((4, 4), d) for n, d in names.items()})
    with pytest.raises(ValueError, match=f"belong to weights that {method} quantized"):
        checkpoint.read(path)
