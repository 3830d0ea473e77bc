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
class Kind:
    """What a field has to hold: for errors, and as a test."""

    needed: str
    holds: Callable[[Any], bool]


def _is_number(value: object) -> bool:
    """A finite one above 0; booleans are none, although Python counts them in."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    return 0 < float(value) < math.inf


WHOLE = Kind("a whole number of at least 1", lambda x: _is_number(x) and x == int(x))
NUMBER = Kind("a finite number above 0", _is_number)
TABLE = Kind("a table", lambda x: isinstance(x, Mapping))
# One that UTF-8 can hold: JSON's escapes may spell one that it cannot.
TEXT = Kind("a text", lambda x: isinstance(x, str) and x == x.encode(errors="replace").decode())
TEXTS = Kind(
    "texts", lambda x: isinstance(x, list | tuple) and all(isinstance(each, str) for each in x)
)


@dataclasses.dataclass(frozen=True)
class Fields:
    """What a file says, by name."""

    said: Mapping[str, Any]  # the fields; one that is None is as if it were missing
    where: str  # the file's path, for errors
    prefix: str = ""  # of the names, as the file has them

    def __call__(self, name: str, kind: Kind, default: object = None) -> Any:
        """A field's value; ValueError if it is missing, or of another kind."""
        value = self.get(name)
        value = default if value is None else value
        if value is None:
            raise ValueError(f"generate: {self.where} lacks the field {self.prefix}{name}")
        if not kind.holds(value):
            raise self.refused(name, kind.needed, value)
        return value

    def get(self, name: str) -> Any:
        """What the field says, of whatever type."""
        return self.said.get(self.prefix + name)

    def refused(self, name: str, needed: str, value: object) -> ValueError:
        """The error of a field that is something else than what is needed."""
        return ValueError(
            f"generate: {self.where}: needs {needed} as {self.prefix}{name}, "
            f"got {self.prefix}{name}={value!r:.80}"
        )


@dataclasses.dataclass(frozen=True)
class Names:
    """What a checkpoint calls the tensors of a Llama."""

    # Names by field, those of a block with its number in braces; a head is absent where the
    # embedding is its matrix.
    tensors: Mapping[str, str]
    # Whether the pairs of features that are turned lie next to each other in the rows of a
    # head's queries and keys, instead of half a head apart.
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
    """The sizes of a model of the Llama family."""

    vocabulary: int  # number of tokens
    width: int  # features of the residual stream
    layers: int  # number of blocks
    heads: int  # heads of the queries
    kv_heads: int  # heads of keys and values, each shared by `heads / kv_heads` queries
    head_width: int  # features of a head, even
    hidden: int  # features of the feed-forward layer
    rope_theta: float = 10000.0  # base of the rotary embedding's wavelengths
    # What the frequency of each pair of a head's features is divided by, for models that
    # reach beyond their first context; None: nothing.
    rope_divisors: tuple[float, ...] | None = None
    epsilon: float = 1e-5  # of the norms
    context: int = 2048  # most tokens that the model was trained for
    tied: bool = True  # whether the head multiplies by the embedding

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


# `model_type`s whose layers are those of `Llama`, and llama.cpp's name for all of them.
FAMILIES, ARCHITECTURE = ("llama", "mistral", "smollm"), "llama"
# Sizes of `LlamaConfig`: their names in config.json, and in a GGUF file.
_SIZES = {
    "width": ("hidden_size", "embedding_length"),
    "layers": ("num_hidden_layers", "block_count"),
    "heads": ("num_attention_heads", "attention.head_count"),
    "kv_heads": ("num_key_value_heads", "attention.head_count_kv"),
    "head_width": ("head_dim", "rope.dimension_count"),
    "hidden": ("intermediate_size", "feed_forward_length"),
    "context": ("max_position_embeddings", "context_length"),
}


def _sizes(fields: Fields, column: int) -> dict[str, int]:
    """The sizes that a file states, by the column of its names in `_SIZES`."""
    found: dict[str, int] = {}
    for size, names in _SIZES.items():
        default = {"kv_heads": found.get("heads"), "context": 2048}.get(size)
        if size == "head_width":
            default = found["width"] // found["heads"]
        found[size] = int(fields(names[column], WHOLE, default))
    return found


