"""Bytes of a training step: what a device receives, movement by movement, and what it keeps."""

import dataclasses
import math
from typing import Literal, NamedTuple

from mx_jax.axes import Side
from mx_jax.formats import BlockFormat
from mx_jax.ops.ragged_dot import goes_by_row
from mx_jax.plan.model import Linear, Model, Setup, Split
from mx_jax.specs import MatmulRecipe, OperandSpec, Residuals

# Bytes that a device receives, in parts of the whole tensor, of n devices in a ring.
COLLECTIVES = {
    "all-gather": 1,
    "reduce-scatter": 1,
    "all-reduce": 2,
    "all-to-all": 1,
    "collective-permute": 1,
}


@dataclasses.dataclass(frozen=True)
class Movement:
    """One collective of every linear layer."""

    axis: str  # the mesh axis
    collective: str  # a row of `COLLECTIVES`
    tensor: str  # what moves
    # The pass; what is forward happens again in a rematerialized block.
    during: Literal["forward", "backward"]
    # The operands of products that it gathers, as (product, side) of a recipe: one
    # collective each where they move as codes, one for all as values. Sums have none.
    operands: tuple[tuple[str, Side], ...] = ()
    split: Split | None = None  # the layers that need it; None: all
    routed: bool | None = None  # whether layers of experts need it, or others; None: all
    # How often it happens in a step: for each block; for each block and microbatch; or for
    # each stage of a pipeline.
    each: Literal["block", "microbatch", "stage"] = "block"

    def is_of(self, linear: Linear) -> bool:
        """Whether a layer needs it."""
        if self.each == "stage":
            return False
        return self.split in (None, linear.split) and self.routed in (None, linear.is_routed)


# Weights are gathered for each pass, in the orientation that its product contracts. Rows go to
# their experts, and products back; other weights are the same along that axis.
DATA_AND_EXPERT_PARALLEL = (
    Movement("fsdp", "all-gather", "weight", "forward", (("fwd", "rhs"),), each="microbatch"),
    Movement("fsdp", "all-gather", "weight", "backward", (("dlhs", "rhs"),), each="microbatch"),
    Movement("fsdp", "reduce-scatter", "weight gradient", "backward", each="microbatch"),
    Movement("data", "all-reduce", "weight gradient", "backward"),
    Movement("expert", "all-to-all", "input", "forward", (("fwd", "lhs"),), "column", True),
    Movement("expert", "all-to-all", "output", "forward", split="row", routed=True),
    Movement("expert", "all-to-all", "output gradient", "backward", split="row", routed=True),
    Movement("expert", "all-to-all", "input gradient", "backward", split="column", routed=True),
    Movement("expert", "all-reduce", "weight gradient", "backward", routed=False),
)
# Activations are whole along `model` between layers: only sums of partial products move.
TENSOR_PARALLEL = (
    Movement("model", "all-reduce", "output", "forward", split="row"),
    Movement("model", "all-reduce", "input gradient", "backward", split="column"),
)
_COTANGENT: tuple[tuple[str, Side], ...] = (("dlhs", "lhs"), ("drhs", "lhs"))
# Tokens are sharded along `model` between layers, and gathered for each product.
SEQUENCE_PARALLEL = (
    Movement("model", "all-gather", "input", "forward", (("fwd", "lhs"),), "column"),
    Movement("model", "reduce-scatter", "output", "forward", split="row"),
    Movement("model", "all-gather", "output gradient", "backward", _COTANGENT, "row"),
    Movement("model", "all-gather", "input", "backward", (("drhs", "rhs"),), "column"),
    Movement("model", "reduce-scatter", "input gradient", "backward", split="column"),
)
_PERMUTE = "collective-permute"
# From stage to stage. Cotangents go back as they are, whatever the blocks' input came as.
PIPELINE = (
    Movement("pipe", _PERMUTE, "block input", "forward", (("fwd", "lhs"),), each="stage"),
    Movement("pipe", _PERMUTE, "block input gradient", "backward", each="stage"),
)


