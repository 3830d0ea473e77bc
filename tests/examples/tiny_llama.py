"""A tiny Llama with random weights, by llama.cpp's names and by the hub's; where SmolLM2 lies."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from benchmarks.llama import GGUF, HUB, LlamaConfig, Tokenizer, find_model

CONFIG = LlamaConfig(
    vocabulary=96,
    width=64,
    layers=2,
    heads=4,
    kv_heads=2,
    head_width=32,
    hidden=96,
    rope_theta=100.0,
    epsilon=1e-5,
)
# The same sizes, as config.json has them.
HUB_CONFIG = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100.0,
    "max_position_embeddings": 2048,
    "torch_dtype": "float32",
    "quantization_config": None,
}
TOKENS = np.array([[5, 90, 3, 3, 41, 17, 66, 0, 12], [9, 1, 88, 2, 54, 73, 31, 95, 60]], np.int32)


def tensors(config: LlamaConfig = CONFIG) -> dict[str, np.ndarray]:
    """Weights `[out, in]` and norms, large enough for every part to matter."""
    rng, result = np.random.default_rng(0), {}

    queries, keys = (count * config.head_width for count in (config.heads, config.kv_heads))
    width, hidden = config.width, config.hidden
    table = (config.vocabulary, width)
    shapes = {"query": (queries, width), "key": (keys, width), "value": (keys, width)}
    shapes |= {"out": (width, queries), "down": (width, hidden)}
    shapes |= dict.fromkeys(("gate", "up"), (hidden, width))
    shapes |= dict.fromkeys(("embedding", "head"), table)

    def draw(field: str, index: int | None = None) -> None:
        shape = shapes.get(field, (width,))
        if len(shape) == 1:
            values = rng.uniform(0.5, 1.5, shape)
        else:
            values = rng.standard_normal(shape) * 1.5 / np.sqrt(shape[1])
        result[GGUF.of(field, index)] = values.astype(np.float32)

    draw("embedding")
    for index in range(config.layers):
        for field in ("query", "key", "value", "out", "gate", "up", "down"):
            draw(field, index)
        draw("attention_norm", index)
        draw("feed_forward_norm", index)
    draw("norm")
    if not config.tied:
        draw("head")
    return result


def hub_tensors(
    theirs: Mapping[str, np.ndarray] | None = None, config: LlamaConfig = CONFIG
) -> dict[str, np.ndarray]:
    """Weights by the hub's names, pairs of turned features half a head apart."""
    theirs, result = tensors(config) if theirs is None else theirs, {}
    for field, name in GGUF.tensors.items():
        for index in range(config.layers):
            key = name.format(index)
            if key not in theirs:
                continue
            weights = theirs[key]
            if field in ("query", "key"):
                pairs = weights.reshape(-1, config.head_width // 2, 2, config.width)
                weights = np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(weights.shape))
            result[HUB.of(field, index)] = weights
    return result


def put_folder(path: Path, **changed: Any) -> Path:
    """The tiny model as the hub has it, what config.json says changed."""
    path.mkdir(exist_ok=True)
    safetensors.numpy.save_file(hub_tensors(), path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(HUB_CONFIG | changed))
    return path


class Letters:
    """An encoder of the tiny model's vocabulary: a letter a token."""

    def encode(self, words: str, add_special_tokens: bool = False) -> Any:
        del add_special_tokens
        return type("Encoding", (), {"ids": [ord(letter) - 32 for letter in words]})

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        del skip_special_tokens
        return "".join(chr(32 + token) for token in tokens)


def tokenizer(*stop: int) -> Tokenizer:
    """One of `Letters`, and the tokens that end a text."""
    ends = frozenset(stop)
    return Tokenizer(encoder=Letters(), first=None, stop=ends, template=None, words={})


def smollm2() -> Path:
    """SmolLM2's GGUF file, of its package or as MX_JAX_SMOLLM2 says; else the test is skipped."""
    try:
        return find_model(os.environ.get("MX_JAX_SMOLLM2") or "smollm2")
    except ValueError as error:
        pytest.skip(str(error))