def read_json(path: Path) -> dict[str, Any]:
    """A table of a file; an empty one where there is no file."""
    return read_table(path, "generate") if path.is_file() else {}


def config_from_json(
    config: Mapping[str, Any], names: Container[str], where: str = "config.json"
) -> LlamaConfig:
    """The sizes that a config.json states."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ValueError(
            f"generate: reads models of the families {', '.join(FAMILIES)}, got "
            f"model_type={family!r}"
        )
    fields = Fields(config, where)
    sizes = _sizes(fields, 0)
    rope = fields("rope_parameters", TABLE, {}) or fields("rope_scaling", TABLE, {})
    theta = Fields(rope, where)("rope_theta", NUMBER, fields("rope_theta", NUMBER, 10000.0))
    window = fields("sliding_window", WHOLE, sizes["context"])
    facts = {
        "hidden_act": (config.get("hidden_act", "silu"), "silu"),
        "attention_bias": (bool(config.get("attention_bias")), False),
        "mlp_bias": (bool(config.get("mlp_bias")), False),
        "sliding_window": (window if window < sizes["context"] else None, None),
    }
    for name, (found, needed) in facts.items():
        if found != needed:
            raise ValueError(f"generate: needs {name}={needed!r} in {where}, got {found!r}")
    return LlamaConfig(
        **sizes,
        vocabulary=int(fields("vocab_size", WHOLE)),
        rope_theta=float(theta),
        rope_divisors=rope_divisors(rope, theta, sizes["head_width"], where),
        epsilon=float(fields("rms_norm_eps", NUMBER, 1e-6)),
        tied=HUB.of("head") not in names,
    )


def _llama3(said: Fields, theta: float, head_width: int) -> tuple[float, ...]:
    """Frequencies whose waves are long lower by a factor, short ones as they are."""
    factor, low, high = (
        said(name, NUMBER) for name in ("factor", "low_freq_factor", "high_freq_factor")
    )
    original = said("original_max_position_embeddings", NUMBER)

    def divisor(pair: int) -> float:
        wavelength = 2 * math.pi * theta ** (2 * pair / head_width)
        # 0 for waves that fit in the original context `low` times, 1 for `high` times.
        share = min(max((original / wavelength - low) / (high - low), 0.0), 1.0)
        return 1 / ((1 - share) / factor + share)

    return tuple(divisor(pair) for pair in range(head_width // 2))


# Ways in which a model reaches beyond its first context, by the hub's names.
_SCALINGS: dict[str, Callable[[Fields, float, int], tuple[float, ...] | None]] = {
    "default": lambda said, theta, head_width: None,
    # All frequencies lower by one factor.
    "linear": lambda said, theta, head_width: (said("factor", NUMBER),) * (head_width // 2),
    "llama3": _llama3,
}


def rope_divisors(
    said: Mapping[str, Any], theta: float, head_width: int, where: str = "config.json"
) -> tuple[float, ...] | None:
    """What each pair's frequency is divided by."""
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


# What llama.cpp divides rotary frequencies by.
_ROPE_FREQUENCIES = "rope_freqs.weight"


def config_from_gguf(
    metadata: Mapping[str, Any], tensors: Mapping[str, Any], where: str = "the file"
) -> LlamaConfig:
    """The sizes that a GGUF file states."""
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
    sizes = _sizes(fields, 1)
    # A factor for all rotary frequencies, and a tensor of one for each.
    kind = fields.get("rope.scaling.type")
    said = {"type": None if kind == "none" else kind, "factor": fields.get("rope.scaling.factor")}
    said["factor"] = 1.0 if said["factor"] is None else said["factor"]
    divisors = rope_divisors(said, 1.0, sizes["head_width"], where)
    if _ROPE_FREQUENCIES in tensors:
        each = np.asarray(tensors[_ROPE_FREQUENCIES], np.float32).ravel()
        factor = np.float32(1.0 if divisors is None else divisors[0])
        divisors = tuple(float(x) for x in each * factor)
    return LlamaConfig(
        **sizes,
        vocabulary=len(tokens),
        rope_theta=float(fields("rope.freq_base", NUMBER, 10000.0)),
        rope_divisors=divisors,
        epsilon=float(fields("attention.layer_norm_rms_epsilon", NUMBER, 1e-5)),
        tied=GGUF.of("head") not in tensors,
    )
