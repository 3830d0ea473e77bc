"""BERT for tests: tiny random weights by its names, and sentences as tokens."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
# Sentences, and their tokens as `tokenizers` cuts them.
SENTENCES = json.loads((HERE / "minilm.json").read_text())
TINY = {
    "model_type": "bert",
    "hidden_act": "gelu",
    "vocab_size": 90,
    "max_position_embeddings": 24,
    "type_vocab_size": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "layer_norm_eps": 1e-12,
}
TINY_SENTENCES = [[5, 80, 3, 3, 41], [9, 1, 88, 2, 54, 73, 31, 17, 60], [7]]


def tensors(said: Mapping[str, Any] = TINY) -> dict[str, np.ndarray]:
    """Weights `[out, in]`, biases and norms, large enough for every part to matter."""
    rng = np.random.default_rng(0)
    width, hidden = said["hidden_size"], said["intermediate_size"]
    result: dict[str, np.ndarray] = {}

    def table(name: str, rows: int) -> None:
        values = rng.standard_normal((rows, width))
        result[f"embeddings.{name}_embeddings.weight"] = values.astype(np.float32)

    def dense(name: str, out: int, into: int) -> None:
        values = rng.standard_normal((out, into)) * 1.5 / np.sqrt(into)
        result[f"{name}.weight"] = values.astype(np.float32)
        result[f"{name}.bias"] = (0.3 * rng.standard_normal(out)).astype(np.float32)

    def norm(name: str) -> None:
        result[f"{name}.weight"] = rng.uniform(0.5, 1.5, width).astype(np.float32)
        result[f"{name}.bias"] = (0.3 * rng.standard_normal(width)).astype(np.float32)

    table("word", said["vocab_size"])
    table("position", said["max_position_embeddings"])
    table("token_type", said["type_vocab_size"])
    norm("embeddings.LayerNorm")
    for index in range(said["num_hidden_layers"]):
        name = f"encoder.layer.{index}"
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            dense(f"{name}.attention.{part}", width, width)
        norm(f"{name}.attention.output.LayerNorm")
        dense(f"{name}.intermediate.dense", hidden, width)
        dense(f"{name}.output.dense", width, hidden)
        norm(f"{name}.output.LayerNorm")
    return result
