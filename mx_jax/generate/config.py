"""A model of the Llama family as its files state it: its sizes, and the names of its tensors.

A GGUF file states them in its metadata, a folder of Hugging Face's hub in its config.json.
"""

import dataclasses
import math
import numbers
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mx_jax.checkpoint.files import read_table


@dataclasses.dataclass(frozen=True)
class Fields:
    """What a file says, by name.

    Attributes:
      said: the fields; one that is None is as if it were missing.
      where: the file's path, for errors.
      prefix: of the names, as the file has them.
    """

    said: Mapping[str, Any]
    where: str
    prefix: str = ""

    def whole(self, name: str, default: int | None = None) -> int:
        """A whole number of at least 1."""
        value = self._value(name, default)
        if not _is_number(value) or not math.isfinite(value) or value != int(value) or value < 1:
            raise self.refused(name, "a whole number of at least 1", value)
        return int(value)

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self._value(name, default)
        if not _is_number(value) or not math.isfinite(value) or value <= 0:
            raise self.refused(name, "a finite number above 0", value)
        return float(value)

    def table(self, *names: str) -> dict[str, Any]:
        """The first of these fields that says something; an empty table where none does."""
        for name in names:
            if value := self.get(name):
                if not isinstance(value, Mapping):
                    raise self.refused(name, "a table", value)
                return dict(value)
        return {}

    def text(self, name: str, default: str | None = None) -> str:
        """A text that UTF-8 can hold: JSON's escapes may spell one that it cannot."""
        value = self._value(name, default)
        if not isinstance(value, str) or value != value.encode(errors="replace").decode():
            raise self.refused(name, "a text", value)
        return value

    def texts(self, name: str) -> list[str]:
        """A row of texts."""
        value = self._value(name, None)
        if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
            raise self.refused(name, "texts", value)
        return list(value)

    def get(self, name: str, default: Any = None) -> Any:
        """What the field says, of whatever type."""
        return self.said.get(self.prefix + name, default)

    def has(self, name: str) -> bool:
        """Whether the field says something."""
        return self.get(name) is not None

    def _value(self, name: str, default: Any) -> Any:
        value = self.get(name)
        value = default if value is None else value
        if value is None:
            raise ValueError(f"generate: {self.where} lacks the field {self.prefix}{name}")
        return value

    def refused(self, name: str, needed: str, value: Any) -> ValueError:
        """The error of a field that is something else than what is needed."""
        return ValueError(
            f"generate: {self.where}: needs {needed} as {self.prefix}{name}, "
            f"got {self.prefix}{name}={value!r:.80}"
        )


