"""Good checkpoints of every kind, as bytes, and what is to read them."""

import dataclasses
import json
import struct
import tempfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from mx_jax import checkpoint
from mx_jax.formats import MXFP4, MXFP8_E4M3, NVFP4
from tests.checkpoint.gguf_bytes import F32, I32, STRING, U32, Tensor, array, gguf, text
from tests.checkpoint.sample import Files, Reader, Sample, convert_to, load, load_shards, read_all
from tests.checkpoint.samples_layouts import layout_samples
from tests.checkpoint.samples_words import word_samples
from tests.checkpoint.stored import draw


def samples() -> list[Sample]:
    """One of each kind, small enough to be read in a millisecond."""
    rng = np.random.default_rng(0)
    mx, fp8 = draw(MXFP4, (8, 64), rng), draw(MXFP8_E4M3, (8, 64), rng)
    nv = draw(NVFP4, (8, 64), rng)
    nv = dataclasses.replace(nv, scales=nv.scales & 0x3F)
    norm = jnp.ones(3)
    made = [Sample("gguf", {"model.gguf": _gguf()}, read_all)]
    kinds: tuple[tuple[str, Any, dict[str, Any]], ...] = (
        ("own", None, {}),
        ("compressed-tensors", {"a.weight": mx}, {"layout": "mxfp4-pack-quantized"}),
        ("gpt-oss", {"a": mx}, {"layout": "gpt-oss"}),
        ("modelopt", {"a.weight": nv}, {"layout": "modelopt-nvfp4", "max_shard_size": 200}),
        ("torchao", {"a.weight": nv, "b.weight": fp8, "c.weight": mx}, {"layout": "torchao"}),
    )
    for name, weights, options in kinds:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder)
            whole = path if "max_shard_size" in options else path / "model.safetensors"
            if weights is None:
                checkpoint.save(whole, {"a": {0: mx, "b": nv}, "norm": norm})
            else:
                checkpoint.write(whole, weights | {"norm": norm}, **options)
            files = {file.name: file.read_bytes() for file in path.iterdir()}
        made.append(Sample(name, files | _config(name), load if weights is None else read_all))
    return [*made, *_newer(rng), *layout_samples(rng), *word_samples()]


def _newer(rng: np.random.Generator) -> list[Sample]:
    """Several files of our own, what config.json states, and what `convert` makes of layouts."""
    one, fused = draw(MXFP4, (8, 64), rng), draw(MXFP4, (2, 4, 64), rng)
    one, fused = (dataclasses.replace(x, scales=x.scales % 8 + 120) for x in (one, fused))
    experts = {"mlp.experts.gate_up_proj": fused, "mlp.experts.gate_up_proj_bias": jnp.ones((2, 4))}
    stated = checkpoint.quantization_config
    own = {"a": {0: one, "b": fused}, "norm": jnp.ones(3)}
    parts: dict[str, Any] = {"max_shard_size": 200}
    rows: tuple[tuple[str, Any, dict[str, Any], Reader], ...] = (
        ("own shards", own, parts, load_shards),
        ("stated", {"a.weight": one}, {"layout": "mxfp4-pack-quantized"}, read_all),
        ("gpt-oss original", {"mlp.mlp1_weight": fused}, {"layout": "gpt-oss-original"}, read_all),
        ("gpt-oss apart", experts, {"layout": "gpt-oss"}, convert_to("--to", "compressed-tensors")),
        (
            "transcoded",
            {"a.weight": one},
            {"layout": "modelopt-mxfp4", **parts},
            convert_to("--to", "modelopt-nvfp4"),
        ),
    )
    made = []
    for name, weights, options, read in rows:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder)
            whole = path if "max_shard_size" in options else path / "model.safetensors"
            config: dict[str, Any] = {"model_type": "gpt_oss", "torch_dtype": "float32"}
            if "layout" in options:
                config["quantization_config"] = stated(weights, layout=options["layout"])
                checkpoint.write(whole, weights | {"norm": jnp.ones(3)}, **options)
            else:
                checkpoint.save(whole, weights, **options)
            (path / "config.json").write_text(json.dumps(config))
            files = {file.name: file.read_bytes() for file in path.iterdir()}
        made.append(Sample(name, files, read))
    return made


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
        "c.weight": Tensor(3, (32, 2), bytes(40)),
        "d.weight": Tensor(8, (32,), bytes(34)),
        "e.weight": Tensor(30, (3, 2, 2), bytes(24)),
    }
    return gguf(tensors, pairs)


def _config(kind: str) -> Files:
    """What stands beside the files in a folder."""
    if kind == "modelopt":
        said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
        return {"hf_quant_config.json": json.dumps(said).encode()}
    stated = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
    if kind != "compressed-tensors":
        return {}
    config = {"torch_dtype": "float32", "quantization_config": stated}
    return {"config.json": json.dumps(config).encode()}
