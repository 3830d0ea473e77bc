"""Good checkpoints of every kind, as bytes that are then changed, and what is to read them."""

import contextlib
import dataclasses
import importlib.util
import io
import json
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from mx_jax import checkpoint
from mx_jax.checkpoint.layouts import LAYOUTS, Layout
from mx_jax.commands import command_parser
from mx_jax.formats import MXFP4, MXFP8_E4M3, NVFP4
from tests.checkpoint.gguf_bytes import F32, I32, STRING, U32, Tensor, array, gguf, text
from tests.checkpoint.stored import draw

Reader = Callable[[Path], None]
Files = dict[str, bytes]


def read_all(path: Path) -> None:
    """Every tensor of somebody's checkpoint."""
    weights = checkpoint.read(path)
    repr(weights)
    for name in weights:
        weights[name]


def load(path: Path) -> None:
    """One of our own."""
    checkpoint.load(path / "model.safetensors")


def load_shards(path: Path) -> None:
    """Several files of our own, both ways."""
    read_all(path)
    checkpoint.load(path)


def convert_to(*words: str) -> Reader:
    """What the command makes of a folder, its own file and what config.json says of it included."""

    def convert(path: Path) -> None:
        (path / "out").mkdir()
        options = command_parser().parse_args(["convert", str(path), str(path / "out"), *words])
        nowhere = io.StringIO()
        with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            options.run(options)

    return convert


@dataclasses.dataclass(frozen=True)
class Sample:
    """A good checkpoint, whose files are then changed.

    Attributes:
      name: of its kind.
      files: of a folder, by name.
      read: what is to read the folder.
    """

    name: str
    files: Files
    read: Reader


def samples() -> list[Sample]:
    """One of each kind, small enough to be read in a millisecond."""
    rng = np.random.default_rng(0)
    mx, fp8 = draw(MXFP4, (8, 64), rng), draw(MXFP8_E4M3, (8, 64), rng)
    nv, norm = draw(NVFP4, (8, 64), rng), {"norm": jnp.ones(3)}
    one, fused = draw(MXFP4, (8, 64), rng), draw(MXFP4, (2, 4, 64), rng)
    one, fused = (dataclasses.replace(x, scales=x.scales % 8 + 120) for x in (one, fused))
    experts = {
        "mlp.experts.gate_up_proj": fused.mT,
        "mlp.experts.gate_up_proj_bias": jnp.ones((2, 4)),
    }
    parts, packed = {"max_shard_size": 200}, "mxfp4-pack-quantized"
    theirs = {"a.weight": nv, "b.weight": fp8, "c.weight": mx}
    modelopt = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
    made = {
        "mx_jax": written({"a": {0: mx, "b": nv}} | norm),
        "modelopt": written({"a.weight": nv} | norm, "modelopt-nvfp4", **parts)
        | {"hf_quant_config.json": json.dumps(modelopt).encode()},
        "torchao": written(theirs | norm, "torchao"),
        # What `convert` makes of layouts, and of what config.json states.
        "mx_jax shards": written({"a": {0: one, "b": fused}} | norm, None, GPT_OSS, **parts),
        "stated": stated({"a.weight": one} | norm, packed),
        "gpt-oss original": stated({"mlp.mlp1_weight": fused} | norm, "gpt-oss-original"),
        "gpt-oss experts": stated(experts | norm, "gpt-oss"),
        "transcoded": stated({"a.weight": one} | norm, "modelopt-mxfp4", **parts),
    }
    readers = {
        "mx_jax": load,
        "mx_jax shards": load_shards,
        "transcoded": convert_to("--to", "modelopt-nvfp4"),
    }
    return [
        Sample("gguf", {"model.gguf": _gguf()}, read_all),
        *(Sample(name, files, readers.get(name, read_all)) for name, files in made.items()),
        *(_sample(row, rng) for row in LAYOUTS),
    ]


GPT_OSS = {"model_type": "gpt_oss", "torch_dtype": "float32"}


def written(weights: Any, layout: str | None = None, config: Any = None, **options: Any) -> Files:
    """The files of a checkpoint in a layout, or our own, and config.json if it says anything."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        whole = path if options else path / "model.safetensors"
        if layout is None:
            checkpoint.save(whole, weights, **options)
        else:
            checkpoint.write(whole, weights, layout=layout, **options)
        files = {file.name: file.read_bytes() for file in path.iterdir()}
    return files if config is None else files | {"config.json": json.dumps(config).encode()}


def stated(weights: Any, layout: str, **options: Any) -> Files:
    """The same, where config.json says the layout."""
    said = checkpoint.quantization_config(weights, layout=layout)
    return written(weights, layout, GPT_OSS | {"quantization_config": said}, **options)


def _gguf() -> bytes:
    pairs = {
        "general.architecture": (STRING, text("llama")),
        "general.alignment": (U32, struct.pack("<I", 32)),
        "base": (F32, struct.pack("<f", 1e5)),
        "tokens": array(STRING, [text("a"), text("bc")]),
        "types": array(I32, [bytes(4)] * 3),
    }
    tensors = {
        "a.weight": Tensor(39, (64, 2), (b"\x7f" + bytes(16)) * 4),
        "b.weight": Tensor(40, (64, 2), (b"\x38" * 4 + bytes(32)) * 2),
        "b.scale": Tensor(0, (1,), struct.pack("<f", 0.5)),
        "b.input_scale": Tensor(0, (1,), struct.pack("<f", 1.0)),
        "c.weight": Tensor(3, (32, 2), bytes(40)),
        "d.weight": Tensor(8, (32,), bytes(34)),
        "e.weight": Tensor(30, (3, 2, 2), bytes(24)),
    }
    if importlib.util.find_spec("gguf") is not None:
        tensors["f.weight"] = Tensor(12, (256, 2), bytes(range(144)) * 2)
        tensors["g.weight"] = Tensor(16, (256,), bytes(range(66)))
    return gguf(tensors, pairs)


def _sample(row: Layout, rng: np.random.Generator) -> Sample:
    shape = (2, 4, 64) if row.split else (4, 64)
    x = draw(row.format, shape, rng)
    stated: Any = checkpoint.quantization_config({"a" + row.weight: x}, layout=row.name)
    if stated is None and row.configs:
        stated = dict(row.configs[-1])
    config = {"torch_dtype": "float32"} | ({"quantization_config": stated} if stated else {})
    name = f"layout {row.name}"
    weights = {"a" + row.weight: x, "norm": jnp.ones(3)}
    return Sample(name, written(weights, row.name, config), read_all)
