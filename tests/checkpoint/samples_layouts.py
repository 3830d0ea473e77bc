"""A folder of each layout, with the config.json that names it."""

import dataclasses
import json
import struct
import tempfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from mx_jax import checkpoint
from mx_jax.checkpoint.layout import Layout
from mx_jax.checkpoint.layouts import LAYOUTS
from mx_jax.checkpoint.safetensors_file import Entry
from mx_jax.checkpoint.safetensors_file import write as write_file
from tests.checkpoint.gguf_bytes import Tensor, gguf
from tests.checkpoint.sample import Sample, read_all
from tests.checkpoint.stored import draw


def layout_samples(rng: np.random.Generator) -> list[Sample]:
    """Of each row of `LAYOUTS`, and the newest type of GGUF by itself."""
    made = [_sample(row, rng) for row in LAYOUTS]
    return [*made, Sample("gguf nvfp4", {"model.gguf": _nvfp4()}, read_all)]


def _sample(row: Layout, rng: np.random.Generator) -> Sample:
    shape = (2, 4, 64) if row.split else (4, 64)
    x = draw(row.format, shape, rng)
    if row.format.scale.element:
        # Scales have no sign, and no NaN.
        x = dataclasses.replace(x, scales=x.scales & 0x3F)
    stated: Any = checkpoint.quantization_config({"a" + row.weight: x}, layout=row.name)
    if stated is None and row.configs:
        stated = dict(row.configs[-1])
    config = {"torch_dtype": "float32"} | ({"quantization_config": stated} if stated else {})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        if row.rotation is None:
            weights = {"a" + row.weight: x, "norm": jnp.ones(3)}
            checkpoint.write(path, weights, layout=row.name)
        else:
            entries = {name: Entry.of(x) for name, x in _rotated(row, rng).items()}
            write_file(path, entries, {}, lambda *_: None)
        files = {path.name: path.read_bytes(), "config.json": json.dumps(config).encode()}
    return Sample(f"layout {row.name}", files, read_all)


def _rotated(row: Layout, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """A weight `[4, 64]` that is read only."""
    scales = rng.integers(50, 60, row.scales_shape((4, 64))).astype(np.uint8)
    return {
        "a.qweight": rng.integers(0, 256, (4, 32)).astype(np.uint8),
        "a.scales": scales,
        "a.weight_global_scale": np.array([10], np.float32),
        "a.forward_hadamard_matrix": np.eye(16, dtype=np.float32)[::-1].copy(),
    }


def _nvfp4() -> bytes:
    block = b"\x38\x30\x28\x20" + bytes(range(32))
    tensors = {
        "a.weight": Tensor(40, (128, 2), block * 4),
        "a.scale": Tensor(0, (1,), struct.pack("<f", 0.25)),
        "a.input_scale": Tensor(0, (1,), struct.pack("<f", 1.0)),
    }
    return gguf(tensors)
