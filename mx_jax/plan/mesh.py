"""How a step is spread over devices, and at what precision what is not quantized moves."""

import dataclasses
import math
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from mx_jax.plan.model import Linear, Model

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
    """A mesh, and what every recipe shares on it.

    Attributes:
      data: devices along the axis that only shards tokens.
      fsdp: devices along the axis that shards tokens, weights and the optimizer's state.
      expert: devices along the axis that shards tokens and experts, but no other weights.
      model: devices along the axis that shards features.
      pipe: stages of a pipeline, each with its part of the blocks.
      microbatches: that a step's tokens go through the stages in.
      schedule: a row of `SCHEDULES`.
      tokens: of one step, of all devices together.
      dtype: of activations, of values that are gathered and of sums between devices.
      param_dtype: in which parameters are stored.
      moments: how many float32 numbers the optimizer keeps a parameter.
      codes: mesh axes along which operands move as codes; along others, as values.
      sequence: whether the tokens between two linear layers are sharded along `model` too.
      remat: a row of `memory.REMATS`.
    """

    data: int = 1
    fsdp: int = 1
    expert: int = 1
    model: int = 1
    pipe: int = 1
    microbatches: int = 1
    schedule: str = "gpipe"
    tokens: int
    dtype: np.dtype = _BFLOAT16
    param_dtype: np.dtype = _FLOAT32
    moments: int = 2
    codes: frozenset[str] = frozenset({"fsdp", "expert"})
    sequence: bool = False
    remat: str = "none"

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
    """`"data=4,fsdp=8"` as sizes.

    Raises:
      ValueError: another axis, one given twice, or no positive number.

    Examples:
      >>> from mx_jax.plan.mesh import parse_mesh
      >>> parse_mesh("data=4,fsdp=8")
      {'data': 4, 'fsdp': 8}
    """
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