def _is_number(value: Any) -> bool:
    """Booleans are none, although Python counts them in."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


@dataclasses.dataclass(frozen=True)
class Names:
    """What a checkpoint calls the tensors of a Llama.

    Attributes:
      tensors: names by field, those of a block with its number in braces; a head is absent where
        the embedding is its matrix.
      adjacent: whether the pairs of features that are turned lie next to each other in the rows of
        a head's queries and keys, instead of half a head apart.
    """

    tensors: Mapping[str, str]
    adjacent: bool

    def of(self, field: str, index: int | None = None) -> str:
        """The name of a tensor, of the block `index` if it is in one."""
        return self.tensors[field].format(index)


# By field: llama.cpp's name, the hub's, and the axes of its values.
TENSORS = {
    "embedding": ("token_embd", "model.embed_tokens", ("vocabulary", "width")),
    "norm": ("output_norm", "model.norm", ("width",)),
    "head": ("output", "lm_head", ("vocabulary", "width")),
    "attention_norm": ("blk.{}.attn_norm", "model.layers.{}.input_layernorm", ("width",)),
    "query": ("blk.{}.attn_q", "model.layers.{}.self_attn.q_proj", ("queries", "width")),
    "key": ("blk.{}.attn_k", "model.layers.{}.self_attn.k_proj", ("keys", "width")),
    "value": ("blk.{}.attn_v", "model.layers.{}.self_attn.v_proj", ("keys", "width")),
    "out": ("blk.{}.attn_output", "model.layers.{}.self_attn.o_proj", ("width", "queries")),
    "feed_forward_norm": (
        "blk.{}.ffn_norm",
        "model.layers.{}.post_attention_layernorm",
        ("width",),
    ),
    "gate": ("blk.{}.ffn_gate", "model.layers.{}.mlp.gate_proj", ("hidden", "width")),
    "up": ("blk.{}.ffn_up", "model.layers.{}.mlp.up_proj", ("hidden", "width")),
    "down": ("blk.{}.ffn_down", "model.layers.{}.mlp.down_proj", ("width", "hidden")),
}
GGUF = Names({field: f"{own}.weight" for field, (own, _, _) in TENSORS.items()}, adjacent=True)
HUB = Names({field: f"{own}.weight" for field, (_, own, _) in TENSORS.items()}, adjacent=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """The sizes of a model of the Llama family.

    Attributes:
      vocabulary: number of tokens.
      width: features of the residual stream.
      layers: number of blocks.
      heads: heads of the queries.
      kv_heads: heads of keys and values, each shared by `heads / kv_heads` queries.
      head_width: features of a head, even.
      hidden: features of the feed-forward layer.
      rope_theta: base of the rotary embedding's wavelengths.
      rope_divisors: what the frequency of each pair of a head's features is divided by, for models
        that reach beyond their first context; None: nothing.
      epsilon: of the norms.
      context: most tokens that the model was trained for.
      tied: whether the head multiplies by the embedding.

    Raises:
      ValueError: kv_heads does not divide heads, head_width is odd, or divisors are not one a pair.
    """

    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    hidden: int
    rope_theta: float = 10000.0
    rope_divisors: tuple[float, ...] | None = None
    epsilon: float = 1e-5
    context: int = 2048
    tied: bool = True

    def __post_init__(self):
        if self.heads % self.kv_heads:
            raise ValueError(
                f"LlamaConfig: kv_heads must divide heads, got heads={self.heads}, "
                f"kv_heads={self.kv_heads}"
            )
        if self.head_width % 2:
            raise ValueError(
                "LlamaConfig: rotary embedding turns features in pairs, head_width must be even, "
                f"got head_width={self.head_width}"
            )
        divisors = self.rope_divisors
        if divisors is not None and len(divisors) != self.head_width // 2:
            raise ValueError(
                "LlamaConfig: rope_divisors must be one for each pair of features, got "
                f"len(rope_divisors)={len(divisors)}, head_width={self.head_width}"
            )

    def shape(self, field: str) -> tuple[int, ...]:
        """Of a tensor, by its field in `TENSORS`."""
        sizes = {
            "vocabulary": self.vocabulary,
            "width": self.width,
            "hidden": self.hidden,
            "queries": self.heads * self.head_width,
            "keys": self.kv_heads * self.head_width,
        }
        return tuple(sizes[axis] for axis in TENSORS[field][2])


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
        tied=HUB.of("head") not in names,
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


def _linear(said: Fields, theta: float, head_width: int) -> tuple[float, ...]:
    """All frequencies lower by one factor."""
    return (said.number("factor"),) * (head_width // 2)


def _llama3(said: Fields, theta: float, head_width: int) -> tuple[float, ...]:
    """Frequencies whose waves are long lower by a factor, short ones as they are."""
    factor, low, high = (
        said.number(name) for name in ("factor", "low_freq_factor", "high_freq_factor")
    )
    original = said.number("original_max_position_embeddings")

    def divisor(pair: int) -> float:
        wavelength = 2 * math.pi * theta ** (2 * pair / head_width)
        # 0 for waves that fit in the original context `low` times, 1 for `high` times.
        share = min(max((original / wavelength - low) / (high - low), 0.0), 1.0)
        return 1 / ((1 - share) / factor + share)

    return tuple(divisor(pair) for pair in range(head_width // 2))


# Ways in which a model reaches beyond its first context, by the hub's names.
_SCALINGS: dict[str, Callable[[Fields, float, int], tuple[float, ...] | None]] = {
    "default": lambda said, theta, head_width: None,
    "linear": _linear,
    "llama3": _llama3,
}


def rope_divisors(
    said: Mapping[str, Any], theta: float, head_width: int, where: str = "config.json"
) -> tuple[float, ...] | None:
    """What each pair's frequency is divided by.

    Args:
      said: `rope_scaling` or `rope_parameters` of a config.json.
      theta: base of the wavelengths.
      head_width: features of a head.
      where: the path of the file that says it, for errors.

    Returns:
      A number for each pair; None: nothing is divided.

    Raises:
      ValueError: a way that is not known, or one whose numbers are missing or make no sense.
    """
    kind = said.get("rope_type", said.get("type")) or "default"
    if not isinstance(kind, str) or kind not in _SCALINGS:
        raise ValueError(
            f"generate: {where}: knows the rotary embeddings {', '.join(_SCALINGS)}, got "
            f"rope_type={kind!r}"
        )
    try:
        divisors = _SCALINGS[kind](Fields(said, f"{where}, rope_type={kind!r}"), theta, head_width)
    except ZeroDivisionError:
        divisors = (0.0,)
    if divisors is not None and not all(each > 0 for each in divisors):
        raise ValueError(
            f"generate: {where}: numbers of rope_type={kind!r} divide by zero, got {dict(said)}"
        )
    return divisors


ARCHITECTURE = "llama"


# What llama.cpp divides rotary frequencies by.
_ROPE_FREQUENCIES = "rope_freqs.weight"


def config_from_gguf(
    metadata: Mapping[str, Any], tensors: Mapping[str, Any], where: str = "the file"
) -> LlamaConfig:
    """The sizes that a GGUF file states.

    Args:
      metadata: its fields by name.
      tensors: its tensors, of which rope_freqs.weight is read.
      where: the file's path, for errors.

    Raises:
      ValueError: a model of another family, or a field that is missing or of another type, such as
        a number for each layer where `Llama` has one for all.
    """
    family = metadata.get("general.architecture")
    if family != ARCHITECTURE:
        raise ValueError(
            f"generate: reads models of the {ARCHITECTURE} family, got "
            f"general.architecture={family!r}"
        )

    fields = Fields(metadata, where, f"{ARCHITECTURE}.")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, Sequence):
        raise ValueError(f"generate: {where} lacks the field tokenizer.ggml.tokens")
    heads, width = fields.whole("attention.head_count"), fields.whole("embedding_length")
    head_width = fields.whole("rope.dimension_count", width // heads)
    return LlamaConfig(
        vocabulary=len(tokens),
        width=width,
        layers=fields.whole("block_count"),
        heads=heads,
        kv_heads=fields.whole("attention.head_count_kv", heads),
        head_width=head_width,
        hidden=fields.whole("feed_forward_length"),
        rope_theta=fields.number("rope.freq_base", 10000.0),
        rope_divisors=_divisors(metadata, tensors, head_width, where),
        epsilon=fields.number("attention.layer_norm_rms_epsilon", 1e-5),
        context=fields.whole("context_length", 2048),
        tied=GGUF.of("head") not in tensors,
    )


def _divisors(
    metadata: Mapping[str, Any], tensors: Mapping[str, Any], head_width: int, where: str
) -> tuple[float, ...] | None:
    """Of rotary frequencies: a tensor of the file, and a factor for all of them."""
    said = {
        "type": metadata.get(f"{ARCHITECTURE}.rope.scaling.type"),
        "factor": metadata.get(f"{ARCHITECTURE}.rope.scaling.factor", 1.0),
    }
    if said["type"] == "none":
        said["type"] = None
    scaled = rope_divisors(said, 1.0, head_width, where)
    if _ROPE_FREQUENCIES not in tensors:
        return scaled
    each = np.asarray(tensors[_ROPE_FREQUENCIES], np.float32).ravel()
    return tuple(float(x) for x in each * np.float32(1.0 if scaled is None else scaled[0]))
