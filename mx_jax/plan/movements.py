"""What moves between devices: the collectives of each kind of parallelism, as rows of data."""

import dataclasses
from typing import Literal

from mx_jax.axes import Side
from mx_jax.plan.mesh import Setup
from mx_jax.plan.model import Linear, Split

Tensor = Literal[
    "weight",
    "weight gradient",
    "input",
    "input gradient",
    "output",
    "output gradient",
    "block input",
    "block input gradient",
]
Pass = Literal["forward", "backward"]

# Bytes that a device receives, in parts of the whole tensor, of n devices in a ring.
COLLECTIVES = {
    "all-gather": 1,
    "reduce-scatter": 1,
    "all-reduce": 2,
    "all-to-all": 1,
    "collective-permute": 1,
}
# What one device sends to one other comes whole.
_FROM_ONE = frozenset({"collective-permute"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Movement:
    """One collective of every linear layer.

    Attributes:
      axis: the mesh axis.
      collective: a row of `COLLECTIVES`.
      tensor: what moves.
      during: the pass; what is forward happens again in a rematerialized block.
      operands: the operands of products that it gathers, as (product, side) of a recipe: one
        collective each where they move as codes, one for all as values. Sums have none.
      split: the layers that need it; None: all.
      routed: whether layers of experts need it, or others; None: all.
      each: how often it happens in a step: for each block; for each block and microbatch; or for
        each stage of a pipeline.
    """

    axis: str
    collective: str
    tensor: Tensor
    during: Pass
    operands: tuple[tuple[str, Side], ...] = ()
    split: Split | None = None
    routed: bool | None = None
    each: Literal["block", "microbatch", "stage"] = "block"

    def is_of(self, linear: Linear) -> bool:
        """Whether a layer needs it."""
        if self.each == "stage":
            return False
        return self.split in (None, linear.split) and self.routed in (None, linear.is_routed)


# Weights are gathered for each pass, in the orientation that its product contracts.
DATA_PARALLEL = (
    Movement(
        axis="fsdp",
        collective="all-gather",
        tensor="weight",
        during="forward",
        operands=(("fwd", "rhs"),),
        each="microbatch",
    ),
    Movement(
        axis="fsdp",
        collective="all-gather",
        tensor="weight",
        during="backward",
        operands=(("dlhs", "rhs"),),
        each="microbatch",
    ),
    Movement(
        axis="fsdp",
        collective="reduce-scatter",
        tensor="weight gradient",
        during="backward",
        each="microbatch",
    ),
    Movement(axis="data", collective="all-reduce", tensor="weight gradient", during="backward"),
)
_SENT_BACK = Movement(
    axis="expert",
    collective="all-to-all",
    tensor="output",
    during="forward",
    split="row",
    routed=True,
)
# Rows go to their experts, and products back; other weights are the same along the axis.
EXPERT_PARALLEL = (
    Movement(
        axis="expert",
        collective="all-to-all",
        tensor="input",
        during="forward",
        operands=(("fwd", "lhs"),),
        split="column",
        routed=True,
    ),
    _SENT_BACK,
    dataclasses.replace(_SENT_BACK, tensor="output gradient", during="backward"),
    dataclasses.replace(_SENT_BACK, tensor="input gradient", during="backward", split="column"),
    Movement(
        axis="expert",
        collective="all-reduce",
        tensor="weight gradient",
        during="backward",
        routed=False,
    ),
)
# Activations are whole along `model` between layers: only sums of partial products move.
TENSOR_PARALLEL = (
    Movement(axis="model", collective="all-reduce", tensor="output", during="forward", split="row"),
    Movement(
        axis="model",
        collective="all-reduce",
        tensor="input gradient",
        during="backward",
        split="column",
    ),
)
# Tokens are sharded along `model` between layers, and gathered for each product.
SEQUENCE_PARALLEL = (
    Movement(
        axis="model",
        collective="all-gather",
        tensor="input",
        during="forward",
        operands=(("fwd", "lhs"),),
        split="column",
    ),
    Movement(
        axis="model", collective="reduce-scatter", tensor="output", during="forward", split="row"
    ),
    Movement(
        axis="model",
        collective="all-gather",
        tensor="output gradient",
        during="backward",
        operands=(("dlhs", "lhs"), ("drhs", "lhs")),
        split="row",
    ),
    Movement(
        axis="model",
        collective="all-gather",
        tensor="input",
        during="backward",
        operands=(("drhs", "rhs"),),
        split="column",
    ),
    Movement(
        axis="model",
        collective="reduce-scatter",
        tensor="input gradient",
        during="backward",
        split="column",
    ),
)


# From stage to stage. Cotangents go back as they are, whatever the blocks' input came as.
PIPELINE = (
    Movement(
        axis="pipe",
        collective="collective-permute",
        tensor="block input",
        during="forward",
        operands=(("fwd", "lhs"),),
        each="stage",
    ),
    Movement(
        axis="pipe",
        collective="collective-permute",
        tensor="block input gradient",
        during="backward",
        each="stage",
    ),
)


def movements(setup: Setup) -> tuple[Movement, ...]:
    """What moves on a mesh, along axes with more than one device."""
    along_model = SEQUENCE_PARALLEL if setup.sequence else TENSOR_PARALLEL
    every = (*DATA_PARALLEL, *EXPERT_PARALLEL, *along_model, *PIPELINE)
    return tuple(own for own in every if getattr(setup, own.axis) > 1)


def received(own: Movement, devices: int) -> float:
    """What part of a tensor, times how often, each of so many devices receives."""
    lacking = 1.0 if own.collective in _FROM_ONE else (devices - 1) / devices
    return COLLECTIVES[own.collective] * lacking
