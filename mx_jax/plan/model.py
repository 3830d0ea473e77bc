"""What is trained, and how it is spread over devices: a transformer's linear layers, and a mesh."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

Split = Literal["column", "row"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Linear:
    """A linear layer `[tokens, k] -> [tokens, n]`."""

    name: str  # what tables call it
    k: int  # features that go in
    n: int  # features that come out
    # Which axis of its weight the mesh axis `model` shards: `"column"` n, `"row"` k; `fsdp`
    # shards the other.
    split: Split
    # Whether a block that is rematerialized computes it again: not what only the residual
    # stream reads.
    recomputed: bool = True
    experts: int = 1  # how many such layers there are, of which a token goes through some
    experts_per_token: int = 1  # how many

    @property
    def is_routed(self) -> bool:
        """Whether it is one of experts."""
        return self.experts > 1

    @property
    def is_input_of_experts(self) -> bool:
        """Whether rows come to it from other devices."""
        return self.is_routed and self.split == "column"

    @property
    def params(self) -> int:
        """Elements of its weights."""
        return self.k * self.n * self.experts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A transformer."""

    params: int  # of all of it
    layers: int  # number of blocks
    width: int  # features of the residual stream
    linears: tuple[Linear, ...]  # the linear layers of one block, all of which follow the recipe
    assumed: tuple[str, ...] = ()  # what was not said, in words

    def __post_init__(self):
        if self.other_params < 0:
            raise ValueError(
                f"plan: the linear layers have {self.linear_params:,} parameters, more than "
                f"params={self.params:,}; check --params, --layers, --width and --hidden"
            )

    @property
    def linear_params(self) -> int:
        """Parameters of the linear layers in all blocks."""
        return self.layers * sum(linear.params for linear in self.linears)

    @property
    def other_params(self) -> int:
        """Embedding, head, norms: what no recipe quantizes."""
        return self.params - self.linear_params


def transformer(
    params: float,
    layers: int,
    *,
    width: int | None = None,
    hidden: int | None = None,
    kv_width: int | None = None,
    vocabulary: int = 0,
    experts: int = 1,
    experts_per_token: int = 1,
    multiple: int = 256,
) -> Model:
    """A decoder with a gated MLP, or a mixture of such experts: `qkv`, `out`, `gate_up` and `down`.

    Without a width it is `sqrt(params / (12 layers))`, without `hidden` what the parameters leave
    for it, both rounded to a `multiple`; the rows of a vocabulary count twice, for the head too.

    Examples:
      >>> from mx_jax.plan.model import transformer
      >>> llama = transformer(70.6e9, 80, width=8192, kv_width=1024, vocabulary=128256)
      >>> [(own.name, own.k, own.n) for own in llama.linears][2:]
      [('gate_up', 8192, 57344), ('down', 28672, 8192)]
    """
    given = {"params": params, "layers": layers, "width": width, "hidden": hidden}
    _check(given | {"kv_width": kv_width}, experts, experts_per_token)
    assumed = []
    if width is None:
        width = max(1, round(math.sqrt(params / (12 * layers)) / multiple)) * multiple
        assumed.append(f"width={width:,}, such that a block has its share of the parameters")
    if kv_width is None:
        kv_width = width
        assumed.append(f"kv_width={kv_width:,}, as many heads of keys as of queries")
    if hidden is None:
        left = (params - 2 * vocabulary * width) / layers - 2 * width * (width + kv_width)
        hidden = round(left / (3 * width * experts) / multiple) * multiple
        if hidden <= 0:
            raise ValueError(
                f"plan: nothing is left for the MLP, got params={params:,.0f}, layers={layers}, "
                f"width={width}, kv_width={kv_width}, vocabulary={vocabulary}; pass another width"
            )
        whose = "a gated MLP" if experts == 1 else f"{experts} gated MLPs"
        assumed.append(f"hidden={hidden:,}, what the parameters leave for {whose}")
    linears = _linears(width, hidden, kv_width, experts, experts_per_token)
    # A width that was rounded may need a little more than was given.
    most = max(round(params), layers * sum(linear.params for linear in linears))
    params = most if most < 1.02 * params else round(params)
    return Model(params=params, layers=layers, width=width, linears=linears, assumed=tuple(assumed))


def _check(given: dict[str, Any], experts: int, experts_per_token: int) -> None:
    given = given | {"experts": experts, "experts_per_token": experts_per_token}
    for name, value in given.items():
        if value is not None and not value > 0:
            raise ValueError(f"plan: {name} must be positive, got {name}={value}")
    if experts_per_token > experts:
        raise ValueError(
            f"plan: a token goes through some of the experts, got experts_per_token="
            f"{experts_per_token}, experts={experts}; pass --experts"
        )


def _linears(
    width: int, hidden: int, kv_width: int, experts: int, experts_per_token: int
) -> tuple[Linear, ...]:
    """The layers of a block."""
    routed: dict[str, Any] = {"experts": experts, "experts_per_token": experts_per_token}
    return (
        Linear(name="qkv", k=width, n=width + 2 * kv_width, split="column"),
        Linear(name="out", k=width, n=width, split="row"),
        Linear(name="gate_up", k=width, n=2 * hidden, split="column", **routed),
        # The weights that a router gives experts have a gradient, which reads what experts give.
        Linear(name="down", k=hidden, n=width, split="row", recomputed=experts > 1, **routed),
    )


