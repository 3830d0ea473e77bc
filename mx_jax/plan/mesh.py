"""How a step is spread over devices, and at what precision what is not quantized moves."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

from mx_jax.plan.model import Linear, Model

# What each axis does; any of them may be missing.
AXES = ("data", "fsdp", "expert", "model")
_BFLOAT16, _FLOAT32 = np.dtype(jnp.bfloat16), np.dtype(np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """A mesh, and what every recipe shares on it.

    Attributes:
      data: devices along the axis that only shards tokens.
      fsdp: devices along the axis that shards tokens, weights and the optimizer's state.
      expert: devices along the axis that shards tokens and experts, but no other weights.
      model: devices along the axis that shards features.
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
        groups = self.data * self.fsdp * self.expert
        if self.tokens % groups:
            raise ValueError(
                f"plan: tokens are sharded along data, fsdp and expert, got tokens={self.tokens:,} "
                f"for data={self.data}, fsdp={self.fsdp}, expert={self.expert}; pass a multiple of "
                f"{groups}"
            )

    @property
    def devices(self) -> int:
        """All of them."""
        return math.prod(getattr(self, name) for name in AXES)

    @property
    def local_tokens(self) -> int:
        """Tokens that one device, or those along `model` together, work on."""
        return self.tokens // (self.data * self.fsdp * self.expert)

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
        """Raise ValueError for layers of experts that do not lie so on the mesh."""
        routed = [linear for linear in model.linears if linear.is_routed]
        if self.expert > 1 and not routed:
            raise ValueError(
                f"plan: the axis expert shards experts, of which the model has none, got expert="
                f"{self.expert}; pass --experts, or use fsdp"
            )
        for linear in routed:
            if linear.experts % self.expert or self.model > 1:
                raise ValueError(
                    f"plan: devices along expert have an equal part of the experts, each whole, "
                    f"got experts={linear.experts} with expert={self.expert}, model={self.model}; "
                    "shard them along expert and fsdp, and leave model out"
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
