"""A model in a folder of Hugging Face's hub: what its config.json says."""

from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from mx_jax.checkpoint.folder import read_table
from mx_jax.generate.config import LlamaConfig
from mx_jax.generate.names import HUB
from mx_jax.generate.rotary import rope_divisors

# `model_type`s whose layers are those of `Llama`.
FAMILIES = ("llama", "mistral", "smollm")


def read_json(path: Path) -> dict[str, Any]:
    """A table of a file; an empty one where there is no file.

    Raises:
      ValueError: it is no JSON, or no table.
    """
    return read_table(path, "generate") if path.is_file() else {}


def config_from_json(config: Mapping[str, Any], names: Container[str]) -> LlamaConfig:
    """The sizes that a config.json states.

    Args:
      config: its fields.
      names: those of the checkpoint's tensors.

    Raises:
      ValueError: a model of another family, one that differs from it, or a field that is missing.
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ValueError(
            f"generate: reads models of the families {', '.join(FAMILIES)}, got "
            f"model_type={family!r}"
        )

    def field(name: str) -> Any:
        if config.get(name) is None:
            raise ValueError(f"generate: config.json lacks the field {name}")
        return config[name]

    heads, width = int(field("num_attention_heads")), int(field("hidden_size"))
    head_width = int(config.get("head_dim") or width // heads)
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    _check(config)
    return LlamaConfig(
        vocabulary=int(field("vocab_size")),
        width=width,
        layers=int(field("num_hidden_layers")),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_width=head_width,
        hidden=int(field("intermediate_size")),
        rope_theta=theta,
        rope_divisors=rope_divisors(rope, theta, head_width),
        epsilon=float(config.get("rms_norm_eps", 1e-6)),
        context=int(config.get("max_position_embeddings", 2048)),
        tied=HUB.head not in names,
    )


def _check(config: Mapping[str, Any]) -> None:
    """Raise where the model computes something else than `Llama`."""
    context, window = config.get("max_position_embeddings", 0), config.get("sliding_window")
    facts = {
        "hidden_act": (config.get("hidden_act", "silu"), "silu"),
        "attention_bias": (bool(config.get("attention_bias")), False),
        "mlp_bias": (bool(config.get("mlp_bias")), False),
        "sliding_window": (None if window is None or window >= context else window, None),
    }
    for name, (found, needed) in facts.items():
        if found != needed:
            raise ValueError(f"generate: needs {name}={needed!r} in config.json, got {found!r}")