def movements(setup: Setup) -> tuple[Movement, ...]:
    """What moves on a mesh, along axes with more than one device."""
    along_model = SEQUENCE_PARALLEL if setup.sequence else TENSOR_PARALLEL
    every = (*DATA_AND_EXPERT_PARALLEL, *along_model, *PIPELINE)
    return tuple(own for own in every if getattr(setup, own.axis) > 1)


def received(own: Movement, devices: int) -> float:
    """What part of a tensor, times how often, each of so many devices receives."""
    # What one device sends to one other comes whole.
    lacking = 1.0 if own.collective == _PERMUTE else (devices - 1) / devices
    return COLLECTIVES[own.collective] * lacking


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that one device receives in a step by one kind of movement."""

    movement: Movement  # which
    bytes: float  # of all layers
    as_codes: tuple[str, ...]  # layers of a block whose operands move as codes
    as_values: tuple[str, ...]  # those whose operands move as values


def traffic(model: Model, setup: Setup, recipe: MatmulRecipe) -> tuple[Traffic, ...]:
    """What a device receives in a step, movement by movement."""
    return tuple(_traffic(own, model, setup, recipe) for own in movements(setup))


def _traffic(own: Movement, model: Model, setup: Setup, recipe: MatmulRecipe) -> Traffic:
    if own.each == "stage":
        return _between_stages(own, model, setup, recipe)
    size, blocks = getattr(setup, own.axis), model.layers // setup.pipe
    share = received(own, size)
    often = setup.microbatches if own.each == "microbatch" else 1
    total, as_codes, as_values = 0.0, [], []
    for linear in model.linears:
        if not own.is_of(linear):
            continue
        moved, coded = moved_bytes(own, linear, setup, recipe)
        times = 2 if is_repeated(own, linear, setup, recipe) else 1
        total += often * times * blocks * moved
        (as_codes if coded else as_values).append(linear.name)
    if own.tensor.startswith("weight"):
        # Embedding and head are gathered and summed like weights, always as values, and once: they
        # lie before and behind the pipeline.
        shards = setup.model * setup.pipe * (1 if own.axis == "fsdp" else setup.fsdp)
        total += model.other_params / shards * setup.dtype.itemsize
    return Traffic(
        movement=own, bytes=total * share, as_codes=tuple(as_codes), as_values=tuple(as_values)
    )


def _between_stages(own: Movement, model: Model, setup: Setup, recipe: MatmulRecipe) -> Traffic:
    """What a stage amid others receives: the tokens of all microbatches, as wide as the model."""
    tokens = setup.local_tokens / (setup.model if setup.sequence else 1)
    total, is_coded = tokens * model.width * setup.dtype.itemsize, False
    format = _format(recipe, own.operands[0]) if own.operands else None
    if format is not None and own.axis in setup.codes:
        blocks = _blocks(format, own.tensor, own.operands[0])
        total, is_coded = quantized_bytes(format, (round(tokens), model.width), blocks), True
    stages = ("stages",)
    return Traffic(
        movement=own,
        bytes=total * received(own, setup.pipe),
        as_codes=stages if is_coded else (),
        as_values=() if is_coded else stages,
    )


def is_repeated(own: Movement, linear: Linear, setup: Setup, recipe: MatmulRecipe) -> bool:
    """Whether it happens once more in the backward pass, in a block that is rematerialized.

    Values that the backward pass gathers anyway are gathered once for both.
    """
    if own.during != "forward" or setup.remat == "none" or not linear.recomputed:
        return False
    if own.collective != "all-gather" or moved_bytes(own, linear, setup, recipe)[1]:
        return True
    backward = dataclasses.replace(own, during="backward")
    alike = (
        other
        for other in movements(setup)
        if dataclasses.replace(other, operands=own.operands) == backward
    )
    return all(moved_bytes(other, linear, setup, recipe)[1] for other in alike)


def moved_bytes(
    own: Movement, linear: Linear, setup: Setup, recipe: MatmulRecipe
) -> tuple[float, bool]:
    """Bytes of the whole tensor, or of the part that devices along the axis share, and whether they
    are codes."""
    shape = _shape(own, linear, setup)
    formats = [_format(recipe, operand) for operand in own.operands]
    count = setup.matrices(linear) if own.tensor.startswith("weight") else 1
    values = count * math.prod(shape) * setup.dtype.itemsize
    if own.axis not in setup.codes or not formats:
        return values, False
    if own.axis == "expert" and not goes_by_row(recipe.fwd):
        return values, False
    total = 0.0
    for format, operand in zip(formats, own.operands, strict=True):
        if format is None:
            return values, False
        blocks = _blocks(format, own.tensor, operand)
        if linear.is_routed and not _whole_blocks(own, linear, setup, blocks):
            return values, False
        total += count * quantized_bytes(format, shape, blocks)
    return total, True


def quantized_bytes(
    format: BlockFormat, shape: tuple[int, int], blocks: tuple[int | None, int | None]
) -> float:
    """Codes at their real width, and scales. Blocks of None hold a whole axis."""
    pairs = zip(shape, blocks, strict=True)
    scales = (1 if size is None else -(-length // size) for length, size in pairs)
    return (math.prod(shape) * format.element.bits + math.prod(scales) * format.scale.bits) / 8


def _format(recipe: MatmulRecipe, operand: tuple[str, Side]) -> BlockFormat | None:
    product, side = operand
    spec = getattr(getattr(recipe, product), side)
    return None if spec is None else spec.format


def _blocks(
    format: BlockFormat, tensor: str, operand: tuple[str, Side]
) -> tuple[int | None, int | None]:
    """Sizes of blocks along both axes of a weight `[k, n]` or of activations `[tokens, features]`.

    `fwd` contracts k, `dlhs` n and `drhs` the tokens.
    """
    kept, contracting = (size if isinstance(size, int) else None for size in format.block)
    product, _ = operand
    first = product == "drhs" or (tensor == "weight" and product == "fwd")
    return (contracting, kept) if first else (kept, contracting)


def _shape(own: Movement, linear: Linear, setup: Setup) -> tuple[int, int]:
    """What is whole after gathering, or before it is scattered, on one device."""
    features = linear.k if own.tensor.startswith("input") else linear.n
    if not own.tensor.startswith("weight"):
        return setup.rows(linear), features
    parts = list(setup.weight_shards(linear))
    if own.axis == "fsdp":
        parts[0 if linear.split == "column" else 1] = 1
    return -(-linear.k // parts[0]), -(-linear.n // parts[1])


def _whole_blocks(
    own: Movement, linear: Linear, setup: Setup, blocks: tuple[int | None, int | None]
) -> bool:
    """Whether no block straddles two shards: else `ragged_dot` gathers values."""
    if own.tensor == "weight":
        lengths, parts = (linear.k, linear.n), setup.weight_shards(linear)
    else:
        lengths, parts = _shape(own, linear, setup), (setup.model, 1)
    return all(
        count == 1 or size is None or (length % count == 0 and length // count % size == 0)
        for length, count, size in zip(lengths, parts, blocks, strict=True)
    )


class Remat(NamedTuple):
    """What `jax.checkpoint` around each block keeps."""

    operands: bool  # the operands of products, as a program without it does
    quantized: bool  # codes and scales that the forward products take
    inputs: bool  # what goes into the block


REMATS = {
    "none": Remat(operands=True, quantized=False, inputs=False),
    "nothing_saveable": Remat(operands=False, quantized=False, inputs=True),
    "save_quantized": Remat(operands=False, quantized=True, inputs=True),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one device."""

    parameters: float  # as stored
    gradients: float  # of one step, in the parameters' dtype
    optimizer: float  # its moments
    residuals: float  # what linear layers keep between the passes, or rematerialized blocks do

    @property
    def total(self) -> float:
        """The sum."""
        return self.parameters + self.gradients + self.optimizer + self.residuals


