"""A model in a folder of Hugging Face's hub: what its config.json says."""

from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from mx_jax.checkpoint.folder import read_table
from mx_jax.generate.config import LlamaConfig
from mx_jax.generate.fields import Fields
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


def config_from_json(
    config: Mapping[str, Any], names: Container[str], where: str = "config.json"
) -> LlamaConfig:
    """The sizes that a config.json states.

    Args:
      config: its fields.
      names: those of the checkpoint's tensors.
      where: the file's path, for errors.

    Raises:
      ValueError: a model of another family, one that differs from it, or a field that is missing
        or of another type.
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ValueError(
            f"generate: reads models of the families {', '.join(FAMILIES)}, got "
            f"model_type={family!r}"
        )

    fields = Fields(config, where)
    heads, width = fields.whole("num_attention_heads"), fields.whole("hidden_size")
    head_width = fields.whole("head_dim", width // heads)
    rope = fields.table("rope_parameters", "rope_scaling")
    theta = Fields(rope, where).number("rope_theta", fields.number("rope_theta", 10000.0))
    _check(fields)
    return LlamaConfig(
        vocabulary=fields.whole("vocab_size"),
        width=width,
        layers=fields.whole("num_hidden_layers"),
        heads=heads,
        kv_heads=fields.whole("num_key_value_heads", heads),
        head_width=head_width,
        hidden=fields.whole("intermediate_size"),
        rope_theta=theta,
        rope_divisors=rope_divisors(rope, theta, head_width, where),
        epsilon=fields.number("rms_norm_eps", 1e-6),
        context=fields.whole("max_position_embeddings", 2048),
        tied=HUB.head not in names,
    )


def _check(fields: Fields) -> None:
    """Raise where the model computes something else than `Llama`."""
    config, window = fields.said, None
    if fields.has("sliding_window"):
        window = fields.whole("sliding_window")
        context = fields.whole("max_position_embeddings", 2048)
        window = None if window >= context else window
    facts = {
        "hidden_act": (config.get("hidden_act", "silu"), "silu"),
        "attention_bias": (bool(config.get("attention_bias")), False),
        "mlp_bias": (bool(config.get("mlp_bias")), False),
        "sliding_window": (window, None),
    }
    for name, (found, needed) in facts.items():
        if found != needed:
            raise ValueError(f"generate: needs {name}={needed!r} in {fields.where}, got {found!r}")
