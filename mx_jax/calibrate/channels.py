"""Which features of a model's parameters are the same: what scales and rotations may move."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path


@dataclasses.dataclass(frozen=True)
class Features:
    """Features along an axis of a parameter, or a range of them.

    Attributes:
      path: of the parameter, with slashes.
      axis: along which the features lie.
      start: the first of them, where a parameter holds others before.

    Examples:
      >>> from mx_jax import calibrate
      >>> calibrate.Features("mlp/gate_up/kernel", axis=1, start=1536).path
      'mlp/gate_up/kernel'
    """

    path: str
    axis: int = 0
    start: int | None = None


@dataclasses.dataclass(frozen=True)
class Pair:
    """Features that some parameters write, and others, the kernels of products, read.

    Nothing between mixes features, or does to one what depends on its size: a norm's gain before
    its products, values before the output of attention, `up` before `down`.

    Attributes:
      written: a gain, or the columns of a kernel, with those of its bias if it has one.
      read: by kernels along the axis that they contract.
      head_width: of values. A head that is written may be read by several in a row.

    Examples:
      >>> from mx_jax.calibrate import Features, Pair
      >>> norm = Pair((Features("norm/scale"),), (Features("query/kernel"), Features("key/kernel")))
      >>> len(norm.read)
      2
    """

    written: tuple[Features, ...]
    read: tuple[Features, ...]
    head_width: int | None = None


@dataclasses.dataclass(frozen=True)
class Channels:
    """The pairs of a model whose blocks add to a residual stream.

    Attributes:
      norms: gains of RMS norms, and all that reads what they scale.
      values: heads' values, and the output of attention.
      hidden: the features between two layers of a gated feed-forward layer.
      stream: parameters that write the residual stream, the embedding's table among them.
      copies: the table of a head that is tied, by the path of the head once it is not.

    Examples:
      >>> from mx_jax.calibrate import Channels, Features, Pair
      >>> hidden = Pair((Features("up/kernel", 1),), (Features("down/kernel"),))
      >>> Channels(hidden=(hidden,)).copies
      {}
    """

    norms: tuple[Pair, ...] = ()
    values: tuple[Pair, ...] = ()
    hidden: tuple[Pair, ...] = ()
    stream: tuple[Features, ...] = ()
    copies: Mapping[str, str] = dataclasses.field(default_factory=dict)


# By role: what llama.cpp calls it, the hub, and `examples/generate`.
_NAMES = {
    "embedding": ("token_embd", "model.embed_tokens", "embedding"),
    "norm": ("output_norm", "model.norm", "norm"),
    "head": ("output", "lm_head", "head"),
    "attention_norm": ("attn_norm", "input_layernorm", "attention_norm"),
    "query": ("attn_q", "self_attn.q_proj", "query"),
    "key": ("attn_k", "self_attn.k_proj", "key"),
    "value": ("attn_v", "self_attn.v_proj", "value"),
    "qkv": ("attn_qkv", "self_attn.qkv_proj", "qkv"),
    "out": ("attn_output", "self_attn.o_proj", "attention_out"),
    "feed_forward_norm": ("ffn_norm", "post_attention_layernorm", "feed_forward_norm"),
    "gate": ("ffn_gate", "mlp.gate_proj", "gate"),
    "up": ("ffn_up", "mlp.up_proj", "up"),
    "gate_up": ("ffn_gate_up", "mlp.gate_up_proj", "gate_up"),
    "down": ("ffn_down", "mlp.down_proj", "down"),
}
_ROLES = {name: role for role, names in _NAMES.items() for name in names}
# Where a head that is no longer tied lies, by the path of the table.
_HEADS = {
    "token_embd.weight": "output.weight",
    "model.embed_tokens.weight": "lm_head.weight",
    "embedding": "head",
}
_BLOCK = re.compile(r"(?:blk|(?:model\.)?layers)[._](\d+)\.(.*)")
_NO_WEIGHT = re.compile(r"rope_freqs|.*rotary_emb\.inv_freq")


def llama(params: Mapping[str, Any], head_width: int) -> Channels:
    """The channels of a Llama-like model, by the names of its parameters.

    Args:
      params: of `examples/generate`, or a checkpoint's tensors by their names on the hub or in
        GGUF. A `kernel` is `[in, out]`, every other matrix `[out, in]`.
      head_width: features of an attention head.

    Raises:
      ValueError: a parameter of no role that a Llama has, as biases are and norms of queries; or
        one that lacks.

    Examples:
      >>> import jax.numpy as jnp
      >>> from mx_jax import calibrate
      >>> shapes = {"qkv": (8, 16), "attention_out": (8, 8), "gate_up": (8, 32), "down": (16, 8)}
      >>> layer = {name: {"kernel": jnp.ones(shape)} for name, shape in shapes.items()}
      >>> layer |= {n: {"scale": jnp.ones(8)} for n in ("attention_norm", "feed_forward_norm")}
      >>> ends = {"embedding": jnp.ones((9, 8)), "norm": {"scale": jnp.ones(8)}}
      >>> channels = calibrate.llama({**ends, "layers_0": layer}, head_width=4)
      >>> channels.hidden[0].written
      (Features(path='layers_0/gate_up/kernel', axis=1, start=16),)
      >>> channels.copies
      {'head': 'embedding'}
    """
    blocks: dict[int, dict[str, str]] = {}
    ends: dict[str, str] = {}
    shapes = {path: np.shape(leaf) for path, leaf in flat(params).items()}
    for path in shapes:
        name = re.sub(r"\.(weight|kernel|scale|embedding)$", "", path.replace("/", "."))
        block = _BLOCK.fullmatch(name)
        role = _ROLES.get(block[2] if block else name)
        if role is not None:
            (blocks.setdefault(int(block[1]), {}) if block else ends)[role] = path
        elif not _NO_WEIGHT.fullmatch(name):
            raise ValueError(
                f"calibrate.llama: parameters must be those of a Llama, got {path!r}; name the "
                "Channels yourself"
            )

    def at(roles: Mapping[str, str], role: str) -> str:
        if role not in roles:
            raise ValueError(f"calibrate.llama: no parameter is the {role}; name the Channels")
        return roles[role]

    def reads(path: str) -> Features:
        return Features(path, 0 if path.endswith("kernel") else 1)

    def writes(path: str, start: int | None = None) -> Features:
        return Features(path, 1 if path.endswith("kernel") else 0, start)

    table = at(ends, "embedding")
    copies = {} if "head" in ends else {_HEADS.get(table, "head"): table}
    norms, values, hidden = [], [], []
    stream = [Features(table, 1)]
    for _, roles in sorted(blocks.items()):
        out, down = at(roles, "out"), at(roles, "down")
        joined = (
            [roles["qkv"]] if "qkv" in roles else [at(roles, n) for n in ("query", "key", "value")]
        )
        gates = [roles["gate_up"]] if "gate_up" in roles else [at(roles, n) for n in ("gate", "up")]
        # Of joined kernels, values are behind queries, as many as `out` reads, and keys.
        start = None
        if "qkv" in roles:
            columns, queries = (
                shapes[joined[0]][writes(joined[0]).axis],
                shapes[out][reads(out).axis],
            )
            start = (columns + queries) // 2
        values.append(Pair((writes(joined[-1], start),), (reads(out),), head_width))
        start = shapes[down][reads(down).axis] if "gate_up" in roles else None
        hidden.append(Pair((writes(gates[-1], start),), (reads(down),)))
        for norm, readers in (("attention_norm", joined), ("feed_forward_norm", gates)):
            norms.append(Pair((Features(at(roles, norm)),), tuple(map(reads, readers))))
        stream += [writes(out), writes(down)]
    head = ends.get("head") or next(iter(copies))
    norms.append(Pair((Features(at(ends, "norm")),), (reads(head),)))
    return Channels(tuple(norms), tuple(values), tuple(hidden), tuple(stream), copies)


# Parameters by path -----------------------------------------------------------------------------


def flat(params: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves by their paths."""
    leaves, _ = tree_flatten_with_path(params)
    return {keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


class Parameters:
    """Leaves by path that change one at a time, in float32 at least; the original stays."""

    def __init__(self, params: Mapping[str, Any], copies: Mapping[str, str]) -> None:
        self._structure, self.leaves = jax.tree.structure(params), flat(params)
        self._added = [path for path in copies if path not in self.leaves]
        self.leaves |= {path: self.leaves[copies[path]] for path in self._added}
        self._dtypes = {path: jnp.result_type(leaf) for path, leaf in self.leaves.items()}

    def look(self, features: Features) -> np.ndarray:
        """float64 `[..., features]`."""
        w = np.asarray(self.leaves[features.path], np.float64)
        return np.moveaxis(w, features.axis, -1)[..., features.start :]

    def turn(self, features: Features, matrix: np.ndarray) -> None:
        """Multiply features, as many as the matrix has rows at a time, from the right."""
        w = self.look(features)
        product = w.reshape(*w.shape[:-1], -1, len(matrix)) @ matrix
        self.put(features, product.reshape(w.shape))

    def put(self, features: Features, values: np.ndarray) -> None:
        """Replace what `look` gives."""
        dtype = np.promote_types(self._dtypes[features.path], np.float32)
        w = np.array(self.leaves[features.path], dtype)
        np.moveaxis(w, features.axis, -1)[..., features.start :] = values
        self.leaves[features.path] = w

    def tree(self) -> dict[str, Any]:
        """Parameters as they came, in their dtypes, and those that were copies."""
        arrays = {
            path: leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf, self._dtypes[path])
            for path, leaf in self.leaves.items()
        }
        added = {path: arrays.pop(path) for path in self._added}
        return {**self._structure.unflatten(arrays.values()), **added}