def memory(model: Model, setup: Setup, recipe: MatmulRecipe) -> Memory:
    """What a device keeps of a model on a mesh."""
    routed = sum(linear.params for linear in model.linears if linear.is_routed) * model.layers
    shards = setup.fsdp * setup.model * setup.pipe
    own = (model.params - routed + routed / setup.expert) / shards
    return Memory(
        parameters=own * setup.param_dtype.itemsize,
        gradients=own * setup.param_dtype.itemsize,
        optimizer=own * setup.moments * 4,
        residuals=model.layers / setup.pipe * block_residuals(model, setup.in_flight, recipe),
    )


def block_residuals(model: Model, setup: Setup, recipe: MatmulRecipe) -> float:
    """Bytes that one block keeps on a device from its forward to its backward pass."""
    remat, itemsize = REMATS[setup.remat], setup.dtype.itemsize
    total = 0.0
    if remat.inputs:
        tokens = setup.local_tokens / (setup.model if setup.sequence else 1)
        total += tokens * model.width * itemsize
    for linear in model.linears:
        shape = input_shape(linear, setup)
        # What arrives as codes is kept as codes.
        sent = setup.sends_codes(linear) and goes_by_row(recipe.fwd)
        primal = recipe.residuals is Residuals.PRIMAL and not sent
        if remat.operands and sent and recipe.residuals is Residuals.PRIMAL:
            assert recipe.fwd.lhs is not None
            total += stored_bytes(recipe.fwd.lhs, shape[0] * shape[1])
        elif remat.operands and primal:
            # Weights are parameters: they are there anyway.
            total += shape[0] * shape[1] * itemsize
        elif remat.operands or (remat.quantized and (linear.recomputed or not primal)):
            total += _kept(linear, setup, recipe, shape, primal=remat.operands)
    return total