# What each axis does; any of them may be missing.
AXES = ("data", "fsdp", "expert", "model", "pipe")
# How many microbatches a stage keeps residuals of, of its stages and of all of them.
SCHEDULES: dict[str, Callable[[int, int], int]] = {
    "gpipe": lambda stages, microbatches: microbatches,
    "1f1b": min,
}
_BFLOAT16, _FLOAT32 = np.dtype(jnp.bfloat16), np.dtype(np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """A mesh, and what every recipe shares on it."""

    data: int = 1  # devices along the axis that only shards tokens
    fsdp: int = 1  # devices along the axis that shards tokens, weights and the optimizer's state
    expert: int = 1  # devices along the axis that shards tokens and experts, but no other weights
    model: int = 1  # devices along the axis that shards features
    pipe: int = 1  # stages of a pipeline, each with its part of the blocks
    microbatches: int = 1  # that a step's tokens go through the stages in
    schedule: str = "gpipe"  # a row of `SCHEDULES`
    tokens: int  # of one step, of all devices together
    # Of activations, of values that are gathered and of sums between devices.
    dtype: np.dtype = _BFLOAT16
    param_dtype: np.dtype = _FLOAT32  # in which parameters are stored
    moments: int = 2  # how many float32 numbers the optimizer keeps a parameter
    # Mesh axes along which operands move as codes; along others, as values.
    codes: frozenset[str] = frozenset({"fsdp", "expert", "model"})
    # Whether the tokens between two linear layers are sharded along `model` too.
    sequence: bool = False
    remat: str = "none"  # a row of `memory.REMATS`

    def __post_init__(self):
        for name in AXES:
            if getattr(self, name) < 1:
                raise ValueError(f"plan: axes need a device, got {name}={getattr(self, name)}")
        if self.microbatches < 1 or (self.microbatches > 1 and self.pipe == 1):
            raise ValueError(
                f"plan: microbatches go through the stages of a pipeline, got microbatches="
                f"{self.microbatches} with pipe={self.pipe}; name pipe in --mesh, or leave them out"
            )
        groups = self.data * self.fsdp * self.expert * self.microbatches
        if self.tokens % groups:
            raise ValueError(
                f"plan: tokens are sharded along data, fsdp and expert, got tokens={self.tokens:,} "
                f"for data={self.data}, fsdp={self.fsdp}, expert={self.expert} and microbatches="
                f"{self.microbatches}; pass a multiple of {groups}"
            )

    @property
    def devices(self) -> int:
        """All of them."""
        return math.prod(getattr(self, name) for name in AXES)

    @property
    def local_tokens(self) -> int:
        """Tokens that one device, or those along `model` together, work on."""
        return self.tokens // (self.data * self.fsdp * self.expert)

    @property
    def in_flight(self) -> "Setup":
        """The same with the tokens that a stage keeps residuals of."""
        kept = SCHEDULES[self.schedule](self.pipe, self.microbatches)
        return dataclasses.replace(
            self, tokens=self.tokens * kept // self.microbatches, microbatches=1
        )

    def rows(self, linear: Linear) -> int:
        """Rows that a layer multiplies there: each token as often as it has experts."""
        return self.local_tokens * linear.experts_per_token

    def matrices(self, linear: Linear) -> int:
        """Experts of a layer that devices along `expert` have each; 1 for other layers."""
        return linear.experts // self.expert if linear.is_routed else 1

    def sends_codes(self, linear: Linear) -> bool:
        """Whether a layer of experts gets its input as codes."""
        return self.expert > 1 and linear.is_input_of_experts and "expert" in self.codes

    def check(self, model: Model) -> None:
        """Raise ValueError for blocks or experts that do not lie so on the mesh."""
        if model.layers % self.pipe:
            raise ValueError(
                f"plan: each stage of a pipeline has as many blocks, got layers={model.layers} for "
                f"pipe={self.pipe}; pass a number of stages that divides them"
            )
        routed = [linear for linear in model.linears if linear.is_routed]
        if self.expert > 1 and not routed:
            raise ValueError(
                f"plan: the axis expert shards experts, of which the model has none, got expert="
                f"{self.expert}; pass --experts, or use fsdp"
            )
        for linear in routed:
            if linear.experts % self.expert:
                raise ValueError(
                    f"plan: devices along expert have an equal part of the experts, got experts="
                    f"{linear.experts} with expert={self.expert}; pass a size that divides them"
                )
            if self.sequence and self.model > 1:
                raise ValueError(
                    "plan: rows that lie by expert are not gathered, whose groups would be torn "
                    f"apart, got --sequence-parallel with experts={linear.experts}, model="
                    f"{self.model}; leave it out, so that devices along model have the same tokens"
                )

    def weight_shards(self, linear: Linear) -> tuple[int, int]:
        """In how many parts the axes k and n of a weight are stored."""
        return (self.fsdp, self.model) if linear.split == "column" else (self.model, self.fsdp)


def parse_mesh(text: str) -> dict[str, int]:
    """`"data=4,fsdp=8"` as sizes."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        if name not in AXES or name in sizes or not size.isdecimal() or not int(size):
            raise ValueError(
                f"plan: mesh must name axes of {', '.join(AXES)} once with their sizes, got "
                f"mesh={text!r}; e.g. data=4,fsdp=64,model=8"
            )
        sizes[name] = int(size)
    return sizes