def _kept(
    linear: Linear,
    setup: Setup,
    recipe: MatmulRecipe,
    shape: tuple[float, float],
    primal: bool,
) -> float:
    """Codes of both forward operands; with `primal` also the input, if it stays as it came."""
    lhs, rhs = recipe.fwd.lhs, recipe.fwd.rhs
    weight = linear.k * linear.n * setup.matrices(linear) / (setup.fsdp * setup.model)
    total = 0.0
    if lhs is not None:
        total += stored_bytes(lhs, shape[0] * shape[1]) + _mask_bytes(recipe, shape[0] * shape[1])
    elif primal:
        total += shape[0] * shape[1] * setup.dtype.itemsize
    if rhs is not None:
        total += stored_bytes(rhs, weight) + _mask_bytes(recipe, weight)
    return total


def _mask_bytes(recipe: MatmulRecipe, elements: float) -> float:
    """What says which elements were clipped, where codes are kept: a bit each."""
    kept = recipe.mask_clipped and recipe.residuals is Residuals.QUANTIZED
    return elements / 8 if kept else 0.0


def input_shape(linear: Linear, setup: Setup) -> tuple[float, float]:
    """Tokens and features of a layer's input that lie on one device."""
    tokens = setup.rows(linear)
    if linear.split == "row":
        return tokens, linear.k / setup.model
    return tokens / (setup.model if setup.sequence else 1), linear.k


def stored_bytes(spec: OperandSpec, elements: float) -> float:
    """Codes in memory, a byte each however few their bits, and scales."""
    return elements * (1 + scale_share(spec.format))


def scale_share(format: BlockFormat) -> float:
    """Bytes of scales for each element; those of whole axes are too few to count."""
    return (format.bits_per_element - format.element.bits) / 8
